"""What a router bundle says about itself: the record behind ``router_config.json``, read as strictly as it is written.

A key that is unknown, missing or of another type is refused by name, and so is a record whose digest does not fit:
a router that is silently a little different is worse than none.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .checks import check_choice, nearest
from .features import FEATURE_SETS, scalar_names, schema_digest
from .heads import ESTIMATORS, HEAD_KINDS, HeadSpec

__all__ = [
    "CALIBRATION_KEYS",
    "SCHEMA_VERSION",
    "CalibrationRow",
    "RouterConfig",
    "explain_alpha",
]

SCHEMA_VERSION = 2

CALIBRATION_KEYS = ("greedy", "sampled")

_ALPHA_MEANING = (
    "The price of one rejection, in units of quality: defer to the verifier where the expected gain in the chance of "
    "the right token exceeds alpha times the chance D_TV(p, q) that deferring rejects the draft. Larger alpha, fewer "
    "rejections. Not comparable with the alpha of any other rule."
)


def explain_alpha(spec: HeadSpec) -> str:
    """Say what α means to a router with this head."""
    if spec.kind == "pooled":
        return (
            f"{_ALPHA_MEANING} The expected gain is that of the estimate. All this is about the default rule, "
            "`expected_gain`: with another rule alpha is that rule's own dial, and has to be given."
        )
    if "log" in spec.losses:
        return f"{_ALPHA_MEANING} Under the loss `log` the gain is one in nats of log probability, and so is the price."
    return _ALPHA_MEANING


@dataclass(frozen=True)
class CalibrationRow:
    """What one α gave on held-out prompts; ``*_low`` and ``*_high`` bound 95% of a bootstrap over prompts.

    Args:
        alpha: the setting.
        deferral: share of positions deferred to the verifier.
        rejection: expected share of drafted tokens rejected.
        quality: expected chance of the reference token (greedy: of the argmax; sampled: of the draw).
        drop_upper: for each confidence, such as "0.95", an upper bound of the mean quality drop against the verifier,
            over documents, each the mean of its positions.
    """

    alpha: float
    deferral: float
    rejection: float
    quality: float
    deferral_low: float | None = None
    deferral_high: float | None = None
    rejection_low: float | None = None
    rejection_high: float | None = None
    quality_low: float | None = None
    quality_high: float | None = None
    drop_upper: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        numbers = asdict(self)
        bounds = {f"drop_upper {key}": bound for key, bound in numbers.pop("drop_upper").items()}
        for name, value in (numbers | bounds).items():
            if name.endswith(("_low", "_high")) and value is None:
                continue
            _check_number(f"calibration {name}", value)


@dataclass(frozen=True)
class RouterConfig:
    """Everything that a bundle states. Fill in the first block; ``save_bundle`` fills in the rest from the head.

    Args:
        drafter: name of the drafter that the router was trained for.
        verifier: name of its verifier.
        vocabulary_fingerprint: of the tokenizer that both share.
        trace_digest: of the traces that it was trained on.
        default_alpha: the α in force where a user gives none.
        calibration: for ``greedy`` and for ``sampled``, what each α gave on held-out prompts.
        drafter_digest: of the drafter's weights; empty if unknown.
        verifier_digest: of the verifier's weights; empty if unknown.
        task: what the training prompts were, in words.
        figures: named results for the card, such as held-out losses.
        calibration_split: split of the traces that the calibration was measured on.
        calibration_documents: number of its documents.
        calibration_exact: whether they served nothing else (no training, no choice of a checkpoint, of the grid of α or
            of a calibration map), so that ``drop_upper`` holds as stated; else it is approximate.
        reference: for each feature what it was like in training, as ``router.drift`` reads it.
    """

    drafter: str
    verifier: str
    vocabulary_fingerprint: str
    trace_digest: str
    default_alpha: float
    calibration: Mapping[str, Sequence[CalibrationRow]] = field(default_factory=dict)
    drafter_digest: str = ""
    verifier_digest: str = ""
    task: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    calibration_split: str = ""
    calibration_documents: int = 0
    calibration_exact: bool = False
    reference: Mapping[str, Sequence[float]] = field(default_factory=dict)

    kind: str = "mlp"
    estimator: str = "gap"
    hidden: tuple[int, ...] = ()
    hidden_sizes: tuple[int, ...] = ()
    feature_set: str = "verified"
    features: tuple[str, ...] = ()
    feature_schema: str = ""
    losses: tuple[str, ...] = ("zero_one", "sampled")
    context: int = 0
    top_k: int = 0
    rank: int = 0
    token_rank: int = 0
    int8: bool = False
    alpha_meaning: str = _ALPHA_MEANING
    opset: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _check_number("default_alpha", self.default_alpha)
        check_choice("kind", self.kind, HEAD_KINDS)
        check_choice("estimator", self.estimator, ESTIMATORS)
        for key in self.calibration:
            check_choice("calibration", key, CALIBRATION_KEYS)
        if self.reference and self.features:
            expected = scalar_names(self.feature_set)
            if tuple(self.reference) != expected:
                raise ValueError(f"reference: expected the features {expected}, got {tuple(self.reference)}")

    @property
    def head_spec(self) -> HeadSpec:
        """What builds the head.

        Raises:
            ValueError: no head is described.
        """
        return HeadSpec(**{entry.name: getattr(self, entry.name) for entry in fields(HeadSpec)})

    def check_features(self) -> None:
        """Compare the feature schema with the one of this code.

        Raises:
            ValueError: the set is unknown here, or means something else than where the router was trained.
        """
        check_choice("feature_set", self.feature_set, FEATURE_SETS)
        here = schema_digest(self.feature_set)
        if self.feature_schema != here:
            trained_by = self.versions.get("speccascade", "unknown")
            raise ValueError(
                f"feature_schema: the features {self.feature_set!r} changed since this router was trained "
                f"(by speccascade {trained_by}): expected {here[:12]}, got {self.feature_schema[:12] or 'none'}; "
                "export it again from its checkpoint, or train anew"
            )

    def to_json(self) -> str:
        """Serialise, with a digest of the content.

        Raises:
            ValueError: a number is not finite.
        """
        content = asdict(self)
        try:
            signed = content | {"digest": _digest(content)}
            return json.dumps(signed, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        except ValueError as error:
            raise ValueError(f"config: expected finite numbers throughout: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> "RouterConfig":
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: it is no JSON object, of another schema version, has unknown or missing keys or values of
                another type, or its digest does not fit.
        """
        try:
            content = json.loads(text, parse_constant=_refuse_constant)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"router_config.json: expected JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"router_config.json: expected an object, got {type(content).__name__}")
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(_other_schema(content))
        digest = content.pop("digest", None)
        _check_keys(content)
        if digest != _digest(content):
            raise ValueError("router_config.json: its content does not fit its digest: edited or damaged")
        return cls(**content | _records(content))


def _other_schema(content: Mapping[str, Any]) -> str:
    came, versions = content.get("schema_version"), content.get("versions")
    writer = versions.get("speccascade", "unknown") if isinstance(versions, dict) else "unknown"
    advice = "; export it again from its checkpoint, or train anew" if came == 1 else ""
    return (
        f"router_config.json: expected schema_version {SCHEMA_VERSION}, got {came!r} "
        f"(written by speccascade {writer}){advice}"
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _records(content: Mapping[str, Any]) -> dict[str, Any]:
    """The values that JSON holds in another type than the record does."""
    calibration = {key: _calibration_rows(rows) for key, rows in content["calibration"].items()}
    for name, value in content["figures"].items():
        _check_number(f"figures {name}", value)
    for name, values in content["reference"].items():
        if not isinstance(values, list):
            raise ValueError(f"reference {name}: expected a list of numbers, got {values!r}")
        for value in values:
            _check_number(f"reference {name}", value)
    reference = {name: tuple(values) for name, values in content["reference"].items()}
    lists = {name: _list_of(kind, name, content[name]) for name, kind in _LIST_ITEMS.items()}
    return {"calibration": calibration, "reference": reference, **lists}


_LIST_ITEMS: dict[str, type] = {"hidden": int, "hidden_sizes": int, "features": str, "losses": str}


def _list_of(kind: type, name: str, values: list[Any]) -> tuple[Any, ...]:
    if any(type(value) is not kind for value in values):
        raise ValueError(f"router_config.json: expected {name!r} to be a list of {kind.__name__}, got {values!r}")
    return tuple(values)


def _calibration_rows(rows: Any) -> tuple[CalibrationRow, ...]:
    if not isinstance(rows, list):
        raise ValueError(f"calibration: expected a list of rows, got {rows!r}")
    return tuple(map(_calibration_row, rows))


def _calibration_row(row: Any) -> CalibrationRow:
    if not isinstance(row, Mapping):
        raise ValueError(f"calibration: expected rows with named values, got {row!r}")
    names = [entry.name for entry in fields(CalibrationRow)]
    for key in row:
        check_choice("calibration", key, names)
    missing = [name for name in ("alpha", "deferral", "rejection", "quality") if name not in row]
    if missing:
        raise ValueError(f"calibration: a row lacks {', '.join(missing)}: {dict(row)!r}")
    if not isinstance(row.get("drop_upper", {}), Mapping):
        raise ValueError(f"calibration drop_upper: expected bounds by confidence, got {row['drop_upper']!r}")
    return CalibrationRow(**row)


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "default_alpha": (int, float),
    "calibration": (dict,),
    "figures": (dict,),
    "calibration_documents": (int,),
    "calibration_exact": (bool,),
    "reference": (dict,),
    "hidden": (list,),
    "hidden_sizes": (list,),
    "features": (list,),
    "losses": (list,),
    "context": (int,),
    "top_k": (int,),
    "rank": (int,),
    "token_rank": (int,),
    "int8": (bool,),
    "opset": (int,),
    "versions": (dict,),
    "files": (dict,),
    "schema_version": (int,),
}
"""Every other key holds a string."""


def _check_keys(content: Mapping[str, Any]) -> None:
    known = [entry.name for entry in fields(RouterConfig)]
    unknown = [key for key in content if key not in known]
    if unknown:
        raise ValueError(f"router_config.json: unknown key {unknown[0]!r}{nearest(unknown[0], known)}")
    missing = [key for key in known if key not in content]
    if missing:
        raise ValueError(f"router_config.json: missing key {missing[0]!r}")
    for key, value in content.items():
        expected = _JSON_TYPES.get(key, (str,))
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            names = " or ".join(kind.__name__ for kind in expected)
            raise ValueError(f"router_config.json: expected {key!r} to be of type {names}, got {value!r}")
