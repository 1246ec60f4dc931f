"""A rule of one's own, and three models in a row: run after `make demo`, which makes the drafter."""

from dataclasses import dataclass

import torch

from speccascade import SpeculativeCascade, rules
from speccascade.cascade import VerifyBlock, early_exit
from speccascade.data.pairs import PairConfig, load_pair


@dataclass(frozen=True)
class FirstTokensByVerifier:
    """Follow the verifier for the first tokens of an answer, then the drafter; any object with `target` will do."""

    prompt_length: int
    count: int

    def target(self, block: VerifyBlock) -> torch.Tensor:
        """Return π ``[B, T, V]``; it may depend on positions and on both models, never on the drafted tokens."""
        early = (block.positions < self.prompt_length + self.count).unsqueeze(-1)
        return torch.where(early, block.verifier_probs, block.draft_probs)


def main() -> None:
    """Generate with the rule, then with a cascade that drafts for a cascade."""
    pair = load_pair(PairConfig("runs/demo/drafter", "embedded:smollm2-135m-instruct"))
    chat = [{"role": "user", "content": "A farmer has 12 cows and buys 5. How many has he?"}]
    ids = pair.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)

    rule = FirstTokensByVerifier(prompt_length=ids.shape[1], count=10)
    two = SpeculativeCascade(pair.drafter, pair.verifier, rule, vocab_size=pair.vocab_size)
    out = two.generate(ids, max_new_tokens=40, ledger=True)
    print(pair.tokenizer.decode(out.sequences[0, ids.shape[1] :]))
    print("written by:", " ".join(entry.writer for entry in out.ledger[0]))

    small = early_exit(pair.drafter, 14)
    drafting = SpeculativeCascade(small, pair.drafter, rules.OPT(alpha=0.1), gamma=2, vocab_size=pair.vocab_size)
    three = SpeculativeCascade(drafting, pair.verifier, rules.TokenV2(alpha=0.3), vocab_size=pair.vocab_size)
    out = three.generate(ids, max_new_tokens=40, temperature=0.7, seed=0)
    print(pair.tokenizer.decode(out.sequences[0, ids.shape[1] :]))
    print(f"{out.stats.calls_per_token:.2f} calls of the largest model a token")


if __name__ == "__main__":
    main()
