"""A trained router as a rule: defer where the learned gap exceeds α · D_TV(p, q).

It reads the same `Stats` as every position rule, so one object serves the engine, the labels and the offline sweep.
Source: the optimal rule of Narasimhan et al., ICLR 2025, Lemma 4, with a trained estimate of the gap in place of
max p − max q.

Shapes: ``*batch`` any leading axes, ``B`` sequence, ``T`` position, ``V`` token.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..cascade.statistics import Stats
from .budgets import choose_row
from .bundle import Bundle, find_bundle, load_bundle, write_bundle
from .checks import check_choice, check_range
from .config import RouterConfig
from .drift import DriftReport, DriftWatch
from .features import build_features
from .heads import LOSSES
from .position_rules import PositionRule
from .runtime import HeadRuntime

__all__ = ["LearnedRouter"]

LOSS_CHOICES = ("auto", *LOSSES)


class _GapMemory:
    """The head, asked once for each record of statistics: π, the decision and every α of a sweep share its answer."""

    def __init__(self, runtime: HeadRuntime, feature_set: str) -> None:
        self.runtime, self.feature_set = runtime, feature_set
        self._gaps: WeakKeyDictionary[Stats, Tensor] = WeakKeyDictionary()

    def __call__(self, stats: Stats) -> Float[Tensor, "*batch 2"]:
        gaps = self._gaps.get(stats)
        if gaps is None:
            features = build_features(stats, self.feature_set)
            flat = features.reshape(-1, features.shape[-1])
            gaps = self.runtime(flat).reshape(*features.shape[:-1], len(LOSSES))
            self._gaps[stats] = gaps
        return gaps


@dataclass(frozen=True, eq=False, repr=False)
class LearnedRouter(PositionRule):
    """Defer where gap > α · D_TV(p, q), the gap being a trained head's estimate; load it with ``from_pretrained``.

    Args:
        bundle: the checked files that it came from.
        head: features to gaps, remembered per record of statistics.
        alpha: the price of a rejection in units of quality, any finite number.
        loss: which learned gap decides. ``auto`` takes ``zero_one`` at positions where both processed distributions
            are one-hot (temperature 0) and ``sampled`` elsewhere.

    Where q = p the choice changes nothing; such a position counts as deferred only if the gap is positive.
    """

    bundle: Bundle
    head: Callable[[Stats], Tensor]
    alpha: float
    loss: str = "auto"

    def __post_init__(self) -> None:
        check_range("alpha", self.alpha, -float("inf"), float("inf"))
        check_choice("loss", self.loss, LOSS_CHOICES)

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
            loss: ``auto``, ``zero_one`` or ``sampled``.
            backend: ``onnx`` (one CPU thread) or ``torch`` (on the device of the models).
            revision: branch, tag or commit on the Hub.

        Raises:
            FileNotFoundError: there is no such router, or a file of it is missing.
            ValueError: it was changed, belongs to another feature schema, or an argument is unknown.
        """
        bundle = load_bundle(find_bundle(name, revision))
        memory = _GapMemory(bundle.runtime(backend), bundle.config.feature_set)
        return cls(bundle, memory, bundle.config.default_alpha if alpha is None else alpha, loss)

    @property
    def config(self) -> RouterConfig:
        """What the bundle states about itself."""
        return self.bundle.config

    @property
    def name(self) -> str:
        """How tables call it: head kind and estimator."""
        return f"router-{self.config.kind}-{self.config.estimator}"

    def gap(self, stats: Stats) -> Float[Tensor, "*batch"]:
        """Estimate how much likelier the verifier's token is right than the drafter's, under the loss in force."""
        gaps = self.head(stats)
        if self.loss != "auto":
            return gaps[..., LOSSES.index(self.loss)]
        one_hot = (stats.draft_max_processed == 1) & (stats.verifier_max_processed == 1)
        return torch.where(one_hot, gaps[..., LOSSES.index("zero_one")], gaps[..., LOSSES.index("sampled")])

    def defer(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Decide for each position whether to defer to the verifier."""
        return self.gap(stats) > self.alpha * stats.tv

    def surely_kept(self, stats: Stats) -> Bool[Tensor, "*batch"]:
        """Tell where the router will not defer whatever the verifier says; read by an adaptive γ.

        Only a head that reads the drafter alone can know.
        """
        if self.config.feature_set != "draft_only" or self.alpha < 0:
            return torch.zeros(stats.shape, dtype=torch.bool, device=stats.device)
        # Which loss will be in force depends on the verifier too: keep what neither of them would defer.
        return (self.head(stats).amax(dim=-1) if self.loss == "auto" else self.gap(stats)) <= 0

    def with_alpha(self, alpha: float) -> "LearnedRouter":
        """Return the same router at another α; the head is shared, and asked once for all of them."""
        return replace(self, alpha=alpha)

    def with_budget(
        self,
        *,
        rejection: float | None = None,
        deferral: float | None = None,
        latency: float | None = None,
        quality_drop: float | None = None,
        confidence: float | None = None,
        gamma: int | None = None,
        cost_ratio: float | None = None,
        greedy: bool = False,
    ) -> "LearnedRouter":
        """Return the router at the α that its calibration holds best within a budget; give one of the first four.

        The choice is among measured rows; nothing is interpolated. ``router.with_budget(quality_drop=0.02)`` defers so
        much that, with 95% confidence over the calibration documents, the mean quality on documents of their kind is
        at most 0.02 below the verifier's; ``config.calibration_exact`` tells whether that holds exactly.

        Args:
            rejection: largest share of drafted tokens rejected.
            deferral: largest share of positions deferred.
            latency: largest modelled time per token relative to the verifier alone (`budgets.relative_latency`).
            quality_drop: largest mean loss of quality against the verifier (`budgets.by_quality_drop`).
            confidence: with ``quality_drop`` only: one that the table holds, 0.95 by default.
            gamma: with ``latency`` only: tokens drafted a round, 5 by default.
            cost_ratio: with ``latency`` only, which needs it: time of a drafter's step over that of a verifier's.
            greedy: choose from the calibration at temperature 0 instead of the sampled one.

        Raises:
            ValueError: not exactly one budget, one out of range, an argument of another budget, or a budget below
                everything that was measured, answered with the range within reach.
        """
        row = choose_row(
            self.config.calibration,
            greedy=greedy,
            rejection=rejection,
            deferral=deferral,
            latency=latency,
            quality_drop=quality_drop,
            confidence=confidence,
            gamma=gamma,
            cost_ratio=cost_ratio,
        )
        return self.with_alpha(row.alpha)

    def drift(self, stats: Stats) -> DriftReport:
        """Compare statistics with the positions that the router was trained on; `DriftWatch` does it batch by batch.

        Raises:
            ValueError: the bundle remembers no features of its training.
        """
        watch = DriftWatch(self.config.reference, self.config.feature_set)
        watch.add(stats)
        return watch.report()

    def check_pair(
        self,
        *,
        vocabulary_fingerprint: str,
        drafter: str = "",
        verifier: str = "",
        drafter_digest: str = "",
        verifier_digest: str = "",
    ) -> None:
        """Refuse a pair that this router was not trained for.

        Names are only told, since the same model has many; vocabularies are compared, and weights where both sides
        know their digests.

        Raises:
            ValueError: the vocabulary or a model's weights differ; both pairs are named.
        """
        config = self.config
        facts = [
            ("vocabulary", config.vocabulary_fingerprint, vocabulary_fingerprint),
            ("drafter weights", config.drafter_digest, drafter_digest),
            ("verifier weights", config.verifier_digest, verifier_digest),
        ]
        for what, trained, running in facts:
            known = what == "vocabulary" or (trained and running)
            if known and trained != running:
                raise ValueError(
                    f"router: trained for {config.drafter} → {config.verifier}, got "
                    f"{drafter or 'an unnamed drafter'} → {verifier or 'an unnamed verifier'}: "
                    f"the {what} differ ({trained[:12] or 'none'} against {running[:12] or 'none'})"
                )

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the bundle into a folder; the α in force becomes its default."""
        write_bundle(directory, replace(self.bundle, config=replace(self.config, default_alpha=self.alpha)))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the bundle as a model repository and return its address; the α in force becomes its default."""
        from huggingface_hub import HfApi  # slow to import, needed here alone

        api = HfApi(token=token)
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload router")
        return str(created)

    def __repr__(self) -> str:
        pair = f"{self.config.drafter} → {self.config.verifier}"
        head = f"{self.config.kind} {self.config.estimator}"
        return f"LearnedRouter({pair}, {head}, alpha={self.alpha:g}, loss={self.loss!r})"
