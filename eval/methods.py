"""The methods under comparison: how each one's dial α is turned, and over which range. Knows no model and no trace.

A dial is searched over u, a monotone stretch of α that makes infinite ranges finite, because α itself means
something else in every rule. The rules stay those of `router.rules`; nothing here repeats a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from torch import Tensor

from ..cascade.blocks import TargetRule, VerifyBlock
from ..router import rules
from ..router.checks import check_range

__all__ = [
    "DEFAULT_LOSSES",
    "DIALS",
    "LOSS_NOTES",
    "REPLAY_LOSSES",
    "ColderVerifier",
    "Dial",
    "Method",
    "check_loss",
    "colder_methods",
    "missing_arguments",
    "plug_in_methods",
    "router_method",
    "router_methods",
]

LOSS_NOTES: dict[str, str] = {
    "zero_one": "0-1 loss of the emitted argmax; rejection as sampled at the trace's temperature",
    "sampled": "loss of a sample, 1 − π(label); rejection as sampled at the trace's temperature",
    "log": "−log π(label) in nats, π floored at the smallest normal float32; rejection as sampled",
    "greedy": "0-1 loss at temperature 0, where a deferred position is rejected iff the argmaxes differ",
}
REPLAY_LOSSES: tuple[str, ...] = tuple(LOSS_NOTES)
DEFAULT_LOSSES: tuple[str, ...] = ("zero_one", "sampled", "greedy")
COLDER = (0.1, 0.5, 0.7)
INNER_RULES = ("greedyward", "token_v2", "token_v3", "learned_lossy")
"""The rules that a token-level router's belief is handed to, one method each."""

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
    ``position``, ``token``, ``router`` or ``fixed``; a token rule whose range is one point has no dial either.
    ``losses`` are those in whose tables it stands: a router has learned some of them. ``bundle`` is a router's folder,
    ``twin`` the plug-in rule that a router's belief is handed to.
    """

    name: str
    label: str
    kind: str
    low: float
    high: float
    build: Callable[[float, str], TargetRule]
    losses: tuple[str, ...] = REPLAY_LOSSES
    bundle: str = ""
    twin: str = ""

    @property
    def has_dial(self) -> bool:
        """Whether there is an α to choose."""
        return self.low < self.high

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


@dataclass(frozen=True)
class ColderVerifier:
    """Lossless decoding towards a verifier at a temperature of its own: π ∝ p·(p°)^(1/t − 1), that is p^(1/t).

    Of an unlogged tail, whose tokens have at most a known confidence, it takes the most that they can come to.

    Args:
        temperature: t in (0, 1].
    """

    temperature: float

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0, 1)
        if self.temperature == 0:
            raise ValueError("temperature: expected more than 0, got 0; at 0 every token of π is the argmax")

    def target(self, block: VerifyBlock) -> Tensor:
        """Return π ``[B, T, V]``."""
        confidence = block.verifier_raw.dense / block.verifier_raw.maximum.unsqueeze(-1)
        sharpened = block.verifier_probs * confidence.pow(1 / self.temperature - 1)
        return sharpened / sharpened.sum(dim=-1, keepdim=True)


def colder_methods(temperatures: Iterable[float] = COLDER) -> list[Method]:
    """Describe lossless decoding with a colder verifier: what rules that narrow sampling must be compared with."""
    return [_colder(temperature) for temperature in temperatures]


def _colder(temperature: float) -> Method:
    rule = ColderVerifier(temperature)
    name, label = f"verifier_t{temperature:g}", f"Verifier T={temperature:g}"
    return Method(name, label, "token", 0.0, 0.0, lambda alpha, loss: rule)


def router_methods(directory: str, name: str = "router", label: str = "Router") -> list[Method]:
    """Describe a trained router by what its bundle says it is: one method, or for a token-level router one each rule.

    Raises:
        ValueError: as the router's own ``from_pretrained``.
    """
    from ..router.bundle import find_bundle, load_bundle  # loads onnxruntime, which only routers need

    if load_bundle(find_bundle(directory)).config.kind != "pooled":
        return [router_method(directory, name, label)]
    from ..router.token_router import TokenRouter

    router = TokenRouter.from_pretrained(directory, alpha=0.0)
    tokens = [_token_method(router, inner, directory, name, label) for inner in INNER_RULES]
    return [_choosing_method(router, directory, name, label), *tokens]


def router_method(directory: str, name: str = "router", label: str = "Router") -> Method:
    """Describe a trained router of positions; each loss reads the gap that was learned for it.

    At temperature 0 that is the 0-1 gap; a loss that it has not learned is none of its own.
    """
    from ..router.learned import LearnedRouter

    plain = LearnedRouter.from_pretrained(directory, alpha=0.0)
    learned = plain.config.losses
    routers = {loss: replace(plain, loss=loss) for loss in learned}
    if "zero_one" in learned:
        routers["greedy"] = replace(plain, loss="auto")

    def build(alpha: float, loss: str) -> TargetRule:
        return routers[loss].with_alpha(alpha)

    losses = tuple(loss for loss in REPLAY_LOSSES if loss in routers)
    return Method(name, label, "router", -math.inf, math.inf, build, losses, directory)


def _choosing_method(router: Any, directory: str, name: str, label: str) -> Method:
    """Describe the choice between q and p that a belief makes: of the argmaxes under 0-1 loss, of samples elsewhere."""

    def build(alpha: float, loss: str) -> TargetRule:
        built: TargetRule = router.with_rule("verifier_gap" if loss == "zero_one" else "expected_gain", alpha)
        return built

    losses = tuple(loss for loss in REPLAY_LOSSES if loss != "log")
    return Method(name, label, "router", 0.0, math.inf, build, losses, directory)


def _token_method(router: Any, inner: str, directory: str, name: str, label: str) -> Method:
    """Describe one plug-in rule that reads a token-level router's belief in place of the verifier's confidences."""
    dial = DIALS[inner]

    def build(alpha: float, loss: str) -> TargetRule:
        built: TargetRule = router.with_rule(inner, alpha)
        return built

    named = f"{name}-{inner}", f"{dial.label} P̂ {label.removeprefix('Router').strip()}".strip()
    return Method(*named, "router", dial.low, dial.high, build, bundle=directory, twin=inner)
