"""``speccascade generate``: prompts to text with a cascade, and on request who wrote which token and at what cost."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from .options import CommandLine, to_plain, write_config
from .request import GenerateConfig, complete

if TYPE_CHECKING:
    from ..cascade.results import GenerationResult, GenerationStats

__all__ = ["run"]

DESCRIPTION = """\
Write text with a speculative cascade: the drafter proposes tokens, the verifier checks them, a rule decides
whose distribution each token follows.

Prompts come from the command line, from --file (one a line) or from stdin (all of it is one prompt).
Text goes to stdout, everything else to stderr. The decision is made by a plug-in rule (--rule opt --alpha 0.3),
by a trained router (--router DIR, its α from --alpha, from --budget or as stored), or by nobody (--alone).
Without any of these, the router of the demo is used. A router brings the names of its pair along."""

EXAMPLE = """\
  speccascade generate "A farmer has 12 cows and buys 5. How many?" --show --stats
  speccascade generate --router runs/demo/router --budget 0.1 --file questions.txt --json
  speccascade generate --router runs/demo/router --budget 0.02 --budget-kind quality_drop --confidence 0.9 "Why?"
  speccascade generate --drafter HuggingFaceTB/SmolLM2-135M-Instruct --verifier HuggingFaceTB/SmolLM2-1.7B-Instruct \\
      --rule opt --alpha 0.3 "Write a haiku about rain."
  echo "Once upon a time" | speccascade generate --alone verifier --no-chat --temperature 0.8"""


def run(arguments: list[str]) -> None:
    """Parse the arguments, load the models and write."""
    config = CommandLine("generate", GenerateConfig, DESCRIPTION, EXAMPLE, positional="prompts").parse(arguments)
    config = complete(config)
    # What follows loads torch: only now, when the arguments are known to be right.
    from .writers import load_writer

    config, writer = load_writer(config)
    results, lines = [], []
    for prompt in config.prompts:
        result = writer.write(prompt)
        text = writer.text_of(result)
        results.append(result)
        lines.append(json.dumps(_record(prompt, text, result), ensure_ascii=False) if config.json else text)
        if config.out is None and not config.show:
            print(lines[-1], flush=True)
        if config.show:
            from .ledger import show

            show(writer.tokenizer, result)
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        write_config(config, config.out.parent, f"{config.out.name}.config.yaml")
    if config.stats:
        print(_summary([result.stats for result in results]), file=sys.stderr)


def _record(prompt: str, text: str, result: GenerationResult) -> dict[str, Any]:
    counts = {name: value for name, value in to_plain(result.stats).items() if name != "per_sequence"}
    return {"prompt": prompt, "text": text, "stats": counts}


def _summary(parts: list[GenerationStats]) -> str:
    """Describe what all prompts cost together, each rate with its denominator."""
    total = type(parts[0]).total(tuple(parts), sum(part.seconds for part in parts))
    lines = []
    if total.examined:
        lines += [
            f"acceptance  {total.acceptance_rate:6.1%}  ({total.accepted} of {total.examined} examined drafts)",
            f"deferral    {total.deferral_rate:6.1%}  ({total.deferred} of {total.examined} examined drafts)",
            f"rejection   {total.rejection_rate:6.1%}  ({total.rejected} of {total.examined} examined drafts)",
        ]
    calls = f"{total.verifier_calls} verifier, {total.drafter_calls} drafter"
    lines += [
        f"calls       {calls}; {total.calls_per_token:.2f} verifier calls a token",
        f"tokens      {total.new_tokens} in {total.seconds:.2f} s: {total.tokens_per_second:.1f} a second",
    ]
    return "\n".join(lines)
