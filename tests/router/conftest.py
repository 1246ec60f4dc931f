"""What the tests of trained routers share: random distribution pairs, a head with weights, one exported bundle."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speccascade.cascade import Stats, VerifyBlock
from speccascade.router.bundle import save_bundle
from speccascade.router.config import CalibrationRow, RouterConfig
from speccascade.router.examples import Examples
from speccascade.router.features import build_features
from speccascade.router.heads import RouterHead, make_head
from speccascade.router.trees import Boosting, TreeHead

TABLE = (
    CalibrationRow(alpha=0.0, deferral=0.5, rejection=0.30, quality=0.70, quality_low=0.6, quality_high=0.8),
    CalibrationRow(alpha=0.2, deferral=0.3, rejection=0.15, quality=0.72),
    CalibrationRow(alpha=0.5, deferral=0.2, rejection=0.08, quality=0.69),
    CalibrationRow(alpha=1.0, deferral=0.1, rejection=0.05, quality=0.69, drop_upper={"0.95": 0.125}),
)


def random_block(
    seed: int = 0, batch: int = 3, length: int = 4, vocab: int = 24, temperature: float = 1.0
) -> VerifyBlock:
    """Pairs from nearly one-hot to nearly uniform; processed at a temperature, raw at 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(2, batch, length, 1, generator=generator) * 4
    logits = scale * torch.randn(2, batch, length, vocab, generator=generator)
    raw = logits.softmax(dim=-1)
    if temperature == 0:
        processed = torch.nn.functional.one_hot(raw.argmax(dim=-1), vocab).float()
    else:
        processed = (logits / temperature).softmax(dim=-1)
    return VerifyBlock.from_probs(processed[0], processed[1], raw[0], raw[1])


def random_head(
    kind: str = "mlp",
    estimator: str = "gap",
    feature_set: str = "verified",
    seed: int = 0,
    losses: tuple[str, ...] = ("zero_one", "sampled"),
) -> RouterHead:
    """A head with random weights, normalised and centred on random pairs: it has opinions, right or wrong."""
    head = make_head(kind, estimator, feature_set, hidden=(16, 16), losses=losses)
    generator = torch.Generator().manual_seed(seed)
    features = build_features(random_block(seed=1, batch=50).stats, feature_set).flatten(end_dim=-2)
    if isinstance(head, TreeHead):
        correctness = torch.rand(len(features), 2, 2, generator=generator)
        examples = Examples(features, correctness, torch.ones(len(features)))
        head.fit(examples, config=Boosting(trees=5, leaves=6, learning_rate=0.5, smallest_leaf=2))
        return head.eval()
    head.set_normalisation(features.mean(dim=0), features.std(dim=0))
    with torch.no_grad():
        for values in head.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.4)
        alpha = torch.zeros(len(features)) if head.reads_alpha else None
        head.trunk[-1].bias -= head._outputs(features, alpha).mean(dim=0)
    return head.eval()


@pytest.fixture(scope="session")
def make_block() -> Callable[..., VerifyBlock]:
    """`make_block(seed=0, batch=3, length=4, vocab=24, temperature=1.0)`."""
    return random_block


@pytest.fixture(scope="session")
def make_stats() -> Callable[..., Stats]:
    """The statistics of such a block."""
    return lambda **options: random_block(**options).stats


@pytest.fixture(scope="session")
def weighted_head() -> Callable[..., RouterHead]:
    """`weighted_head(kind="mlp", estimator="gap", feature_set="verified", seed=0, losses=("zero_one", "sampled"))`."""
    return random_head


@pytest.fixture(scope="session")
def config() -> RouterConfig:
    """What a trainer would say of a router."""
    return RouterConfig(
        drafter="tiny/drafter",
        verifier="tiny/verifier",
        vocabulary_fingerprint="f" * 64,
        trace_digest="d" * 64,
        default_alpha=0.3,
        calibration={"sampled": TABLE, "greedy": TABLE[1:]},
        drafter_digest="a" * 64,
        verifier_digest="b" * 64,
        task="random pairs",
        figures={"held_out_loss": 0.25, "positions": 14387.0},
        calibration_split="validation",
        calibration_documents=40,
        calibration_exact=True,
    )


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, config: RouterConfig) -> Path:
    """A bundle, written once a session; copy it before changing a file."""
    directory = tmp_path_factory.mktemp("bundle") / "router"
    save_bundle(directory, random_head(estimator="two_confidence"), config)
    return directory
