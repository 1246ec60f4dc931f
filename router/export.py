"""Head to ONNX: one file, dynamic batch, checked against torch before anyone may use it.

Inputs and outputs are those of the head's `Signature`; normalisation and missing values are inside. The file carries
its feature schema, kind, estimator, losses and version as metadata, so that it can be told apart without its bundle.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from jaxtyping import Float
from torch import Tensor, nn

from .. import __version__
from ..cascade.statistics import Stats
from .features import build_features, schema_digest
from .head_base import Head, Signature
from .heads import build_head
from .runtime import OnnxHead
from .trees import TreeHead
from .trees_onnx import ML_DOMAIN, ML_OPSET, tree_nodes

__all__ = ["OPSET", "PARITY_TOLERANCE", "check_finite", "export_onnx", "largest_difference", "parity_error", "quiet"]

OPSET = 20
PARITY_TOLERANCE = 1e-5
_BATCH_SIZES = (1, 6, 1000)


def export_onnx(head: Head, path: str | os.PathLike[str]) -> float:
    """Write ``head`` as one ONNX file and return the largest difference from torch that the parity check saw.

    The same head gives the same bytes. Nothing is left at ``path`` if the check fails.

    Raises:
        ValueError: a weight is not finite, or ONNX and torch differ by more than 1e-5.
    """
    check_finite(head)
    reference = _inference_copy(head)
    content = _convert(reference)
    difference = parity_error(reference, content)
    if not difference <= PARITY_TOLERANCE:
        raise ValueError(
            f"head: expected ONNX and torch to agree to {PARITY_TOLERANCE:g}, they differ by {difference:.3g}"
        )
    Path(path).write_bytes(content)
    return difference


def check_finite(head: Head) -> None:
    """Refuse weights that no number can come from.

    Raises:
        ValueError: a weight is not finite.
    """
    for name, values in head.state_dict().items():
        if not torch.isfinite(values).all():
            raise ValueError(f"head: expected finite weights, got NaN or infinity in {name!r}")


def parity_error(head: Head, onnx_model: bytes | str | os.PathLike[str]) -> float:
    """Largest absolute difference of torch and ONNX over random, real-like and extreme features, batches 1 to 1000.

    NaN where either side returns NaN.
    """
    generator = torch.Generator().manual_seed(1)
    cases = (head.arrange(features, generator) for features in _probes(head))
    return largest_difference(head, OnnxHead(onnx_model), cases)


def largest_difference(
    one: Callable[..., Tensor], other: Callable[..., Tensor], cases: Iterable[tuple[Tensor, ...]]
) -> float:
    """Largest absolute difference of two functions over several inputs; NaN where either returns NaN."""
    with torch.inference_mode():
        return float(torch.stack([(one(*inputs) - other(*inputs)).abs().amax() for inputs in cases]).amax())


def _inference_copy(head: Head) -> Head:
    copy = build_head(head.spec)
    copy.load_state_dict({name: values.detach().cpu() for name, values in head.state_dict().items()})
    return copy.float().eval()


def _convert(head: Head) -> bytes:
    convert = _CONVERTERS.get(head.kind, _convert_whole)
    model = convert(head)
    _drop_traces(model)
    onnx.helper.set_model_props(
        model,
        {
            "feature_schema": schema_digest(head.feature_set),
            "feature_set": head.feature_set,
            "kind": head.kind,
            "estimator": head.estimator,
            "losses": ",".join(head.losses),
            "speccascade": __version__,
        },
    )
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _convert_whole(head: Head) -> onnx.ModelProto:
    """Let torch trace all of it."""
    return _trace(head, head.arrange(torch.zeros(4, head.width), torch.Generator()), head.signature)


def _convert_trees(head: Head) -> onnx.ModelProto:
    """Trace what follows the trees, and put the one operator that walks them in front."""
    assert isinstance(head, TreeHead)
    if not len(head.trunk.roots):
        raise ValueError("head: expected fitted trees, got none; call fit first")
    whole = head.signature
    joint = Signature({**whole.inputs, "outputs": ("N", len(head.trunk.base))}, whole.outputs)
    model = _trace(_AfterTrees(head), (torch.zeros(4, head.width), torch.zeros(4, len(head.trunk.base))), joint)
    graph = model.graph
    inputs = [value for value in graph.input if value.name != "outputs"]
    nodes, constants = tree_nodes(head.trunk, head.feature_mean, "features", "outputs")
    following = list(graph.node)
    del graph.input[:], graph.node[:]
    graph.input.extend(inputs)
    graph.node.extend([*nodes, *following])
    graph.initializer.extend(constants)
    model.opset_import.append(onnx.helper.make_opsetid(ML_DOMAIN, ML_OPSET))
    return model


_CONVERTERS: dict[str, Callable[[Head], onnx.ModelProto]] = {"trees": _convert_trees}
"""Kinds that torch cannot trace into what runs fast; all others go through ``_convert_whole``."""


class _AfterTrees(nn.Module):
    def __init__(self, head: TreeHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, outputs: Tensor) -> Tensor:
        return self.head.finish(features, outputs)


def _trace(module: nn.Module, inputs: tuple[Tensor, ...], signature: Signature) -> onnx.ModelProto:
    names = {axis for shape in signature.inputs.values() for axis in shape if isinstance(axis, str)}
    sizes = {name: torch.export.Dim(name, min=1) for name in names}
    shapes = [
        {place: sizes[axis] for place, axis in enumerate(shape) if isinstance(axis, str)}
        for shape in signature.inputs.values()
    ]
    with quiet():
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            input_names=list(signature.inputs),
            output_names=list(signature.outputs),
            dynamic_shapes=shapes,
            verbose=False,
        )
    assert program is not None, "torch.onnx.export returned no program"
    model: onnx.ModelProto = program.model_proto
    return model


def _drop_traces(model: onnx.ModelProto) -> None:
    """The exporter notes source lines and paths of the exporting machine on every node; none of that is the router."""
    graph = model.graph
    for item in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
        item.doc_string = ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what the exporter prints, logs and warns about; its errors still raise."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _probes(head: Head) -> Iterator[Float[Tensor, "N F"]]:
    """Features to compare on: within training range, of random distributions, and at the edges of float32."""
    generator = torch.Generator().manual_seed(0)
    for size in _BATCH_SIZES:
        noise = torch.randn(size, head.width, generator=generator)
        yield head.feature_mean + head.feature_std * noise
        yield _real_like(size, head, generator)
    edges = [0.0, 1.0, -1.0, 1e30, -1e30, np.inf, -np.inf, np.nan]
    yield torch.tensor(edges).unsqueeze(-1).expand(-1, head.width).contiguous()


def _real_like(size: int, head: Head, generator: torch.Generator) -> Tensor:
    """Features of random distribution pairs, from nearly one-hot to nearly uniform, and of three exact edges."""
    sharpness = torch.rand(2, size, 1, generator=generator) * 8
    draft, verifier = (sharpness * torch.randn(2, size, 32, generator=generator)).softmax(dim=-1)
    uniform = torch.full((32,), 1 / 32)
    corners = torch.eye(32)
    for row, (q, p) in enumerate([(uniform, uniform), (corners[0], corners[1]), (corners[0], corners[0])]):
        if row < size:
            draft[row], verifier[row] = q, p
    hidden = [torch.randn(size, width, generator=generator) for width in head.spec.hidden_sizes]
    states = (hidden[0], hidden[1]) if hidden else None
    return build_features(Stats(draft, verifier, draft, verifier, states), head.feature_set)
