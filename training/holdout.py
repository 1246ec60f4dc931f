"""A split in two, by document: what a checkpoint is chosen on, and what is held back to calibrate and bound its loss.

Both the data module and the export ask here, so that they agree. Knows no head and no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..data.resampling import held_back

if TYPE_CHECKING:
    from .splits import TraceTensors

__all__ = ["divide"]


def divide(split: TraceTensors, share: float) -> tuple[TraceTensors, TraceTensors | None]:
    """Return the positions of the documents that are not held back, and of those that are.

    Where one side would be empty nothing is held back: the whole split, and None.

    Raises:
        ValueError: a share outside [0, 1].
    """
    back = torch.from_numpy(held_back(split.prompt_ids, share))[split.prompt_index]
    if not back.any() or back.all():
        return split, None
    return split.take(~back), split.take(back)
