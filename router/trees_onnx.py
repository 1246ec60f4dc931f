"""Boosted trees as one operator of ONNX: ``TreeEnsembleRegressor`` of ai.onnx.ml. Knows no head.

Source: https://onnx.ai/onnx/operators/onnx_aionnxml_TreeEnsembleRegressor.html
"""

from typing import Any

import onnx
from onnx import helper, numpy_helper
from torch import Tensor

from .trees import Trees

__all__ = ["ML_DOMAIN", "ML_OPSET", "tree_nodes"]

ML_DOMAIN, ML_OPSET = "ai.onnx.ml", 3


def tree_nodes(
    trees: Trees, mean: Tensor, features: str, outputs: str
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes from ``features`` [N, F] to ``outputs`` [N, C], and their constants; NaN becomes its feature's mean."""
    filled = [
        helper.make_node("IsNaN", [features], ["trees.missing"]),
        helper.make_node("Where", ["trees.missing", "trees.mean", features], ["trees.filled"]),
    ]
    walk = helper.make_node(
        "TreeEnsembleRegressor",
        ["trees.filled"],
        [outputs],
        domain=ML_DOMAIN,
        n_targets=len(trees.base),
        base_values=trees.base.tolist(),
        aggregate_function="SUM",
        post_transform="NONE",
        **_attributes(trees),
    )
    return [*filled, walk], [numpy_helper.from_array(mean.cpu().numpy(), "trees.mean")]


def _attributes(trees: Trees) -> dict[str, Any]:
    """Parallel lists over nodes, and over leaves, as the operator wants them."""
    roots = trees.roots.tolist()
    sizes = [end - start for start, end in zip(roots, [*roots[1:], len(trees.value)], strict=True)]
    tree_ids = [tree for tree, size in enumerate(sizes) for _ in range(size)]
    node_ids = [node for size in sizes for node in range(size)]
    branches = (trees.branches - trees.roots[tree_ids].unsqueeze(-1)).tolist()
    leaves = [place for place, node in enumerate(node_ids) if branches[place][0] == node]
    modes = ["BRANCH_LEQ"] * len(node_ids)
    for place in leaves:
        modes[place] = "LEAF"
        branches[place] = [0, 0]
    values, outputs = trees.value.tolist(), trees.output.tolist()
    return {
        "nodes_treeids": tree_ids,
        "nodes_nodeids": node_ids,
        "nodes_modes": modes,
        "nodes_featureids": trees.feature.tolist(),
        "nodes_values": trees.threshold.tolist(),
        "nodes_truenodeids": [yes for yes, _ in branches],
        "nodes_falsenodeids": [no for _, no in branches],
        "target_treeids": [tree_ids[place] for place in leaves],
        "target_nodeids": [node_ids[place] for place in leaves],
        "target_ids": [outputs[tree_ids[place]] for place in leaves],
        "target_weights": [values[place] for place in leaves],
    }
