"""Head to ONNX: one file, dynamic batch, checked against torch before anyone may use it.

The graph takes features [N, F] and returns gaps [N, 2]; normalisation and missing values are inside. The file carries
its feature schema, estimator and version as metadata, so that it can be told apart without its bundle.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from jaxtyping import Float
from torch import Tensor

from .. import __version__
from ..cascade.statistics import Stats
from .features import build_features, schema_digest
from .heads import LOSSES, RouterHead
from .runtime import OnnxHead

__all__ = ["OPSET", "PARITY_TOLERANCE", "export_onnx", "parity_error"]

OPSET = 20
PARITY_TOLERANCE = 1e-5
_BATCH_SIZES = (1, 6, 1000)


def export_onnx(head: RouterHead, path: str | os.PathLike[str]) -> float:
    """Write ``head`` as one ONNX file and return the largest difference from torch that the parity check saw.

    The same head gives the same bytes. Nothing is left at ``path`` if the check fails.

    Raises:
        ValueError: a weight is not finite, or ONNX and torch differ by more than 1e-5.
    """
    for name, values in head.state_dict().items():
        if not torch.isfinite(values).all():
            raise ValueError(f"head: expected finite weights, got NaN or infinity in {name!r}")
    reference = _inference_copy(head)
    content = _convert(reference)
    difference = parity_error(reference, content)
    if not difference <= PARITY_TOLERANCE:
        raise ValueError(
            f"head: expected ONNX and torch to agree to {PARITY_TOLERANCE:g}, they differ by {difference:.3g}"
        )
    Path(path).write_bytes(content)
    return difference


def parity_error(head: RouterHead, onnx_model: bytes | str | os.PathLike[str]) -> float:
    """Largest absolute difference of torch and ONNX over random, real-like and extreme features, batches 1 to 1000.

    NaN where either side returns NaN.
    """
    runtime = OnnxHead(onnx_model)
    differences = []
    for features in _probes(head):
        with torch.inference_mode():
            expected = head(features)
        differences.append((runtime(features) - expected).abs().amax())
    return float(torch.stack(differences).amax())


def _inference_copy(head: RouterHead) -> RouterHead:
    copy = RouterHead(head.kind, head.estimator, head.feature_set, head.hidden, head.hidden_sizes)
    copy.load_state_dict({name: values.detach().float().cpu() for name, values in head.state_dict().items()})
    return copy.eval()


def _convert(head: RouterHead) -> bytes:
    example = torch.zeros(2, head.width)
    with _quiet():
        program = torch.onnx.export(
            head,
            (example,),
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            input_names=["features"],
            output_names=["gap"],
            dynamic_shapes={"features": {0: torch.export.Dim("N", min=1)}},
            verbose=False,
        )
    assert program is not None, "torch.onnx.export returned no program"
    model = program.model_proto
    _drop_traces(model)
    onnx.helper.set_model_props(
        model,
        {
            "feature_schema": schema_digest(head.feature_set),
            "feature_set": head.feature_set,
            "estimator": head.estimator,
            "losses": ",".join(LOSSES),
            "speccascade": __version__,
        },
    )
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _drop_traces(model: onnx.ModelProto) -> None:
    """The exporter notes source lines and paths of the exporting machine on every node; none of that is the router."""
    graph = model.graph
    for item in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
        item.doc_string = ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporter prints, logs and warns about; its errors still raise."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _probes(head: RouterHead) -> Iterator[Float[Tensor, "N F"]]:
    """Features to compare on: within training range, of random distributions, and at the edges of float32."""
    generator = torch.Generator().manual_seed(0)
    for size in _BATCH_SIZES:
        noise = torch.randn(size, head.width, generator=generator)
        yield head.feature_mean + head.feature_std * noise
        yield _real_like(size, head, generator)
    edges = [0.0, 1.0, -1.0, 1e30, -1e30, np.inf, -np.inf, np.nan]
    yield torch.tensor(edges).unsqueeze(-1).expand(-1, head.width).contiguous()


def _real_like(size: int, head: RouterHead, generator: torch.Generator) -> Tensor:
    """Features of random distribution pairs, from nearly one-hot to nearly uniform, and of three exact edges."""
    sharpness = torch.rand(2, size, 1, generator=generator) * 8
    draft, verifier = (sharpness * torch.randn(2, size, 32, generator=generator)).softmax(dim=-1)
    uniform = torch.full((32,), 1 / 32)
    corners = torch.eye(32)
    for row, (q, p) in enumerate([(uniform, uniform), (corners[0], corners[1]), (corners[0], corners[0])]):
        if row < size:
            draft[row], verifier[row] = q, p
    hidden = [torch.randn(size, width, generator=generator) for width in head.hidden_sizes]
    states = (hidden[0], hidden[1]) if hidden else None
    return build_features(Stats(draft, verifier, draft, verifier, states), head.feature_set)
