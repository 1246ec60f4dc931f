"""Labelled positions, as heads learn from them. Knows no file and no head.

Shapes: ``*batch`` is ``[N]`` positions, or ``[B, L]`` where their order in the text matters; ``F`` feature; ``K``
candidate token; axes of length two are the losses (zero_one, sampled) and the models (q, p).
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Examples"]


class Examples(NamedTuple):
    """A batch of positions and what is known about each.

    Args:
        features: ``[*batch, F]``, as ``build_features`` returns them.
        correctness: ``[*batch, 2, 2]``, one minus the loss of each model at the label. Row 0 (zero_one): 1[label =
            argmax q°] and 1[label = argmax p°]. Row 1 (sampled): q(label) and p(label).
        tv: ``[*batch]``, D_TV(p, q).
        weight: ``[*batch]``, importance >= 0 of each position, 0 for padding; None: all equal.
        candidates: ``[*batch, K, 2]``, q and p of the tokens that either model holds likely, 0 behind the last of
            them; None where no head reads it.
        truth: ``[*batch]`` long, which candidate the label is; K where it is none of them. None beside no candidates.
        tokens: ``[*batch, K]`` long, the candidates' ids, anything behind the last of them; None beside no candidates.
    """

    features: Tensor
    correctness: Tensor
    tv: Tensor
    weight: Tensor | None = None
    candidates: Tensor | None = None
    truth: Tensor | None = None
    tokens: Tensor | None = None
