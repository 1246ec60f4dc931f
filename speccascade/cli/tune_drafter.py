"""``speccascade tune-drafter``: a drafter out of the verifier's own layers."""

from __future__ import annotations

from .options import CommandLine, write_config

__all__ = ["run"]

DESCRIPTION = """\
Make a drafter for a verifier that has no small sibling: keep a few of the verifier's own layers, chosen by how
little they change its predictions, and tune them on your prompts with references. The result is an ordinary
Hugging Face folder that any other command takes as --pair.drafter, with a provenance.json that says what it cost.
The same settings and folder again change nothing."""

EXAMPLE = """\
  speccascade tune-drafter --config configs/tune-drafter/demo.yaml
  speccascade tune-drafter --out runs/mine/drafter --verifier HuggingFaceTB/SmolLM2-360M-Instruct --layers 20 \\
      --prompts.source questions.jsonl --steps 500"""


def run(arguments: list[str]) -> None:
    """Parse the arguments and tune."""
    from ..training.tune_drafter import TuneDrafterConfig, tune_drafter

    config = CommandLine("tune-drafter", TuneDrafterConfig, DESCRIPTION, EXAMPLE).parse(arguments)
    write_config(config, tune_drafter(config))
