"""Every plug-in rule under one roof, and the table that finds them by name.

>>> get("opt", alpha=0.3)
OPT(alpha=0.3, confidence='raw', tv='processed')
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..cascade.blocks import TargetRule
from .checks import nearest
from .lossy import LearnedLossy, Lossy
from .position_rules import (
    OPT,
    BiLDStar,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    ExpectedGain,
    Fixed,
    OPTLog,
    SpecDecode,
    VerifierGap,
)
from .token_rules import Ensemble, Greedyward, TokenV1, TokenV2, TokenV3, TopK, Typical

__all__ = [
    "OPT",
    "RULES",
    "BiLDStar",
    "Chow",
    "ChowLog",
    "Diff",
    "DiffLog",
    "Ensemble",
    "ExpectedGain",
    "Fixed",
    "Greedyward",
    "LearnedLossy",
    "Lossy",
    "OPTLog",
    "SpecDecode",
    "TokenV1",
    "TokenV2",
    "TokenV3",
    "TopK",
    "Typical",
    "VerifierGap",
    "get",
]

RULES: dict[str, Callable[..., TargetRule]] = {
    "specdecode": SpecDecode,
    "chow": Chow,
    "chow_log": ChowLog,
    "diff": Diff,
    "diff_log": DiffLog,
    "opt": OPT,
    "opt_log": OPTLog,
    "bild_star": BiLDStar,
    "verifier_gap": VerifierGap,
    "expected_gain": ExpectedGain,
    "token_v1": TokenV1,
    "token_v2": TokenV2,
    "token_v3": TokenV3,
    "greedyward": Greedyward,
    "lossy": Lossy,
    "learned_lossy": LearnedLossy,
    "ensemble": Ensemble,
    "typical": Typical,
    "top_k": TopK,
}


def get(name: str, **parameters: Any) -> TargetRule:
    """Build a rule by name, such as ``get("opt", alpha=0.3)``.

    Raises:
        ValueError: an unknown name (the nearest and the list are given), a parameter that the rule does not take, or
            one that it needs and did not get.
    """
    if name not in RULES:
        raise ValueError(f"rule: no rule is called {name!r}{nearest(name, RULES)} Known: {', '.join(RULES)}")
    rule: Any = RULES[name]
    takes = [field.name for field in fields(rule)]
    unknown = [key for key in parameters if key not in takes]
    if unknown:
        accepted = ", ".join(takes) or "no parameter"
        raise ValueError(f"rule {name!r}: takes {accepted}, got {unknown[0]!r}{nearest(unknown[0], takes)}")
    try:
        built: TargetRule = rule(**parameters)
    except TypeError as error:
        missing = [key for key in takes if key not in parameters and not hasattr(rule, key)]
        raise ValueError(f"rule {name!r}: expected a value for {', '.join(missing)}, got none") from error
    return built
