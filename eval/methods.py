"""The methods under comparison: how each one's dial α is turned, and over which range. Knows no model and no trace.

A dial is searched over u, a monotone stretch of α that makes infinite ranges finite, because α itself means
something else in every rule. The rules stay those of `router.rules`; nothing here repeats a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from ..cascade.blocks import TargetRule
from ..router import rules

__all__ = [
    "DIALS",
    "LOSS_NOTES",
    "REPLAY_LOSSES",
    "Dial",
    "Method",
    "check_loss",
    "missing_arguments",
    "plug_in_methods",
    "router_method",
]

LOSS_NOTES: dict[str, str] = {
    "zero_one": "0-1 loss of the emitted argmax; rejection as sampled at the trace's temperature",
    "sampled": "loss of a sample, 1 − π(label); rejection as sampled at the trace's temperature",
    "greedy": "0-1 loss at temperature 0, where a deferred position is rejected iff the argmaxes differ",
}
REPLAY_LOSSES: tuple[str, ...] = tuple(LOSS_NOTES)

_EDGE = 1e-6


@dataclass(frozen=True)
class Dial:
    """The range of a rule's dial and the name of the argument that it turns."""

    low: float
    high: float
    label: str
    argument: str = "alpha"


DIALS: dict[str, Dial] = {
    "chow": Dial(0.0, 1.0, "Chow"),
    "chow_log": Dial(0.0, math.inf, "ChowLog"),
    "diff": Dial(-1.0, 1.0, "Diff"),
    "diff_log": Dial(-math.inf, math.inf, "DiffLog"),
    "opt": Dial(-math.inf, math.inf, "OPT"),
    "opt_log": Dial(-math.inf, math.inf, "OPTLog"),
    "bild_star": Dial(0.0, math.inf, "BiLD*"),
    "verifier_gap": Dial(0.0, math.inf, "VerifierGap"),
    "expected_gain": Dial(-math.inf, math.inf, "ExpectedGain"),
    "greedyward": Dial(0.0, 1.0, "Greedyward"),
    "token_v1": Dial(-1.0, 1.0, "TokenV1"),
    "token_v2": Dial(0.0, 1.0, "TokenV2"),
    "token_v3": Dial(0.0, 1.0, "TokenV3"),
    "lossy": Dial(0.0, 1.0 - _EDGE, "Lossy β*"),
    "learned_lossy": Dial(0.0, math.inf, "LearnedLossy"),
    "ensemble": Dial(0.0, 1.0, "Ensemble", argument="weight"),
}


@dataclass(frozen=True)
class Method:
    """One row of a comparison: a rule whose dial can be turned, a trained router, or a fixed rule.

    ``build(alpha, loss)`` makes the rule; ``loss`` matters to routers, which learn one gap for each. ``kind`` is
    ``position``, ``token``, ``router`` or ``fixed``.
    """

    name: str
    label: str
    kind: str
    low: float
    high: float
    build: Callable[[float, str], TargetRule]

    def alpha(self, u: float) -> float:
        """Turn the search coordinate ``u`` in [0, 1] into α, strictly increasing."""
        if math.isinf(self.low) and math.isinf(self.high):
            return _stretch(2 * u - 1)
        if math.isinf(self.high):
            return self.low + _stretch(u)
        return self.low + u * (self.high - self.low)


def _stretch(u: float) -> float:
    inner = max(min(u, 1 - _EDGE), _EDGE - 1)
    return inner / (1 - abs(inner))


def check_loss(loss: str) -> None:
    """Refuse an unknown loss.

    Raises:
        ValueError: ``loss`` is none of `REPLAY_LOSSES`.
    """
    if loss not in REPLAY_LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(REPLAY_LOSSES)}, got {loss!r}")


def missing_arguments(name: str) -> list[str]:
    """Name the arguments of a rule that it needs and a comparison has no way to give: all but its dial."""
    rule: Any = rules.RULES[name]
    dial = DIALS[name].argument if name in DIALS else ""
    needed = [field.name for field in fields(rule) if field.default is MISSING and field.default_factory is MISSING]
    return [argument for argument in needed if argument != dial]


def plug_in_methods(names: Iterable[str] | None = None) -> list[Method]:
    """Describe the plug-in rules by name; every rule with a dial if no name is given."""
    chosen = [name for name in DIALS if name in rules.RULES] if names is None else list(names)
    return [_plug_in(name) for name in chosen]


def _plug_in(name: str) -> Method:
    if name not in DIALS:
        rule = rules.get(name)
        return Method(name, type(rule).__name__, "fixed", 0.0, 0.0, lambda alpha, loss: rule)
    dial = DIALS[name]

    def build(alpha: float, loss: str) -> TargetRule:
        parameters: dict[str, Any] = {dial.argument: alpha}
        return rules.get(name, **parameters)

    kind = "position" if hasattr(rules.RULES[name], "defer") else "token"
    return Method(name, dial.label, kind, dial.low, dial.high, build)


def router_method(directory: str, name: str = "router", label: str = "Router") -> Method:
    """Describe a trained router; each loss reads the gap that was learned for it, at temperature 0 the 0-1 gap."""
    from ..router.learned import LearnedRouter  # loads onnxruntime, which only a comparison with routers needs

    plain = LearnedRouter.from_pretrained(directory, alpha=0.0)
    routers = {
        "zero_one": replace(plain, loss="zero_one"),
        "sampled": replace(plain, loss="sampled"),
        "greedy": replace(plain, loss="auto"),
    }

    def build(alpha: float, loss: str) -> TargetRule:
        return routers[loss].with_alpha(alpha)

    return Method(name, label, "router", -math.inf, math.inf, build)
