"""What every trained router has from its bundle: its facts, the pair that it belongs to, and how it is handed on.

Knows no decision.
"""

import os
import tempfile
from dataclasses import replace

from .bundle import Bundle, write_bundle
from .config import RouterConfig
from .features import needs_hidden

__all__ = ["Bundled"]


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
