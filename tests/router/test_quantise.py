import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from speccascade.router.export import export_onnx
from speccascade.router.heads import RouterHead
from speccascade.router.quantise import quantise
from speccascade.router.runtime import OnnxHead


@pytest.fixture(scope="module")
def content(weighted_head: Callable[..., RouterHead], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("onnx") / "router.onnx"
    export_onnx(weighted_head(), path)
    return path.read_bytes()


def test_it_says_what_it_changed(content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    features = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    smaller, difference = quantise(content, [features], tolerance=1.0) or (b"", 0.0)
    assert capfd.readouterr() == ("", "")
    before, after = OnnxHead(content), OnnxHead(smaller)
    operators = {node.op_type for node in onnx.load_model_from_string(smaller).graph.node}
    assert "MatMulInteger" in operators and after.metadata == before.metadata
    assert difference == float((after(features) - before(features)).abs().max()) > 1e-4
    assert quantise(content, [features], tolerance=difference / 2) is None
    assert quantise(content, [features], tolerance=1.0) == (smaller, difference)


def test_trees_hold_nothing_to_quantise(weighted_head: Callable[..., RouterHead], tmp_path: Path) -> None:
    export_onnx(weighted_head("trees"), tmp_path / "trees.onnx")
    assert quantise((tmp_path / "trees.onnx").read_bytes(), [torch.randn(5, 16)], tolerance=1.0) is None


def test_what_is_missing_is_named(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="inputs: expected held-out positions"):
        quantise(content, [torch.empty(0, 16)])
    original = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "onnxruntime.quantization":
            raise ImportError("No module named 'sympy'")
        return original(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ValueError, match=r"int8: onnxruntime\.quantization cannot be imported: No module named 'sympy'"
    ):
        quantise(content, [torch.randn(5, 16)])
