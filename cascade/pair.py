"""What every execution of a cascade shares: a drafter, and a verifier that reads what it has not read yet.

Knows no rule, no threshold and no block: it lets the drafter take one step, lets the verifier read, and keeps both in
step with the kept tokens.

Shapes: ``B`` row, ``K`` positions asked for, ``V`` token, ``H`` hidden state.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from .adapters import as_drafter, as_language_model, check_decoder_start, vocabulary_of
from .distribute import distribute
from .distributions import Sampling
from .drafters import Draft, Drafter, DraftRequest, DraftState, pad_unread
from .forms import Distribution, FromLogits
from .generation import GenerationLoop
from .models import CausalLM, PrefixState, read_tokens
from .processing import process_logits

__all__ = ["PairLoop", "PairState", "Scored", "draft_one", "score", "tokens_of"]


class PairLoop(GenerationLoop):
    """A drafter and a verifier over one vocabulary.

    Args:
        drafter: a Hugging Face model or any `Drafter`.
        verifier: a Hugging Face model or any `CausalLM`.
        vocab_size: number of token ids that both models share and may emit; default: the smaller head.

    Raises:
        ValueError: two vocabularies, or a model that cannot be run exactly.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        verifier: PreTrainedModel | CausalLM,
        vocab_size: int | None = None,
    ) -> None:
        if vocab_size is None:
            vocab_size = min(vocabulary_of(drafter), vocabulary_of(verifier))
        self.verifier = as_language_model(verifier, vocab_size)
        self.drafter = as_drafter(drafter, vocab_size)
        check_decoder_start(self.drafter, self.verifier)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the pair may emit."""
        return self.verifier.vocab_size

    @property
    def max_length(self) -> int | None:
        """Number of positions that both models know."""
        known = [getattr(model, "max_length", None) for model in (self.drafter, self.verifier)]
        return min((length for length in known if length is not None), default=None)

    @property
    def decoder_start(self) -> int | None:
        """First token of every row of an encoder-decoder."""
        return getattr(self.verifier, "decoder_start", None)


class PairState:
    """Both models' caches for one call of ``generate``."""

    def __init__(self, pair: PairLoop, prompts: Sequence[Sequence[int]]) -> None:
        self._verifier = pair.verifier
        self.drafting = pair.drafter.start(prompts)
        self.verifying = pair.verifier.start(prompts)

    def draft(self, rows: Sequence[Sequence[int]], uniforms: Float[Tensor, "B 1"], sampling: Sampling) -> Draft:
        """One step of the drafter: `draft_one`."""
        return draft_one(self.drafting, rows, uniforms, sampling)

    def verify(
        self, rows: Sequence[Sequence[int]], sampling: Sampling, positions: int = 1
    ) -> tuple[Distribution, Distribution]:
        """One pass of the verifier: p and p° of `score`."""
        scored = score(self._verifier, self.verifying, rows, sampling, positions, "verifier")
        return scored.law, scored.raw

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget all but at most the first ``lengths[i]`` tokens of row i."""
        self.drafting.rollback(lengths)
        self.verifying.rollback([min(pair) for pair in zip(lengths, self.verifying.lengths, strict=True)])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.drafting.select_rows(rows)
        self.verifying.select_rows(rows)


class Scored(NamedTuple):
    """What a model says at K positions of each row: p, p°, and its hidden states if asked for."""

    law: Distribution
    raw: Distribution
    hidden: Float[Tensor, "B K H"] | None


def score(
    model: CausalLM,
    state: PrefixState,
    rows: Sequence[Sequence[int]],
    sampling: Sampling,
    positions: int,
    role: str,
    hidden: bool = False,
) -> Scored:
    """One pass of a model over all that it has not read yet: p and p° at the last ``positions`` of each row.

    The last of them is the position after the row's last token. ``role`` is how an error calls the model; ``hidden``
    asks for its hidden states there.
    """
    unread, counts = pad_unread(rows, state.lengths, model.device)
    logits, states = read_tokens(state, unread, counts, positions, hidden)
    law = distribute(process_logits(logits, rows, sampling), sampling, f"the {role} {model.name}")
    return Scored(law, law if sampling.is_plain else FromLogits(logits), states)


def draft_one(
    state: DraftState, rows: Sequence[Sequence[int]], uniforms: Float[Tensor, "B 1"], sampling: Sampling
) -> Draft:
    """One step of a drafter: draw a token after every row, with q and q° there; it keeps no more than the rows."""
    draft = state.propose(DraftRequest(rows, [1] * len(rows), uniforms, sampling))
    state.rollback([len(row) for row in rows])
    return draft


def tokens_of(draft: Draft) -> list[int]:
    """Return the one token that each row drafted."""
    tokens: list[int] = draft.tokens[:, 0].tolist()
    return tokens
