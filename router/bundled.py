"""What every trained router has from its bundle: its facts, the pair that it belongs to, and how it is handed on.

Knows no decision.
"""

import os
import tempfile
from dataclasses import replace
from typing import TypeVar

from ..cascade.statistics import Stats
from .budgets import choose_row
from .bundle import Bundle, write_bundle
from .config import RouterConfig
from .drift import DriftReport, DriftWatch
from .features import needs_hidden

__all__ = ["Bundled"]

# No `Self`: the checker of shapes in the tests decorates functions, and knows it inside decorated classes alone.
Own = TypeVar("Own", bound="Bundled")


class Bundled:
    """A router that came from a bundle; ``alpha`` is the setting in force."""

    bundle: Bundle
    alpha: float

    @property
    def config(self) -> RouterConfig:
        """What the bundle states about itself."""
        return self.bundle.config

    @property
    def needs_hidden(self) -> bool:
        """Whether it reads the models' hidden states, which the engine then collects."""
        return needs_hidden(self.config.feature_set)

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """How long it expects the drafter's and the verifier's hidden state; nothing if it reads none."""
        return self.config.hidden_sizes

    def with_alpha(self: Own, alpha: float) -> Own:
        """Return the same router at another α; the head and its answers are shared."""
        changed: Own = replace(self, alpha=alpha)  # type: ignore[type-var]  # routers are dataclasses
        return changed

    def with_budget(
        self: Own,
        *,
        rejection: float | None = None,
        deferral: float | None = None,
        latency: float | None = None,
        quality_drop: float | None = None,
        confidence: float | None = None,
        gamma: int | None = None,
        cost_ratio: float | None = None,
        greedy: bool = False,
    ) -> Own:
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
        self._check_calibrated()
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

    def _price(self) -> float:
        """The α that a saved bundle gets as its default."""
        return self.alpha

    def _check_calibrated(self) -> None:
        """Raise ValueError where the stored calibration is not about what decides here."""

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
        """Write the bundle into a folder; the α in force becomes its default, if it is a price of rejections."""
        write_bundle(directory, replace(self.bundle, config=replace(self.config, default_alpha=self._price())))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the bundle, as ``save_pretrained`` writes it, as a model repository and return its address."""
        from huggingface_hub import HfApi  # slow to import, needed here alone

        api = HfApi(token=token)
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload router")
        return str(created)
