"""Views of a model: the same parameters and buffers in modules of their own, so that parts can be exchanged."""

import copy
from typing import TypeVar

from torch import nn

__all__ = ["view_module"]

Module = TypeVar("Module", bound=nn.Module)


def view_module(module: Module) -> Module:
    """Copy one module shallowly: its table of children and its hooks are its own, all else is shared."""
    view = copy.copy(module)
    for table in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
        setattr(view, table, getattr(module, table).copy())
    return view
