import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from speccascade import __version__
from speccascade.router import export
from speccascade.router.export import OPSET, PARITY_TOLERANCE, export_onnx, parity_error
from speccascade.router.features import schema_digest
from speccascade.router.heads import RouterHead, make_head
from speccascade.router.runtime import OnnxHead

HEADS = [
    ("linear", "gap", "draft_only"),
    ("mlp", "gap", "verified"),
    ("mlp", "two_confidence", "verified"),
    ("mlp", "cost_sensitive", "verified"),
    ("trees", "gap", "verified"),
    ("trees", "two_confidence", "draft_only"),
]


@pytest.fixture(scope="module", params=HEADS, ids="-".join)
def pair(
    request: pytest.FixtureRequest, weighted_head: Callable[..., RouterHead], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RouterHead, Path]:
    head = weighted_head(*request.param)
    path = tmp_path_factory.mktemp("onnx") / "router.onnx"
    assert export_onnx(head, path) <= PARITY_TOLERANCE
    return head, path


@pytest.mark.parametrize("size", [1, 2, 6, 1000])
def test_onnx_equals_torch_at_every_batch_size(pair: tuple[RouterHead, Path], size: int) -> None:
    head, path = pair
    features = torch.randn(size, head.width, generator=torch.Generator().manual_seed(size)) * 3
    inputs = head.arrange(features, torch.Generator().manual_seed(size))
    gap = OnnxHead(path)(*inputs)
    assert gap.shape == (size, 2)
    torch.testing.assert_close(gap, head(*inputs), rtol=0, atol=PARITY_TOLERANCE)


def test_one_file_states_what_it_is(pair: tuple[RouterHead, Path]) -> None:
    head, path = pair
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    model = onnx.load(path, load_external_data=False)
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [OPSET]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata == {
        "feature_schema": schema_digest(head.feature_set),
        "feature_set": head.feature_set,
        "kind": head.kind,
        "estimator": head.estimator,
        "losses": "zero_one,sampled",
        "speccascade": __version__,
    }


def test_the_file_tells_nothing_of_the_machine_that_made_it(pair: tuple[RouterHead, Path]) -> None:
    content = pair[1].read_bytes()
    assert str(Path(export.__file__).parent).encode() not in content
    assert not re.search(rb"\.py\b|site-packages", content)


def test_an_export_is_silent_repeatable_and_leaves_the_head_as_it_was(
    weighted_head: Callable[..., RouterHead], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = weighted_head().train()
    for name in ("once.onnx", "again.onnx"):
        export_onnx(head, tmp_path / name)
    assert capfd.readouterr() == ("", "")
    assert head.training
    assert (tmp_path / "once.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()


def test_a_model_that_differs_is_refused(
    pair: tuple[RouterHead, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, path = pair
    model = onnx.load(path)
    changed = 0
    for tensor in model.graph.initializer:
        if tensor.name == "trunk.0.weight":
            tensor.raw_data = (onnx.numpy_helper.to_array(tensor) * np.float32(1.001)).tobytes()
            changed += 1
    for attribute in (entry for node in model.graph.node for entry in node.attribute if entry.name == "target_weights"):
        attribute.floats[:] = [value * 1.001 for value in attribute.floats]
        changed += 1
    assert changed == 1
    shifted = model.SerializeToString()
    assert parity_error(head, shifted) > PARITY_TOLERANCE
    monkeypatch.setattr(export, "_convert", lambda _: shifted)
    with pytest.raises(ValueError, match="ONNX and torch to agree to 1e-05"):
        export_onnx(head, tmp_path / "router.onnx")
    assert not list(tmp_path.iterdir())


def test_a_head_with_nan_weights_is_refused(weighted_head: Callable[..., RouterHead], tmp_path: Path) -> None:
    head = weighted_head()
    with torch.no_grad():
        head.trunk[0].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"finite weights, got NaN or infinity in 'trunk\.0\.weight'"):
        export_onnx(head, tmp_path / "router.onnx")


def test_trees_that_were_never_fitted_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head: expected fitted trees, got none"):
        export_onnx(make_head("trees"), tmp_path / "router.onnx")


@pytest.mark.parametrize("kind", ["mlp", "trees"])
def test_a_calibrated_head_is_exported_with_its_calibration(
    kind: str, weighted_head: Callable[..., RouterHead], tmp_path: Path
) -> None:
    head = weighted_head(kind, losses=("zero_one", "log", "sampled"))
    knots = torch.linspace(-0.9, 0.9, 32)
    head.set_calibration("zero_one", knots, knots**3 + 0.1)
    head.set_calibration("log", torch.tensor([0.0]), torch.tensor([0.5]))
    assert export_onnx(head, tmp_path / "router.onnx") <= PARITY_TOLERANCE
    gap = OnnxHead(tmp_path / "router.onnx")(torch.randn(50, head.width))
    assert (gap[:, 1] == 0.5).all() and gap[:, 0].unique().numel() > 5
