"""A trained router from its bundle, whatever it decides: whole positions or tokens."""

import os

from .bundle import find_bundle, load_bundle
from .learned import LearnedRouter
from .token_router import CALIBRATED_RULE, TokenRouter

__all__ = ["load_router"]


def load_router(
    name: str | os.PathLike[str], alpha: float | None = None, rule: str | None = None, backend: str = "onnx"
) -> LearnedRouter | TokenRouter:
    """Load a router as what its bundle says it is.

    Args:
        name: a folder or a Hub id.
        alpha: the price of a rejection, or the dial of `rule`; the bundle's own if None.
        rule: which rule decides by what a token-level router believes, a name of ``TOKEN_ROUTER_RULES``; None: the one
            that it is calibrated for.
        backend: ``onnx`` or ``torch``.

    Raises:
        FileNotFoundError: there is no such router, or a file of it is missing.
        ValueError: it was changed, an argument is unknown, or a rule is given for a router that decides by itself.
    """
    folder = find_bundle(name)
    if load_bundle(folder).config.kind == "pooled":
        return TokenRouter.from_pretrained(folder, rule or CALIBRATED_RULE, alpha, backend)
    if rule is not None:
        raise ValueError(f"rule: expected none for a router that decides whole positions, got {rule!r} beside {name!s}")
    return LearnedRouter.from_pretrained(folder, alpha, backend=backend)
