"""A token-level router: a plug-in rule that believes a trained estimate of the truth in the place of the verifier.

The head estimates P̂(v | prefix) from both models' most probable tokens and the statistics of the position. The rule is
one of `rules`, unchanged: it is shown a block whose p° is P̂. q and p stay what is emitted, and nothing here sees a
drafted token, so the emitted law is exactly the rule's π ("Rules that believe a trained estimate" in docs/theory.md).

Shapes: ``B`` sequence, ``T`` position, ``V`` token, ``N`` position of a trace, ``K`` candidate.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.statistics import Stats
from ..cascade.targets import Target
from . import rules
from .belief import Belief, find_candidates
from .bundle import Bundle, find_bundle, load_bundle
from .bundled import Bundled
from .checks import check_choice
from .features import build_features
from .pooled import TAIL_FLOOR

__all__ = ["TOKEN_ROUTER_RULES", "TokenRouter"]

CALIBRATED_RULE = "expected_gain"
"""The rule that the tables of a bundle are about; its α is the price of a rejection."""

TOKEN_ROUTER_RULES = (
    "greedyward",
    "learned_lossy",
    "token_v1",
    "token_v2",
    "token_v3",
    "opt",
    "diff",
    "verifier_gap",
    "expected_gain",
    "bild_star",
    "opt_log",
    "diff_log",
)
"""The rules with a dial α that read p°; all others would ignore what was learned."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenRouter(Bundled):
    """A rule of ``TOKEN_ROUTER_RULES`` on a trained head's P̂; load it with ``from_pretrained``.

    Args:
        bundle: the checked files that it came from.
        runtime: features ``[N, F]`` and candidates ``[N, K, 2]`` to log P̂ ``[N, K+1]``, the tail last.
        rule: which rule decides.
        alpha: that rule's own dial.
        beliefs: P̂ of the blocks at hand: every rule and α of a sweep share one answer of the head.
    """

    bundle: Bundle
    runtime: Callable[[Tensor, Tensor], Tensor]
    rule: str
    alpha: float
    beliefs: WeakKeyDictionary[Stats, Belief] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, TOKEN_ROUTER_RULES)
        _ = self.inner  # the rule checks its own dial

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        rule: str = CALIBRATED_RULE,
        alpha: float | None = None,
        backend: str = "onnx",
        revision: str | None = None,
    ) -> "TokenRouter":
        """Load a token-level router from a folder or from the Hub.

        Args:
            name: a folder that ``save_pretrained`` or ``speccascade export`` wrote, or a Hub id ``owner/name``.
            rule: a name of ``TOKEN_ROUTER_RULES``; the default chooses between q and p, and is the one that the bundle
                is calibrated for.
            alpha: the rule's dial; the bundle's own default if None, which belongs to the default rule.
            backend: ``onnx`` (one CPU thread) or ``torch`` (on the device of the models).
            revision: branch, tag or commit on the Hub.

        Raises:
            FileNotFoundError: there is no such router, or a file of it is missing.
            ValueError: it decides whole positions, was changed, belongs to another feature schema, or an argument is
                unknown.
        """
        bundle = load_bundle(find_bundle(name, revision))
        if bundle.config.kind != "pooled":
            kind = bundle.config.kind
            raise ValueError(f"router: expected a head of kind 'pooled', got {kind!r}: use LearnedRouter for {name!s}")
        if alpha is None and rule != CALIBRATED_RULE:
            raise ValueError(f"alpha: expected one for rule {rule!r}, the bundle's own is for {CALIBRATED_RULE!r}")
        runtime: Any = bundle.runtime(backend)
        return cls(bundle, runtime, rule, bundle.config.default_alpha if alpha is None else alpha)

    @property
    def name(self) -> str:
        """How tables call it: head kind and rule."""
        return f"router-{self.config.kind}-{self.rule}"

    @cached_property
    def inner(self) -> Any:
        """The rule that decides; it must be shown a block whose p° is P̂, as `believe` makes one."""
        return rules.get(self.rule, alpha=self.alpha)

    def with_rule(self, rule: str, alpha: float) -> "TokenRouter":
        """Return the same router under another rule, at a setting of that rule's own dial.

        Raises:
            ValueError: a name that is none of ``TOKEN_ROUTER_RULES``, or an α outside the rule's range.
        """
        return replace(self, rule=rule, alpha=alpha)

    def _check_calibrated(self) -> None:
        if self.rule != CALIBRATED_RULE:
            raise ValueError(f"with_budget: this router is calibrated for {CALIBRATED_RULE!r}, got rule {self.rule!r}")

    def _price(self) -> float:
        return self.alpha if self.rule == CALIBRATED_RULE else self.config.default_alpha

    def target(self, block: VerifyBlock) -> Float[Tensor, "B T V"]:
        """Return π."""
        target: Tensor = self.inner.target(self.believe(block))
        return target

    def decide(self, block: VerifyBlock) -> Target:
        """Return π as verification reads it."""
        decided: Target = self.inner.decide(self.believe(block))
        return decided

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Return what the rule decides at each position, given P̂."""
        mask: Tensor = self.inner.defer_mask(self.believe(block))
        return mask

    def believe(self, block: VerifyBlock) -> VerifyBlock:
        """Return the block with P̂ in the place of p°; q, p and q° stay as they are."""
        belief = self.beliefs.get(block.stats)
        if belief is None:
            belief = self.beliefs[block.stats] = self._ask(block)
        return replace(block, verifier_raw=belief)

    def belief_over(
        self,
        draft: Float[Tensor, "N K"],
        verifier: Float[Tensor, "N K"],
        tokens: Int[Tensor, "N K"],
        stats: Stats,
    ) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N"]]:
        """Estimate P̂ of candidates and of all other tokens together, live or from a trace.

        Args:
            draft: q° of the union of both models' most probable tokens; 0 for padding.
            verifier: p° of the same tokens.
            tokens: their ids; anything for padding.
            stats: of the same N positions, in any shape.

        Returns:
            P̂ of each candidate, 0 for padding, and of the tail.
        """
        features = build_features(stats, self.config.feature_set)
        candidates = torch.stack([draft, verifier], dim=-1)
        told = (tokens.clamp_min(0),) if self.config.token_rank else ()
        belief = self.runtime(features.reshape(-1, features.shape[-1]), candidates, *told).exp()
        return belief[:, :-1].masked_fill(candidates.amax(dim=-1) == 0, 0), belief[:, -1]

    def _ask(self, block: VerifyBlock) -> Belief:
        # Before the statistics: these read their maxima from what is found here.
        found = find_candidates(block.draft_raw, block.verifier_raw, self.config.top_k)
        draft, verifier, tokens = (columns.flatten(0, 1) for columns in (found.draft, found.verifier, found.tokens))
        belief, tail = self.belief_over(draft, verifier, tokens, block.stats)
        verifier_tail = (1 - found.verifier.sum(dim=-1)).clamp_min(TAIL_FLOOR)
        cut = block.draft_raw is not block.draft or block.verifier_raw is not block.verifier
        return Belief(
            block.verifier_raw,
            found,
            belief.view(found.tokens.shape),
            tail.view(found.ceiling.shape) / verifier_tail,
            (block.draft, block.verifier) if cut else None,
        )

    def __repr__(self) -> str:
        pair = f"{self.config.drafter} → {self.config.verifier}"
        return f"TokenRouter({pair}, rule={self.rule!r}, alpha={self.alpha:g})"
