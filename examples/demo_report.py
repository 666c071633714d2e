"""What the demo prints: a line of progress, and one table."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.metrics import RequestRows, Results, Summary
from examples.history import History


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one system made of the scenario. `slowdown`: of its prefills, against the calibration."""

    system: str
    results: Results
    history: History
    slowdown: float = 1.0


async def show_progress(system: str, rows: RequestRows, total: int, now: Callable[[], float]) -> None:
    """One line that keeps changing on a terminal; on anything else, a line every ten seconds."""
    began, terminal = now(), sys.stdout.isatty()
    try:
        while True:
            if terminal:
                print("\r" + progress_line(system, rows, total, now() - began), end="", flush=True)
            await asyncio.sleep(0.25 if terminal else 10.0)
            if not terminal:
                print(progress_line(system, rows, total, now() - began), flush=True)
    finally:
        print("\r" * terminal + progress_line(system, rows, total, now() - began), flush=True)


def progress_line(system: str, rows: RequestRows, total: int, seconds: float) -> str:
    done, met = len(rows.rows), sum(row.meets_ttft is True for row in rows.rows)
    bar = "#" * (24 * done // total)
    return f"{system:<18} [{bar:<24}] {done:>4}/{total} done, {met:>4} first tokens in time, {seconds:>4.0f} s"


def table(outcomes: Sequence[Outcome]) -> str:
    """Systems as columns, figures as rows."""
    totals = [outcome.results.total for outcome in outcomes]
    blocking = [outcome.results.blocking for outcome in outcomes]
    labels = sorted(outcomes[0].results.labels, key=lambda label: -outcomes[0].results.labels[label].n)

    def row(name: str, cells: Sequence[str]) -> str:
        return f"{name:<28}" + "".join(f"{cell:>19}" for cell in cells)

    def seconds(pick: Callable[[Summary], float | None]) -> list[str]:
        return ["-" if (value := pick(total)) is None else f"{value:.2f} s" for total in totals]

    def milliseconds(values: Sequence[float | None]) -> list[str]:
        return ["-" if value is None else f"{value * 1e3:.1f} ms" for value in values]

    lines = [row("", [outcome.system for outcome in outcomes])]
    lines.append(row(f"TTFT attainment  n={totals[0].n}", [percent(total.ttft_attainment) for total in totals]))
    for label in labels:
        parts = [outcome.results.labels[label] for outcome in outcomes]
        lines.append(row(f"  {label:<14} n={parts[0].n}", [percent(part.ttft_attainment) for part in parts]))
    lines += [
        row("TTFT  mean", seconds(lambda total: total.ttft_mean)),
        row("      p50", seconds(lambda total: total.ttft_p50)),
        row("      p99", seconds(lambda total: total.ttft_p99)),
        row("TBT attainment", [percent(total.tbt_attainment) for total in totals]),
        row("requests met per second", [f"{total.met_per_s:.2f}" for total in totals]),
        row("parks", [str(spread.n) for spread in blocking]),
        row("blocking  mean", milliseconds([spread.mean for spread in blocking])),
        row("          max", milliseconds([spread.max if spread.n else None for spread in blocking])),
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:], rule])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
