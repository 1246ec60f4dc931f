"""int8 weights for an exported head, where they change its answers little enough. Knows no head and no bundle.

It pays in wide heads only. A small one runs no faster, since its activations are quantised anew at every call
(benchmarks/router_runtime.py), and its file is hardly smaller.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
from torch import Tensor

from .export import largest_difference, quiet
from .runtime import OnnxHead

__all__ = ["quantise"]

_INT8_OPERATORS = {"MatMulInteger", "DynamicQuantizeLinear"}


def quantise(content: bytes, inputs: Sequence[Tensor], tolerance: float = 0.01) -> tuple[bytes, float] | None:
    """Quantise an ONNX head's matrices and measure what that changes.

    Args:
        content: the float32 model.
        inputs: what it reads, on held-out positions, in the order of its signature.
        tolerance: largest difference of any output that is accepted.

    Returns:
        The int8 model and its largest difference from ``content``; None where that is above ``tolerance``, or where
        there is no matrix to quantise, as in trees.

    Raises:
        ValueError: there are no positions to measure on, or onnxruntime came without its quantisation.
    """
    if not inputs or not inputs[0].numel():
        raise ValueError("inputs: expected held-out positions to measure on, got none")
    quantised = _quantise_matrices(content)
    if quantised is None:
        return None
    difference = largest_difference(OnnxHead(content), OnnxHead(quantised), [tuple(inputs)])
    return (quantised, difference) if difference <= tolerance else None


def _quantise_matrices(content: bytes) -> bytes | None:
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic  # slow to import, and rarely needed
    except ImportError as error:
        raise ValueError(f"int8: onnxruntime.quantization cannot be imported: {error}") from error
    with tempfile.TemporaryDirectory() as folder, quiet():
        target = Path(folder) / "int8.onnx"
        quantize_dynamic(onnx.load_model_from_string(content), target, weight_type=QuantType.QInt8)
        model = onnx.load(target)
    if not any(node.op_type in _INT8_OPERATORS for node in model.graph.node):
        return None
    stated = onnx.load_model_from_string(content).metadata_props
    del model.metadata_props[:]
    model.metadata_props.extend(stated)
    quantised: bytes = model.SerializeToString(deterministic=True)
    return quantised
