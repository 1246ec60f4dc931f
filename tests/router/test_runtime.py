from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from speccascade.router.bundle import load_bundle
from speccascade.router.heads import RouterHead
from speccascade.router.runtime import OnnxHead, TorchHead


def identity_model(name: str = "features", shape: tuple[str | int, ...] = ("N", 2)) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], ["gap"])],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info("gap", TensorProto.FLOAT, list(shape))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("size", [0, 1, 6, 1000])
def test_both_runtimes_agree(exported: Path, size: int) -> None:
    bundle = load_bundle(exported)
    features = torch.randn(size, 16, generator=torch.Generator().manual_seed(size))
    on_onnx, in_torch = bundle.runtime("onnx")(features), bundle.runtime("torch")(features)
    assert on_onnx.shape == in_torch.shape == (size, 2)
    torch.testing.assert_close(on_onnx, in_torch, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_precision_and_layout_of_the_input_do_not_matter(exported: Path, backend: str) -> None:
    runtime = load_bundle(exported).runtime(backend)
    features = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).half()
    strided = features.T
    assert not strided.is_contiguous()
    torch.testing.assert_close(runtime(strided), runtime(strided.float().contiguous()))
    with torch.inference_mode():
        torch.testing.assert_close(runtime(strided.clone()), runtime(strided))


def test_a_torch_head_learns_nothing_more(weighted_head: Callable[..., RouterHead]) -> None:
    head = weighted_head().train()
    runtime = TorchHead(head)
    gap = runtime(torch.randn(3, head.width, requires_grad=True))
    assert not gap.requires_grad and not head.training


def test_something_else_than_onnx_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "router.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="expected an ONNX file; 11 bytes"):
        OnnxHead(path)
    with pytest.raises(FileNotFoundError):
        OnnxHead(tmp_path / "nothing.onnx")


def test_a_tensor_outside_the_file_is_refused(exported: Path, tmp_path: Path) -> None:
    model = onnx.load(exported / "router.onnx")
    path = tmp_path / "router.onnx"
    onnx.save(model, path, save_as_external_data=True, location="secrets.bin", size_threshold=0)
    with pytest.raises(ValueError, match=r"expected every tensor inside the ONNX file; '.*' lies outside"):
        OnnxHead(path)


def test_a_tensor_outside_the_file_is_found_inside_a_branch() -> None:
    constant = helper.make_tensor("hidden", TensorProto.FLOAT, [1], [0.0])
    constant.ClearField("float_data")
    constant.data_location = TensorProto.EXTERNAL
    constant.external_data.add(key="location", value="secrets.bin")
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["out"], value=constant)],
        "branch",
        [],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1])],
    )
    model = identity_model()
    model.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    model.graph.node.append(helper.make_node("If", ["yes"], ["unused"], then_branch=branch, else_branch=branch))
    with pytest.raises(ValueError, match="'hidden' lies outside it"):
        OnnxHead(model.SerializeToString())


@pytest.mark.parametrize("model", [identity_model("tokens"), identity_model(shape=("N", "T"))])
def test_a_model_of_another_kind_is_refused(model: onnx.ModelProto) -> None:
    with pytest.raises(ValueError, match=r"expected features \[\.\.\., F\] in and one output"):
        OnnxHead(model.SerializeToString())


def test_inputs_are_counted(exported: Path) -> None:
    with pytest.raises(ValueError, match="inputs: expected features, got 2 tensors"):
        OnnxHead(exported / "router.onnx")(torch.zeros(2, 16), torch.zeros(2))
