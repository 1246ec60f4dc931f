"""Lay out a report in Markdown, for readers and repositories. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from .regret import PARTS

__all__ = ["format_number", "render_report"]

_LOSS_TITLES = {
    "zero_one": "0-1 loss of the more likely token (rejection as sampled at the traces' temperature)",
    "sampled": "Loss of a sampled token, 1 − π(label)",
    "log": "Log loss, −log π(label) in nats",
    "greedy": "0-1 loss at temperature 0",
}
_FIGURE_TITLES = {
    "frontier_zero_one": "Frontiers, 0-1 loss",
    "frontier_sampled": "Frontiers, sampled-token loss",
    "frontier_log": "Frontiers, log loss",
    "frontier_greedy": "Frontiers at temperature 0",
    "regret_zero_one": "Regret by its parts, 0-1 loss",
    "regret_sampled": "Regret by its parts, sampled-token loss",
    "regret_log": "Regret by its parts, log loss",
    "regret_greedy": "Regret by its parts at temperature 0",
    "distances": "Distance of every frontier from the clairvoyant's",
    "reliability": "Calibration",
    "live": "Live quality against verifier calls",
}


_DIVERSITY = "entropy / distinct at"


def render_report(
    live: pd.DataFrame, frontiers: pd.DataFrame, record: Mapping[str, Any], figures: Sequence[str]
) -> str:
    """Write the page."""
    models, shown = record["models"], {figure.rsplit("/", 1)[-1].removesuffix(".png"): figure for figure in figures}
    parts = [f"# {models['drafter']} → {models['verifier']}", "", *_say_summary(live, record)]
    if len(live):
        parts += [
            "",
            "## Live run",
            "",
            *_say_live_conditions(record),
            "",
            *_live_rows(live, record),
            "",
            *_show("live", shown),
        ]
    if len(frontiers):
        parts += ["", "## Offline frontiers", "", *_explain_frontiers(record)]
        for loss in record["losses"]:
            parts += ["", f"### {_LOSS_TITLES.get(loss, loss)}", "", *_frontier_rows(frontiers, record, loss), ""]
            parts += _show(f"frontier_{loss}", shown)
        parts += ["", *_show("distances", shown)]
        parts += _section("By origin", _say_origins(frontiers, record))
        parts += _section("Token rules at equal rejection", _say_rates(record))
        parts += _section("Diversity", _say_diversity(record)) + _section("Regret", _say_regret(record, shown))
        parts += ["", "## Calibration", "", *_say_calibration(record), ""]
        parts += _show("reliability", shown) + _section("Drift", _say_drift(record))
    parts += ["", "## How this was made", "", *_say_provenance(record)]
    return "\n".join(parts).rstrip() + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    """A part of the page, unless there is nothing to say."""
    return ["", f"## {title}", "", *lines] if lines else []


def _say_summary(live: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    lines = [f"* {sentence}" for found in record["losses"].values() for sentence in found["verdict"]]
    ratio = record["drafter_cost_ratio"]
    if ratio is not None:
        meaning = "so no speed-up is claimed here" if ratio > 0.5 else "which leaves room for a speed-up"
        lines.append(f"* A step of the drafter costs {ratio:.2f} of one of the verifier, {meaning}.")
    if len(live) and live["speed_ratio"].notna().any():
        best = live[live["kind"] != "single"].sort_values("speed_ratio").tail(1)
        lines += [
            f"* Fastest cascade: {_name(row)}, {row['speed_ratio']:.2f} times the verifier alone "
            f"[{row['speed_ratio_low']:.2f}, {row['speed_ratio_high']:.2f}], "
            f"{row['calls_per_token']:.2f} verifier calls a token."
            for _, row in best.iterrows()
        ]
    return lines + [f"* {note}" for note in record["notes"]]


def _say_live_conditions(record: Mapping[str, Any]) -> list[str]:
    run = record["live_run"]
    return [
        f"{run['prompts']} prompts of {record['data']['source']} ({run['split']}), {run['repeats']} answer(s) each, "
        f"at most {run['max_new_tokens']} tokens, temperature {run['temperature']:g}, γ = {run['gamma']}, "
        f"seed {run['seed']}. Quality is {run['scorers'][0]}. Brackets: 95% intervals, prompts resampled. "
        "Speeds are medians over prompts."
    ]


def _live_rows(live: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    offline = "offline_quality" in live.columns
    head = ["method", "α", "budget"] + (["offline quality", "offline rejection", "offline deferral"] if offline else [])
    head += [
        "live quality",
        "rejection",
        "deferral",
        "verifier calls a token",
        "tokens a second",
        "× verifier alone",
        "same texts as",
    ]
    rows = []
    for _, row in live.iterrows():
        cells = [_bold(row["label"], row["kind"]), format_number(row["alpha"], ".3g"), row.get("budgets") or "–"]
        if offline:
            cells += [
                _spread(row["offline_quality"], row["offline_low"], row["offline_high"]),
                _bounds(row["offline_rejection"], row["offline_rejection_high"]),
                format_number(row["offline_deferral"], ".3f"),
            ]
        cells += [
            _spread(row["quality"], row["quality_low"], row["quality_high"]),
            format_number(row["rejection"], ".3f"),
            format_number(row["deferral"], ".3f"),
            format_number(row["calls_per_token"], ".2f"),
            format_number(row["tokens_per_second"], ".1f"),
            _spread(row["speed_ratio"], row["speed_ratio_low"], row["speed_ratio_high"], ".2f"),
            row["same_as"] if isinstance(row["same_as"], str) else "",
        ]
        rows.append(cells)
    return _table(head, rows)


def _explain_frontiers(record: Mapping[str, Any]) -> list[str]:
    run = record["offline_run"]
    return [
        f"Every rule over its whole range, α chosen on {run['chosen_on']}, measured on {run['reported_on']}. A "
        "frontier is the loss that can be had while rejecting at most so many of the drafted tokens (mixing two "
        "settings at random is allowed); *mean loss* is its mean over all budgets up to lossless decoding's, "
        "*distance* the same above the clairvoyant choice between q and p, OPT being 100: lower is better. Token "
        "rules are not bound by the clairvoyant. Their rejection is the lower end of what the logged top-k allows: the "
        "benefit of the doubt is theirs. The last columns say how a router does against the rule: the difference in "
        "mean loss with its 95% interval, paired over documents (below 0 the router is better)."
    ]


def _frontier_rows(frontiers: pd.DataFrame, record: Mapping[str, Any], loss: str) -> list[str]:
    found = record["losses"][loss]
    table = frontiers[frontiers["loss"] == loss].copy()
    table["height"] = [area["value"] for area in table["area"]]
    routers = list(dict.fromkeys(row["router"] for row in found["comparisons"]))
    labels = dict(zip(table["method"], table["label"], strict=True))
    budgets = [f"loss at {share:.0%}" for share in found["budgets"]]
    head = ["method", "kind", "distance", "mean loss", *budgets, *(labels[router] for router in routers)]
    rows = []
    for _, row in table.sort_values("height").iterrows():
        distance = row["distance"]
        rows.append(
            [
                _bold(row["label"], row["kind"]),
                row["kind"],
                "–" if distance is None else _spread(distance["value"], distance["low"], distance["high"], ".0f"),
                _spread(row["area"]["value"], row["area"]["low"], row["area"]["high"], ".4f"),
                *(f"{one['value']:.4f}" for one in row["at_budgets"]),
                *(_against(row["against"].get(router)) for router in routers),
            ]
        )
    ends = found["rejection_of_lossless"], found["drafter_loss"], found["verifier_loss"]
    facts = (
        f"Lossless decoding rejects {ends[0]['value']:.3f} of the drafted tokens; loss of the drafter "
        f"{ends[1]['value']:.4f}, of the verifier {ends[2]['value']:.4f}; {found['positions']:,} positions of "
        f"{found['prompts']:,} prompts ({found['documents']:,} documents, the unit of resampling)."
    )
    widest, gap = max(found["rejection_open_by"].items(), key=lambda item: item[1])
    if gap >= 5e-4:
        facts += f" The unlogged tail leaves the rejection of token rules open by at most {gap:.3f} ({labels[widest]})."
    return [facts, "", *_table(head, rows)]


def _against(row: Mapping[str, Any] | None) -> str:
    """What a router does against the rule of this line."""
    if row is None:
        return ""
    said = f"**{row['outcome']}**" if row["outcome"] == "loses" else row["outcome"]
    return f"{said} {row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"


def _say_calibration(record: Mapping[str, Any]) -> list[str]:
    errors = record["offline_run"]["calibration"]
    said = [f"The argmaxes differ at {errors['share_differing']:.1%} of the positions."]
    for name, error in errors.items():
        if isinstance(error, Mapping):
            what = "gap" if name not in ("drafter", "verifier") else "confidence"
            said.append(f"Calibration error of the {name}'s {what}: {format_number(error['all'], '.3f')} overall, "
                        f"{format_number(error['differ'], '.3f')} where they differ.")  # fmt: skip
    return [" ".join(said)]


def _say_origins(frontiers: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    """The same methods on each set that the traces were merged from."""
    origins = record["origins"]
    if not origins:
        return []
    lines = [
        "Distance from the clairvoyant's frontier on each set that the traces were merged from, OPT on the same "
        "positions being 100. α is chosen on all sets together."
    ]
    for loss in record["losses"]:
        table = frontiers[frontiers["loss"] == loss]
        rows = []
        for _, row in table.iterrows():
            found = [measured[loss]["distance_percent"].get(row["method"]) for measured in origins.values()]
            cells = ["–" if one is None else _spread(one["value"], one["low"], one["high"], ".0f") for one in found]
            rows.append([_bold(row["label"], row["kind"]), *cells])
        heads = [f"{name} ({measured[loss]['positions']:,} positions)" for name, measured in origins.items()]
        lines += ["", f"### {_LOSS_TITLES.get(loss, loss)}", "", *_table(["method", *heads], rows)]
    return lines


def _say_rates(record: Mapping[str, Any]) -> list[str]:
    """How likely each token rule makes the label at the same rejections, and who is better than whom."""
    table = pd.DataFrame(record["rates"])
    if table.empty:
        return []
    said = (
        "Chance that a sampled token is the label where so many of the drafted tokens are rejected, read off each "
        "rule's frontier; below it entropy (nats) and distinctness of what is emitted. Brackets: 95% of resampled "
        "documents. A rule that spends no more than less repeats its last value."
    )
    alone, pairs = table[table["against"] == ""], table[table["against"] != ""]
    lines = [
        said,
        "",
        *_rate_table(alone, "label", "right at", _right),
        "",
        *_rate_table(alone, "label", _DIVERSITY, _diverse),
    ]
    if len(pairs):
        named = pairs.assign(pair=pairs["label"] + " − " + pairs["against_label"])
        said = "Differences, paired over documents: above 0 the first is more often right, or more diverse."
        lines += [
            "",
            said,
            "",
            *_rate_table(named, "pair", "right at", _gain),
            "",
            *_rate_table(named, "pair", _DIVERSITY, _diverse),
        ]
    return lines


def _rate_table(table: pd.DataFrame, name: str, title: str, cell: Callable[[pd.Series], str]) -> list[str]:
    rates = list(dict.fromkeys(table["rate"]))
    rows = [[label, *(cell(row) for _, row in found.iterrows())] for label, found in table.groupby(name, sort=False)]
    return _table([title, *(f"{rate:.2f}" for rate in rates)], rows)


def _right(row: pd.Series) -> str:
    return _spread(row["right"], row["low"], row["high"])


def _gain(row: pd.Series) -> str:
    return _spread(row["right"], row["low"], row["high"], "+.4f")


def _diverse(row: pd.Series) -> str:
    return f"{row['entropy']:.3f} / {row['distinctness']:.3f}"


def _say_diversity(record: Mapping[str, Any]) -> list[str]:
    """How much sampling narrows, beside what it wins: a token is easily right if always the same one is drawn."""
    rows = [
        [
            _bold(row["label"], row["kind"]),
            format_number(row["alpha"], ".3g"),
            _bounds(row["rejection"], row["rejection_high"]),
            format_number(row["quality"], ".3f"),
            format_number(row["entropy"], ".3f"),
            format_number(row["distinctness"], ".3f"),
        ]
        for row in record["diversity"]
    ]
    if not rows:
        return []
    said = (
        "Sampling at the traces' temperature, each rule at the setting whose rejection comes nearest to each budget. "
        "*Right* is the chance that a sampled token is the label, *entropy* (nats) that of the law which is emitted, "
        "*distinct* the chance that two tokens drawn from it differ; of both, the unlogged tail counts as one token. "
        "A verifier at a temperature of its own is decoded losslessly: what it rejects is its distance from the "
        "drafter. A rule that wins only what a colder verifier wins has bought it with diversity."
    )
    return [said, "", *_table(["method", "α", "rejection", "right", "entropy", "distinct"], rows)]


def _say_regret(record: Mapping[str, Any], shown: Mapping[str, str]) -> list[str]:
    """What is missing to one who knows the label, and why."""
    regret = pd.DataFrame(record["regret"])
    if regret.empty:
        return []
    lines = [
        "What a rule pays at price α (loss + α a rejection) above one who knows the label, in three parts that add "
        "up: the *threshold* on its own order of positions, the *calibration* of its score (a monotone correction, "
        "fitted on other documents: it can fall slightly below 0), and the *ranking* that is left. Ranking holds the "
        "noise of labels, which no feature removes and the data alone cannot tell from the rest; *noise* is what it "
        "would be if labels were drawn from the verifier. Brackets: 95% of resampled documents."
    ]
    for loss, table in regret.groupby("loss", sort=False):
        head = ["method", "α", "regret", *PARTS, "noise"]
        rows = [
            [
                _bold(row["label"], row["kind"]),
                f"{row['alpha']:g}",
                *(_spread(row[part], row[f"{part}_low"], row[f"{part}_high"], ".4f") for part in ("regret", *PARTS)),
                f"{row['noise']:.4f}",
            ]
            for _, row in table.sort_values(["alpha", "regret"]).iterrows()
        ]
        lines += ["", f"### {_LOSS_TITLES.get(str(loss), loss)}", "", *_table(head, rows), ""]
        lines += _show(f"regret_{loss}", shown)
    return lines


def _say_drift(record: Mapping[str, Any]) -> list[str]:
    drift = record["offline_run"].get("drift", {})
    return [f"* {name}: {'**drifted**, ' if found['drifted'] else ''}{found['said']}" for name, found in drift.items()]


def _say_provenance(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for title, made in (("Live run", record["live_run"]), ("Offline", record["offline_run"])):
        if made:
            commit = f", commit {made['commit']}" if made.get("commit") else ""
            lines.append(f"* {title}: `{made['command']}`, speccascade {made['version']}{commit}")
    data = record["data"]
    lines.append(f"* Data: {data['source']}{f' ({data_licence})' if (data_licence := data['licence']) else ''}")
    for name, licence in record["models"]["licences"].items():
        lines.append(f"* Model: {name} ({licence})")
    if record["live_run"].get("verifier_parameters"):
        run = record["live_run"]
        lines.append(
            f"* Parameters: drafter {run['drafter_parameters'] / 1e6:.0f}M, "
            f"verifier {run['verifier_parameters'] / 1e6:.0f}M; {run['threads']} threads"
        )
    return lines


def _show(name: str, figures: Mapping[str, str]) -> list[str]:
    return [f"![{_FIGURE_TITLES.get(name, name)}]({figures[name]})"] if name in figures else []


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def _name(row: pd.Series) -> str:
    return str(row["label"]) if math.isnan(row["alpha"]) else f"{row['label']} at α = {row['alpha']:.3g}"


def _bold(label: str, kind: str) -> str:
    return f"**{label}**" if kind == "router" else label


def format_number(value: float | None, form: str) -> str:
    """Write a number, or a dash for none."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def _spread(value: float, low: float, high: float, form: str = ".3f") -> str:
    if math.isnan(value):
        return "–"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _bounds(low: float, high: float) -> str:
    if math.isnan(low):
        return "–"
    return f"{low:.3f}" if high - low < 5e-4 else f"{low:.3f}–{high:.3f}"
