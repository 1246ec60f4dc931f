"""A trained router as a rule: defer where the learned gap exceeds α · D_TV(p, q).

It reads the same `Stats` as every position rule, so one object serves the engine, the labels and the offline sweep.
Source: the optimal rule of Narasimhan et al., ICLR 2025, Lemma 4, with a trained estimate of the gap in place of
max p − max q.

Shapes: ``*batch`` any leading axes, ``B`` sequence, ``T`` position, ``V`` token, ``F`` feature, ``R`` position of a
block or before it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..cascade.blocks import VerifyBlock
from ..cascade.statistics import Stats
from .bundle import Bundle, find_bundle, load_bundle
from .bundled import Bundled
from .checks import check_choice, check_range
from .features import build_features
from .heads import LOSSES
from .position_rules import PositionRule
from .runtime import HeadRuntime

__all__ = ["LearnedRouter"]

LOSS_CHOICES = ("auto", *LOSSES)


class _GapMemory:
    """The head, asked once for each record of statistics: π, the decision and every α of a sweep share its answer.

    A head that reads α is asked once for each α in turn. One that reads order is asked for whole sequences.
    """

    def __init__(self, runtime: HeadRuntime, feature_set: str, reads_order: bool = False) -> None:
        self.runtime, self.feature_set, self.reads_order = runtime, feature_set, reads_order
        self._gaps: WeakKeyDictionary[Stats, tuple[float | None, Tensor | None, Tensor]] = WeakKeyDictionary()

    def __call__(
        self, stats: Stats, alpha: float | None = None, memory: Float[Tensor, "B R F"] | None = None
    ) -> Float[Tensor, "*batch G"]:
        """Ask the head; ``memory`` holds the features of the positions of ``stats``, behind those before them."""
        known = self._gaps.get(stats)
        if known is not None and known[0] == alpha and known[1] is memory:
            return known[2]
        features = build_features(stats, self.feature_set) if memory is None else memory
        inputs = features if self.reads_order else features.reshape(-1, features.shape[-1])
        dial = () if alpha is None else (inputs.new_full(inputs.shape[:-1], alpha),)
        outputs = self.runtime(inputs, *dial)
        asked = outputs[:, -stats.shape[1] :] if self.reads_order else outputs
        gaps = asked.reshape(*stats.shape, outputs.shape[-1])
        self._gaps[stats] = alpha, memory, gaps
        return gaps


@dataclass(frozen=True, eq=False, repr=False)
class LearnedRouter(Bundled, PositionRule):
    """Defer where gap > α · D_TV(p, q), the gap being a trained head's estimate; load it with ``from_pretrained``.

    Args:
        bundle: the checked files that it came from.
        head: features to gaps, remembered per record of statistics; a ``cost_sensitive`` head is told α too.
        alpha: the price of a rejection in units of quality, any finite number.
        loss: which learned gap decides, one of those that the bundle holds. ``auto`` takes ``zero_one`` at positions
            where both processed distributions are one-hot (temperature 0) and ``sampled`` elsewhere; the only one,
            where the bundle holds one.

    A ``cost_sensitive`` head estimates no gap but the decision itself: defer where its margin is positive.
    Where q = p the choice changes nothing; such a position counts as deferred only if the gap is positive.
    """

    bundle: Bundle
    head: Callable[..., Tensor]
    alpha: float
    loss: str = "auto"

    def __post_init__(self) -> None:
        check_range("alpha", self.alpha, -float("inf"), float("inf"))
        check_choice("loss", self.loss, LOSS_CHOICES)
        held = self.config.losses
        if self.loss == "auto" and len(held) > 1 and not {"zero_one", "sampled"} <= set(held):
            raise ValueError(
                f"loss: 'auto' needs zero_one and sampled, this router learned {', '.join(held)}; name one"
            )
        if self.loss not in ("auto", *held):
            raise ValueError(f"loss: expected one that this router learned, {', '.join(held)}; got {self.loss!r}")

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        alpha: float | None = None,
        loss: str = "auto",
        backend: str = "onnx",
        revision: str | None = None,
    ) -> "LearnedRouter":
        """Load a router from a folder or from the Hub.

        Args:
            name: a folder that ``save_pretrained`` or ``speccascade export`` wrote, or a Hub id ``owner/name``.
            alpha: the price of a rejection; the bundle's own default if None.
            loss: ``auto``, ``zero_one``, ``sampled`` or ``log``.
            backend: ``onnx`` (one CPU thread) or ``torch`` (on the device of the models).
            revision: branch, tag or commit on the Hub.

        Raises:
            FileNotFoundError: there is no such router, or a file of it is missing.
            ValueError: it was changed, belongs to another feature schema, or an argument is unknown.
        """
        bundle = load_bundle(find_bundle(name, revision))
        config = bundle.config
        if config.kind == "pooled":
            raise ValueError(
                f"router: expected a head for whole positions, got kind 'pooled': use TokenRouter for {name!s}"
            )
        head = _GapMemory(bundle.runtime(backend), config.feature_set, reads_order=config.context > 0)
        return cls(bundle, head, config.default_alpha if alpha is None else alpha, loss)

    @property
    def name(self) -> str:
        """How tables call it: head kind and estimator."""
        return f"router-{self.config.kind}-{self.config.estimator}"

    @property
    def reads_alpha(self) -> bool:
        """Whether the head decides by itself, being told α."""
        return self.config.estimator == "cost_sensitive"

    @property
    def context(self) -> int:
        """How many positions the head reads, the one that it decides on included; 0: that one alone."""
        return self.config.context

    def remember(self, block: VerifyBlock) -> Float[Tensor, "B T F"]:
        """Return what later blocks are told of each position: its features."""
        return build_features(block.stats, self.config.feature_set)

    def gap(self, stats: Stats, memory: Float[Tensor, "B R F"] | None = None) -> Float[Tensor, "*batch"]:
        """Estimate how much better the verifier does than the drafter, under the loss in force.

        Args:
            stats: of positions in any shape; with a ``context``, of sequences ``[B, T]``, positions in order.
            memory: with a ``context``, the features of the same positions behind those of the R − T before them, NaN
                where nothing is known; default: nothing is known of what comes before.

        Raises:
            ValueError: the head is ``cost_sensitive`` and estimates no gap, the positions have no order, or a memory is
                given that the router does not read.
        """
        if self.reads_alpha:
            raise ValueError("gap: expected a router that estimates one, got estimator 'cost_sensitive'; ask defer")
        self._check_order(stats, memory)
        return self._in_force(stats, self.head(stats, None, memory))

    def defer(self, stats: Stats, memory: Float[Tensor, "B R F"] | None = None) -> Bool[Tensor, "*batch"]:
        """Decide for each position whether to defer to the verifier; arguments as in ``gap``.

        Raises:
            ValueError: the positions have no order, or a memory is given that the router does not read.
        """
        if self.reads_alpha:
            self._check_order(stats, memory)
            return self._in_force(stats, self.head(stats, self.alpha, memory)) > 0
        return self.gap(stats, memory) > self.alpha * stats.tv

    def defer_mask(self, block: VerifyBlock) -> Bool[Tensor, "B T"]:
        """Decide for each position of a block, after what is remembered of the positions before it."""
        return self.defer(block.stats, block.memory if self.context else None)

    def _check_order(self, stats: Stats, memory: Tensor | None) -> None:
        if self.context and len(stats.shape) != 2:
            raise ValueError(
                f"stats: expected sequences [B, T], since this router reads {self.context} positions in order, got "
                f"shape {list(stats.shape)}; a trace is put in order by data.decisions.defer_in_order"
            )
        if memory is not None and not self.context:
            raise ValueError("memory: expected none for a router that reads one position at a time, got some")

    def surely_kept(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Tell where the router will not defer whatever the verifier says; read by an adaptive γ.

        Only a head that reads the drafter at this position alone can know.
        """
        if self.context or self.config.feature_set != "draft_only" or (self.alpha < 0 and not self.reads_alpha):
            return torch.zeros(stats.shape, dtype=torch.bool, device=stats.device)
        columns = self.head(stats, self.alpha) if self.reads_alpha else self.head(stats)
        # Which loss will be in force depends on the verifier too: keep what none of them would defer.
        names = ("zero_one", "sampled") if self.loss == "auto" and len(self.config.losses) > 1 else (self._only,)
        return (columns[..., [self.config.losses.index(name) for name in names]] <= 0).all(dim=-1)

    @property
    def _only(self) -> str:
        return self.config.losses[0] if self.loss == "auto" else self.loss

    def _in_force(self, stats: Stats, columns: Float[Tensor, "*batch G"]) -> Float[Tensor, "*batch"]:
        losses = self.config.losses
        if self.loss != "auto" or len(losses) == 1:
            return columns[..., losses.index(self._only)]
        one_hot = (stats.draft_max_processed == 1) & (stats.verifier_max_processed == 1)
        return torch.where(one_hot, columns[..., losses.index("zero_one")], columns[..., losses.index("sampled")])

    def __repr__(self) -> str:
        pair = f"{self.config.drafter} → {self.config.verifier}"
        head = f"{self.config.kind} {self.config.estimator}"
        return f"LearnedRouter({pair}, {head}, alpha={self.alpha:g}, loss={self.loss!r})"
