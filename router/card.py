"""The card of a router bundle: ``README.md``, with the header that the Hub reads. Text in, text out."""

import re
from collections.abc import Sequence

from .config import CalibrationRow, RouterConfig
from .features import feature_width, needs_hidden

__all__ = ["render_card"]

_ROWS_SHOWN = 12


def render_card(config: RouterConfig) -> str:
    """Write the card of a router: what it is, for which pair, how to use it, what each α gave."""
    drafter, verifier = _short(config.drafter), _short(config.verifier)
    sections = [
        _header(config),
        f"# Router for {drafter} → {verifier}",
        f"For a speculative cascade: `{drafter}` drafts, `{verifier}` verifies. {_purpose(config)} "
        f"{_read(config)} It changes neither model.",
        _usage(config),
        _facts(config),
        f"## What alpha means\n\n{config.alpha_meaning}\n\nDefault: {config.default_alpha:.3g}.",
        *_calibration(config),
        *_figures(config),
        "## Limits\n\n"
        f"For this pair and its vocabulary only: `check_pair` refuses another, and `speccascade generate` and "
        f"`evaluate` call it. {_training_text(config)} "
        f"On text unlike it, the decisions stay valid ({_kept(config)}), but the figures above need not hold.",
    ]
    return "\n\n".join(sections) + "\n"


def _purpose(config: RouterConfig) -> str:
    """What is decided, and by what."""
    decides = "decides at each drafted position which of the two the emitted token follows."
    if config.kind != "pooled":
        return f"This trained rule {decides}"
    return (
        "This router estimates the next token's distribution over both models' most probable tokens, and by default "
        f"{decides} Its estimate can also stand in for the verifier's confidence in a rule that decides token by token."
    )


def _read(config: RouterConfig) -> str:
    """What it is told of the text."""
    hidden = " and hidden states" if needs_hidden(config.feature_set) else ""
    if config.kind != "pooled":
        return f"It reads statistics of both models' distributions{hidden}, no token."
    seen = f"It reads statistics of both models' distributions{hidden}, and how probable each holds those tokens"
    if config.token_rank:
        return (
            f"{seen}. It also reads which tokens these are: it learned a correction for each that training met often."
        )
    return f"{seen}, not which they are."


def _kept(config: RouterConfig) -> str:
    """What holds of every emitted token."""
    if config.kind != "pooled":
        return "every emitted token follows the drafter's or the verifier's distribution exactly"
    return "every emitted token follows the rule's distribution exactly, by default the drafter's or the verifier's"


def _header(config: RouterConfig) -> str:
    lines = ["---", "library_name: speccascade", "tags:", "- speculative-decoding", "- cascade", "- router", "- onnx"]
    models = [name for name in (config.drafter, config.verifier) if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    if len(models) == 2:
        lines += ["base_model:", *(f"- {name}" for name in dict.fromkeys(models))]
    return "\n".join([*lines, "---"])


def _usage(config: RouterConfig) -> str:
    budget = "router = router.with_budget(rejection=0.10, greedy=True)   # or let its calibration choose alpha"
    router = "TokenRouter" if config.kind == "pooled" else "LearnedRouter"
    code = [
        f"from speccascade import {', '.join(sorted((router, 'SpeculativeCascade')))}",
        "",
        f'router = {router}.from_pretrained("path/or/hub-id", alpha={config.default_alpha:.3g})',
        *([budget] if config.calibration else []),
        "cascade = SpeculativeCascade(drafter, verifier, rule=router, gamma=5)",
        "out = cascade.generate(input_ids, max_new_tokens=128)",
    ]
    return "## Use\n\n```python\n" + "\n".join(code) + "\n```"


def _facts(config: RouterConfig) -> str:
    hidden = f", hidden layers {' × '.join(map(str, config.hidden))}" if config.hidden else ""
    width = feature_width(config.feature_set, config.hidden_sizes)
    read = f"{width}, of each hidden state {config.rank} directions" if config.rank else f"{width}"
    rows = [
        ("Drafter", _named(config.drafter, config.drafter_digest)),
        ("Verifier", _named(config.verifier, config.verifier_digest)),
        ("Task", config.task or "not stated"),
        ("Head", f"{config.kind}{hidden}, estimator `{config.estimator}`"),
        ("Features", f"`{config.feature_set}` ({read}), schema `{config.feature_schema[:12]}`"),
        ("Losses", ", ".join(f"`{loss}`" for loss in config.losses)),
        ("Vocabulary", f"`{config.vocabulary_fingerprint[:12] or 'unknown'}`"),
        ("Traces", f"`{config.trace_digest[:12] or 'unknown'}`"),
        ("ONNX", f"opset {config.opset}, one file, {'int8 weights' if config.int8 else 'float32'}, dynamic batch"),
        ("Made by", ", ".join(f"{name} {version}" for name, version in config.versions.items())),
    ]
    return "## Facts\n\n" + _table(("", ""), rows)


def _calibration(config: RouterConfig) -> list[str]:
    titles = {"greedy": "at temperature 0", "sampled": "when sampling"}
    sections = []
    for key, rows in config.calibration.items():
        if not rows:
            continue
        shown = _thinned(rows)
        body = [
            (
                f"{row.alpha:.4g}",
                _share(row.quality, row.quality_low, row.quality_high),
                _share(row.rejection, row.rejection_low, row.rejection_high),
                _share(row.deferral, row.deferral_low, row.deferral_high),
            )
            for row in shown
        ]
        note = "" if len(shown) == len(rows) else f" {len(shown)} of {len(rows)} rows; all are in `router_config.json`."
        sections.append(
            f"## Calibration {titles[key]}\n\nOn held-out prompts, with 95% intervals over prompts. Quality is the "
            f"expected chance of the reference token.{_bounds_text(config)}{note}\n\n"
            + _table(("alpha", "quality", "rejected", "deferred"), body)
        )
    return sections


def _bounds_text(config: RouterConfig) -> str:
    """Which documents the bounds of the quality drop come from, and whether they hold as stated."""
    if not config.calibration_documents:
        return ""
    how = "hold exactly" if config.calibration_exact else "are approximate: these documents served a choice before"
    return (
        f" Bounds of the mean loss of quality (`drop_upper`, `with_budget(quality_drop=...)`) come from "
        f"{config.calibration_documents} documents of the split `{config.calibration_split}` and {how}."
    )


def _figures(config: RouterConfig) -> list[str]:
    if not config.figures:
        return []
    rows = [(name, _number(value)) for name, value in config.figures.items()]
    return ["## Figures\n\n" + _table(("figure", "value"), rows)]


def _training_text(config: RouterConfig) -> str:
    return f"Trained on {config.task}." if config.task else "The training text is not stated."


def _thinned(rows: Sequence[CalibrationRow]) -> list[CalibrationRow]:
    """At most a dozen rows, evenly spaced, the first and the last among them."""
    if len(rows) <= _ROWS_SHOWN:
        return list(rows)
    step = (len(rows) - 1) / (_ROWS_SHOWN - 1)
    return [rows[round(index * step)] for index in range(_ROWS_SHOWN)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def _share(value: float, low: float | None, high: float | None) -> str:
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return f"{value:.3f}{interval}"


def _named(name: str, digest: str) -> str:
    return f"`{_short(name)}`" + (f", weights `{digest[:12]}`" if digest else "")


def _short(name: str) -> str:
    """A folder of the machine that trained it tells a reader nothing but its last part."""
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", "~", ".")) else name


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
