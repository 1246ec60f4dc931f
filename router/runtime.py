"""Running a head, on onnxruntime or in torch, behind one call: its inputs in the order of its `Signature`.

Knows no rule and no bundle. onnxruntime runs on the CPU with one thread: a block of six positions takes microseconds,
and threads would only fight those of the models. Plain ``run`` measured no slower than I/O binding at that size.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import onnx
import torch
from torch import Tensor

from .head_base import Head, Signature

__all__ = ["BACKENDS", "HeadRuntime", "OnnxHead", "TorchHead"]

BACKENDS = ("onnx", "torch")


@runtime_checkable
class HeadRuntime(Protocol):
    """Features (and what else the head reads) on any device to gaps on the same device."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the head on inputs in the order of its signature."""
        ...


class TorchHead:
    """A head in torch, on the device of the features: no copies between devices."""

    def __init__(self, head: Head) -> None:
        self.head = head.eval().requires_grad_(False)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the head on inputs in the order of its signature."""
        if self.head.feature_mean.device != inputs[0].device:
            self.head.to(inputs[0].device)
        with torch.no_grad():
            outputs: Tensor = self.head(*map(_as_head_reads, inputs))
        return outputs

    def __repr__(self) -> str:
        return f"TorchHead({self.head.kind}, {self.head.estimator})"


class OnnxHead:
    """A head on onnxruntime: one CPU thread; inputs on another device travel there and the gaps back.

    Args:
        model: path of an ONNX file, or its bytes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no ONNX model, keeps data outside the file, or does not map features to one output.
    """

    def __init__(self, model: bytes | str | os.PathLike[str]) -> None:
        content = model if isinstance(model, bytes) else Path(model).read_bytes()
        proto = _parse(content)
        self.metadata = {entry.key: entry.value for entry in proto.metadata_props}
        self._session = _start_session(content)
        self.signature = _read_signature(self._session)
        self._names, self._output = list(self.signature.inputs), list(self.signature.outputs)

    @property
    def width(self) -> int:
        """Number of features F."""
        return int(self.signature.inputs["features"][-1])

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the head on inputs in the order of its signature.

        Raises:
            ValueError: more or fewer inputs than it reads.
        """
        if len(inputs) != len(self._names):
            raise ValueError(f"inputs: expected {', '.join(self._names)}, got {len(inputs)} tensors")
        arrays = [_as_head_reads(values.detach()).cpu().numpy() for values in inputs]
        outputs = torch.from_numpy(self._session.run(self._output, dict(zip(self._names, arrays, strict=True)))[0])
        return outputs if inputs[0].device.type == "cpu" else outputs.to(inputs[0].device)

    def __repr__(self) -> str:
        return f"OnnxHead({self.metadata.get('feature_set', '?')}, {self.metadata.get('estimator', '?')})"


def _as_head_reads(values: Tensor) -> Tensor:
    """Numbers as float32, ids as int64."""
    return values.float() if values.is_floating_point() else values.long()


def _parse(content: bytes) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # the parser's error class differs between versions
        raise ValueError(f"model: expected an ONNX file; {len(content)} bytes do not parse as one") from error
    _refuse_external_data(model)
    return model


def _refuse_external_data(model: onnx.ModelProto) -> None:
    """A bundle is one file: a tensor that points elsewhere could read any file of the machine that loads it."""
    graphs = _graphs(model.graph)
    for tensor in chain.from_iterable(map(_tensors, graphs)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise ValueError(f"model: expected every tensor inside the ONNX file; {tensor.name!r} lies outside it")


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for attribute in _attributes(graph):
        for inner in (attribute.g, *attribute.graphs):
            if inner.node:
                yield from _graphs(inner)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for attribute in _attributes(graph):
        yield from (attribute.t, *attribute.tensors)


def _attributes(graph: onnx.GraphProto) -> Iterable[onnx.AttributeProto]:
    return (attribute for node in graph.node for attribute in node.attribute)


def _start_session(content: bytes) -> Any:
    import onnxruntime  # slow to import, and not needed where the head runs in torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises one class per kind of fault, all private
        raise ValueError(f"model: onnxruntime refuses it: {str(error).splitlines()[0]}") from error


def _read_signature(session: Any) -> Signature:
    inputs, outputs = (
        {value.name: tuple(value.shape) for value in values} for values in (session.get_inputs(), session.get_outputs())
    )
    features = inputs.get("features", ())
    reads_features = next(iter(inputs), "") == "features" and len(features) > 1 and isinstance(features[-1], int)
    if not reads_features or len(outputs) != 1:
        raise ValueError(f"model: expected features [..., F] in and one output, got {inputs} and {outputs}")
    return Signature(inputs, outputs)
