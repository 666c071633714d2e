"""Findings as people and programs read them: a table for the terminal, one Markdown file, JSON, CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from examples.findings import Findings, Spot
from examples.results import Metric, Record, worst_class

METRIC: dict[Metric, str] = {"ttft": "TTFT attainment", "tbt": "TBT attainment", "both": "attainment"}

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # heads, rows

SEARCH = """\
Attainment is not monotone in the load, so each search doubles (or halves) until it has a bracket, bisects it on a grid
of 16 steps to a doubling, and then looks two steps beyond the first that failed; if one of those holds, it goes on from
there. It does so for every seed, and around what they find all seeds are run for the curve. Intervals are over seeds
(95 %, Student's t), and as wide as a step of the grid at least."""


def text(findings: Findings) -> str:
    """What the terminal shows."""
    return "\n\n".join(_aligned(table) for table in _tables(findings))


def markdown(findings: Findings, *, question: str, setting: Sequence[str], command: str, plot: str | None) -> str:
    """The whole report. `plot`: where its picture is, as a link; `setting`: what the runs have in common, in words."""
    seeds = ", ".join(map(str, findings.seeds))
    parts = [
        f"# {question}",
        "\n".join(f"- {line}" for line in (*setting, f"Seeds: {seeds}", f"Configuration: `{findings.config_hash}`")),
    ]
    if plot is not None:
        parts.append(f"![{METRIC[findings.metric]} by rate and SLO scale]({plot})")
    for title, table in zip(_titles(findings), _tables(findings), strict=True):
        parts += [f"## {title}", _piped(table)]
    if findings.spots():
        parts.append(_reading(findings))
    if findings.knees or findings.min_slo:
        parts.append(SEARCH)
    parts += ["## Systems", _piped(_answers(findings)), "## To run it again", f"```sh\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def json_of(findings: Findings) -> str:
    content: dict[str, Any] = {
        "config_hash": findings.config_hash,
        "config": findings.config,
        "runs": [_named(run, findings.metric) for run in findings.runs],
    }
    if findings.config.get("knee") is not None:
        content["knees"] = list(findings.knees)
    if findings.config.get("min_slo") is not None:
        content["min_slo"] = list(findings.min_slo)
    return json.dumps(content, indent=2) + "\n"


def csv_of(findings: Findings) -> str:
    """A line for each run; the figures of each type get a column of their own."""
    lines = []
    for run in findings.runs:
        line: dict[str, Any] = {}
        for key, value in _named(run, findings.metric).items():
            if isinstance(value, dict):
                line |= {f"{key.removesuffix('_by_class')}_{label}": part for label, part in value.items()}
            else:
                line[key] = value
        lines.append(line)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _named(run: Record, metric: Metric) -> Record:
    """With the type that fares worst by the metric asked for."""
    worst = worst_class(run, metric)
    return {**run, "worst_class": None if worst is None else worst[0]}


# Tables


def _titles(findings: Findings) -> list[str]:
    titles = [METRIC[findings.metric].capitalize().replace("Ttft", "TTFT").replace("Tbt", "TBT")]
    titles = titles if findings.spots() else []
    if findings.knees:
        titles.append(f"Highest rate with {METRIC[findings.metric]} of {findings.config['knee']:.0%}")
    if findings.min_slo:
        titles.append(f"Tightest SLO scale with {METRIC[findings.metric]} of {findings.config['min_slo']:.0%}")
    return titles


def _tables(findings: Findings) -> list[Table]:
    tables: list[Table] = [_grid(findings)] if findings.spots() else []
    if findings.knees:
        tables.append(_searched(findings, findings.knees, "slo_scale", "rate", "SLO scale", "knee, req/s"))
    if findings.min_slo:
        tables.append(_searched(findings, findings.min_slo, "rate", "slo_scale", "req/s", "SLO scale"))
    return tables


def _grid(findings: Findings) -> Table:
    heads = ["SLO scale", "req/s", "system", METRIC[findings.metric], f"against {findings.systems[0]}", "met/s"]
    heads += ["TTFT p50", "p99", "blocking mean", "max", "busy", "fairness", "worst type"]
    return _used(heads, [_row(findings, spot) for spot in findings.spots()])


def _used(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Without the columns in which nobody has a figure."""
    kept = [column for column in range(len(heads)) if any(row[column] != "-" for row in rows)]
    return [heads[column] for column in kept], [[row[column] for column in kept] for row in rows]


def _row(findings: Findings, spot: Spot) -> list[str]:
    means = spot.means
    worst = "-" if spot.worst is None else f"{spot.worst[0]} {spot.worst[1]:.1%}"
    change = "-" if spot.change is None else _points(spot.change, len(findings.seeds) > 1)
    return [
        f"{spot.slo_scale:g}",
        f"{spot.rate:g}",
        spot.system,
        _percent(spot.attainment),
        change,
        _number(means.get("met_per_s"), ".2f"),
        _number(means.get("ttft_p50_s"), ".3f", " s"),
        _number(means.get("ttft_p99_s"), ".3f", " s"),
        _number(means.get("blocking_mean_ms"), ".2f", " ms"),
        _number(means.get("blocking_max_ms"), ".1f", " ms"),
        _percent(means.get("utilisation"), 0),
        _number(means.get("fairness"), ".2f"),
        worst,
    ]


def _searched(findings: Findings, found: Sequence[Any], at: str, value: str, at_head: str, value_head: str) -> Table:
    times_head = f"times {'' if value == 'rate' else 'as tight as '}{findings.systems[0]}"
    heads = [at_head, "system", value_head, "95 % interval", times_head]
    rows = []
    for entry in found:
        found_value = _number(entry[value], ".3g")
        if entry[value] is None:
            found_value = "none"
        elif entry["high" if value == "rate" else "low"] is None:
            found_value = f"beyond {entry[value]:.3g}"
        times = _number(entry["times"], ".2f")
        if entry["times"] is not None and len(findings.seeds) > 1 and entry["system"] != findings.systems[0]:
            times += f" ({entry['times_low']:.2f} to {entry['times_high']:.2f})"
        span = f"{_number(entry['low'], '.3g')} to {_number(entry['high'], '.3g')}"
        rows.append([f"{entry[at]:g}", entry["system"], found_value, span, times])
    return heads, rows


def _answers(findings: Findings) -> Table:
    systems = findings.config["systems"]
    answers = list(next(iter(systems.values())))
    return ["system", *answers], [
        [name, *(f"`{words}`" for words in system.values())] for name, system in systems.items()
    ]


def _reading(findings: Findings) -> str:
    """How the grid's table is to be read."""
    seeds = len(findings.seeds)
    over = "one seed, so without intervals" if seeds == 1 else f"means over {seeds} seeds"
    change = "in percentage points" if seeds == 1 else "in percentage points, paired by seed, with its 95 % interval"
    return (
        f"Figures are {over}; the change against {findings.systems[0]} is {change}. Errors, refusals and unfinished\n"
        "requests are misses. Busy: the share of the time that prefilling instances had work; fairness: Jain's index\n"
        "of TTFT over its target."
    )


# Cells


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _points(change: tuple[float, float, float], interval: bool) -> str:
    middle, low, high = (100 * value for value in change)
    return f"{middle:+.1f}" + (f" ({low:+.1f} to {high:+.1f})" if interval else "")


def _aligned(table: Table) -> str:
    heads, rows = table
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)


def _piped(table: Table) -> str:
    heads, rows = table
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
