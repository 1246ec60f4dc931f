"""The kinds of trained heads, by name, and how each is built. Knows no file.

A kind is one line of ``HEAD_KINDS``: what turns a `HeadSpec` into a `Head`. Training, export and bundles go through
``build_head`` and read the rest from the head itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from .attention import AttentionHead
from .checks import check_choice
from .head_base import ESTIMATORS, LOSSES, Head, HeadSpec, stack_layers
from .pooled import PooledEstimator
from .position_head import RouterHead, output_count
from .trees import TreeHead

__all__ = ["ESTIMATORS", "HEAD_KINDS", "LOSSES", "Head", "HeadSpec", "RouterHead", "build_head", "make_head"]


def make_head(
    kind: str = "mlp",
    estimator: str = "gap",
    feature_set: str = "verified",
    hidden: Sequence[int] = (64, 64),
    losses: Sequence[str] = ("zero_one", "sampled"),
    context: int = 0,
    hidden_sizes: Sequence[int] = (),
    rank: int = 0,
) -> RouterHead:
    """Build an untrained head of positions.

    Args:
        kind: a key of ``HEAD_KINDS`` other than ``pooled``.
        estimator: ``gap``, ``two_confidence`` or ``cost_sensitive``.
        feature_set: a key of ``FEATURE_SETS``.
        hidden: widths of the hidden layers; ``linear`` and ``trees`` have none, ``attention`` has two.
        losses: the columns of its output, from ``LOSSES``.
        context: how many positions an estimate of ``attention`` reads, its own included (0: eight); 0 for all others.
        hidden_sizes: of the two models' hidden states, for a feature set that reads them.
        rank: how many directions of each hidden state are read; 0: every number of them.

    Raises:
        ValueError: an unknown name, answered with the nearest, a width below one, or what the kind does not offer.

    >>> import torch
    >>> head = make_head("linear", "gap", feature_set="draft_only")
    >>> head(torch.zeros(3, head.width)).shape
    torch.Size([3, 2])
    """
    check_choice("kind", kind, HEAD_KINDS)
    widths, sizes = tuple(map(int, hidden)), tuple(map(int, hidden_sizes))
    head = build_head(HeadSpec(kind, estimator, feature_set, widths, tuple(losses), context, 0, sizes, rank))
    assert isinstance(head, RouterHead), f"{kind} is no head of positions"
    return head


def build_head(spec: HeadSpec) -> Head:
    """Build the untrained head that ``spec`` describes.

    Raises:
        ValueError: the kind is unknown, or does not offer what is asked for.
    """
    check_choice("kind", spec.kind, HEAD_KINDS)
    return HEAD_KINDS[spec.kind](spec)


def _linear(spec: HeadSpec) -> RouterHead:
    spec.refuse_context()
    spec = replace(spec, hidden=())
    return RouterHead(spec, _trunk(spec))


def _mlp(spec: HeadSpec) -> RouterHead:
    spec.refuse_context()
    if not spec.hidden or min(spec.hidden) < 1:
        raise ValueError(f"hidden: expected at least one width, each >= 1, for an mlp; got {spec.hidden}")
    return RouterHead(spec, _trunk(spec))


def _trunk(spec: HeadSpec) -> nn.Sequential:
    """Training starts from "no gap", that is from a rule that never defers at a cost."""
    return stack_layers(spec.columns + (spec.estimator == "cost_sensitive"), spec.hidden, output_count(spec))


HEAD_KINDS: dict[str, Callable[[HeadSpec], Head]] = {
    "linear": _linear,
    "mlp": _mlp,
    "trees": TreeHead,
    "pooled": PooledEstimator,
    "attention": AttentionHead,
}
