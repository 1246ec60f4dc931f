"""Speculative sampling from any target π: accept, reject, replace, and the exact law of what comes out.

Knows no model and no rule. Source: Narasimhan et al., ICLR 2025, Algorithm 4; Leviathan et al., ICML 2023.

Shapes: ``B`` sequence, ``T`` position in the block, ``V`` token.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .distributions import draw, residual
from .forms import Distribution
from .targets import Target

__all__ = [
    "Verdict",
    "acceptance_probability",
    "emission_law",
    "judge",
    "rejection_probability",
    "verify_block",
]


@dataclass(frozen=True)
class Verdict:
    """How far each drafted sequence was accepted, and what replaces the first rejected token.

    ``accepted`` ``[B]`` counts the tokens before the first rejection; ``replacement`` ``[B]`` is the token drawn from
    the residual there, or −1 where the whole block was accepted.
    """

    accepted: Int[Tensor, "B"]
    replacement: Int[Tensor, "B"]


def acceptance_probability(
    target_probs: Float[Tensor, "B T V"], draft_probs: Float[Tensor, "B T V"], tokens: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """min(1, π(x)/q(x)) at each drafted token; 1 where π leaves nothing to replace it from."""
    index = tokens.unsqueeze(-1)
    draft, target = draft_probs.gather(-1, index).squeeze(-1), target_probs.gather(-1, index).squeeze(-1)
    ratio = torch.where(draft > 0, target / draft.clamp_min(torch.finfo(torch.float32).tiny), (target > 0).float())
    replaceable = (target_probs > draft_probs).any(dim=-1)
    return torch.where(replaceable, ratio.clamp_max(1), torch.ones_like(ratio))


def rejection_probability(
    target_probs: Float[Tensor, "*batch V"], draft_probs: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """Σ max(0, q − π): the chance that a token drafted from q is rejected; D_TV(q, π) where Σπ = 1."""
    return (draft_probs - target_probs).clamp_min(0).sum(dim=-1)


def emission_law(
    target_probs: Float[Tensor, "*batch V"], draft_probs: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch V"]:
    """Accept mass + rejection mass × residual: the exact law of an emitted token. It equals π where Σπ = 1."""
    rejected = rejection_probability(target_probs, draft_probs).unsqueeze(-1)
    return torch.minimum(draft_probs, target_probs) + rejected * residual(target_probs, draft_probs)


def verify_block(
    target_probs: Float[Tensor, "B T V"],
    draft_probs: Float[Tensor, "B T V"],
    tokens: Int[Tensor, "B T"],
    uniforms: Float[Tensor, "B U"],
) -> Verdict:
    """Accept drafted tokens one by one with min(1, π/q); replace the first rejected one from the residual.

    Everything after the first rejection is dropped. Row i uses ``uniforms[i, :T]`` for the tests and the last one,
    ``uniforms[i, -1]``, for the replacement (U ≥ T + 1).
    """
    batch, length = tokens.shape
    acceptance = acceptance_probability(target_probs, draft_probs, tokens)
    passed = uniforms[:, :length].to(acceptance.device) < acceptance  # in the uniforms' precision: none may round to 1
    accepted = passed.long().cumprod(dim=-1).sum(dim=-1)
    rows = torch.arange(batch, device=accepted.device)
    first_rejected = accepted.clamp_max(length - 1)
    excess = residual(target_probs[rows, first_rejected], draft_probs[rows, first_rejected])
    return Verdict(accepted, torch.where(accepted == length, -1, draw(excess, uniforms[:, -1])))


def judge(
    target: Target,
    draft: Distribution,
    tokens: Int[Tensor, "B T"],
    uniforms: Float[Tensor, "B U"],
    lengths: Int[Tensor, "B"],
) -> tuple[Int[Tensor, "B"], Float[Tensor, "B V"] | None]:
    """Give the verdict of `verify_block` from no more of π than it takes.

    Args:
        target: π over the block.
        draft: q over the block.
        tokens: the drafted tokens; row i holds ``lengths[i]`` of them, the rest is padding.
        uniforms: row i uses ``uniforms[i, :T]`` for the tests (U ≥ T).
        lengths: at least 1 each.

    Returns:
        How many tokens of each row are accepted, and max(0, π − q) at each row's first rejected position: what its
        replacement is drawn from. None where every row was accepted whole; of no meaning for a row that was.
    """
    chance, wanted = draft.at(tokens), target.at_tokens()
    ratio = torch.where(chance > 0, wanted / chance.clamp_min(torch.finfo(torch.float32).tiny), (wanted > 0).float())
    places = torch.arange(tokens.shape[1], device=tokens.device)
    passed = uniforms[:, : tokens.shape[1]].to(tokens.device) < ratio  # in the uniforms' precision
    while True:
        accepted = (passed & (places < lengths.unsqueeze(1))).long().cumprod(dim=-1).sum(dim=-1)
        rejected = accepted < lengths
        if not bool(rejected.any()):
            return accepted, None
        first = accepted.clamp_max(tokens.shape[1] - 1)
        excess = (target.row(first) - draft.row(first)).clamp_min_(0)
        stuck = rejected & (excess.amax(dim=-1) == 0)
        if not bool(stuck.any()):
            return accepted, excess
        passed[stuck, first[stuck]] = True  # π leaves nothing to replace the draft from: it stands
