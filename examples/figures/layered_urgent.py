"""What neither paper has: layered prefill that lets the urgent pass between two groups of layers.

Layered Prefill has one cohort in flight and serves in order of arrival, so a short prompt waits for all groups of a
long one before it. Between groups the cohort's hidden state is kept anyway: S-EDF may run another cohort's group next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from engine.metrics import Row, percentile
from engine.simulation import simulate
from engine.timing import pass_seconds
from examples.arrivals import scaled
from examples.backends import simulated_arrival
from examples.figures.figure import Claim, Figure
from examples.figures.layered import CHUNKED, LAYERED, SETTING, deployment
from examples.figures.style import LEGEND, line, tidy
from examples.figures.workers import Workers
from examples.palette import FAINT, png
from examples.slos import A800_1K_PREFILL
from examples.workload import at_rate, open_workload
from models.costs import Volume
from scheduling.presets import preset

URGENT = "layered-s-edf"
SYSTEMS = (CHUNKED, LAYERED, URGENT)
RATES = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
RATE = 5.0  # of the claims
REQUESTS, SEEDS = 400, (0, 1)
SHORT = "text"  # the type with the tightest target: mean prompt 646 tokens, beside searches of 5,055


def slo_scale() -> float:
    """The targets are Llama-3.1-8B's on A800, times how much faster 1,024 tokens are prefilled here."""
    where = deployment()
    return pass_seconds(where.timing, where.config.num_layers, Volume.of(0, 1024, 1)) / A800_1K_PREFILL


def serve(system: str, rate: float, seed: int) -> Sequence[Row]:
    workload = open_workload("qwen")
    arrivals = scaled(at_rate(workload.draw(REQUESTS, seed=seed), workload, rate), slo=slo_scale())
    return simulate(preset(system), map(simulated_arrival, arrivals), deployment()).rows


@dataclass(frozen=True, slots=True)
class Waits:
    """Over all seeds: shares of requests, and seconds."""

    short: float  # short requests that meet TTFT
    all: float  # all that do
    both: float  # all that meet both targets
    short_p99: float
    long_p99: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Waits:
        short = [row for row in rows if row.label == SHORT]
        rest = [row for row in rows if row.label in ("search", "file")]
        return cls(
            mean(bool(row.meets_ttft) for row in short),
            mean(bool(row.meets_ttft) for row in rows),
            mean(bool(row.meets) for row in rows),
            *(percentile([row.ttft for row in some if row.ttft is not None], 99) for some in (short, rest)),
        )


async def make(workers: Workers) -> Figure:
    async def waits(system: str, rate: float) -> Waits:
        runs = await asyncio.gather(*(workers(serve, system, rate, seed) for seed in SEEDS))
        return Waits.of([row for run in runs for row in run])

    keys = [(system, rate) for system in SYSTEMS for rate in RATES]
    found = dict(zip(keys, await asyncio.gather(*(waits(*key) for key in keys)), strict=True))
    ours, theirs = found[URGENT, RATE], found[LAYERED, RATE]
    return Figure(
        title="Layered prefill that lets the urgent pass",
        setting=(
            f"{SETTING}; {len(SEEDS)} x {REQUESTS} requests like QwenTrace's, targets of Llama3-8B on A800 times "
            f"{slo_scale():.2f}, as its prefill of 1,024 tokens; figures at {RATE:g} requests a second"
        ),
        claims=[
            Claim(
                "Ours, no paper's: more short requests are in time between other cohorts' groups than behind them",
                f"texts that meet TTFT {100 * theirs.short:.0f} -> {100 * ours.short:.0f} %, their p99 "
                f"{theirs.short_p99:.2f} -> {ours.short_p99:.2f} s; of all requests {100 * theirs.all:.0f} -> "
                f"{100 * ours.all:.0f} %, with TBT {100 * theirs.both:.0f} -> {100 * ours.both:.0f} %",
                holds=ours.short > theirs.short and ours.all > theirs.all,
                why=f"long ones pay: p99 TTFT of searches and files {theirs.long_p99:.2f} -> {ours.long_p99:.2f} s",
            )
        ],
        rows=[
            {
                "system": system,
                "rate_per_s": rate,
                "texts_meet_ttft": each.short,
                "all_meet_ttft": each.all,
                "all_meet_both": each.both,
                "texts_ttft_p99_s": each.short_p99,
                "searches_and_files_ttft_p99_s": each.long_p99,
            }
            for (system, rate), each in found.items()
        ],
        png=plot(found),
    )


def plot(found: Mapping[tuple[str, float], Waits]) -> bytes:
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    shown = (
        ("short", "texts that meet TTFT"),
        ("both", "all that meet both targets"),
        ("short_p99", "p99 TTFT of texts, s"),
    )
    for axes, (field, label) in zip(panels, shown, strict=True):
        for system in SYSTEMS:
            axes.plot(RATES, [getattr(found[system, rate], field) for rate in RATES], label=system, **line(system))
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_xlabel("requests a second")
        tidy(axes)
    for axes in panels[:2]:
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.axhline(0.9, color=FAINT, lw=1, ls=(0, (4, 3)))
    panels[2].set_yscale("log")
    panels[2].yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    panels[2].yaxis.set_major_formatter("{x:g}")
    panels[2].yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*panels[0].get_legend_handles_labels(), **LEGEND, ncols=len(SYSTEMS))
    return png(figure)
