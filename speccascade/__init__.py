"""Trainable routers for speculative cascades of language models.

Public names load on first use, so that importing this package stays fast and pulls in neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cascade.custom_generate import generate as generate
    from .cascade.engine import SpeculativeCascade as SpeculativeCascade
    from .router import rules as rules
    from .router.learned import LearnedRouter as LearnedRouter
    from .router.token_router import TokenRouter as TokenRouter

__version__ = "0.1.0"

__all__ = ["LearnedRouter", "SpeculativeCascade", "TokenRouter", "__version__", "generate", "rules"]

_HERE = Path(__file__).resolve().parent
if not (_HERE / "cascade").is_dir() and (_HERE.parent / "cascade" / "__init__.py").is_file():
    # In a checkout the five packages stand beside this folder; an installation maps them into it.
    __path__.append(str(_HERE.parent))

_PUBLIC = {
    "LearnedRouter": (".router.learned", "LearnedRouter"),
    "SpeculativeCascade": (".cascade.engine", "SpeculativeCascade"),
    "TokenRouter": (".router.token_router", "TokenRouter"),
    "generate": (".cascade.custom_generate", "generate"),
    "rules": (".router.rules", None),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name]
    module = import_module(module_name, __name__)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
