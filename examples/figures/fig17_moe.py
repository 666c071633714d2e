"""FlowPrefill's figure 17: goodput, and how tight a target can be, of a mixture of experts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt

from engine.deployment import Deployment
from engine.timing import pass_seconds
from examples.figures.figure import Claim, Figure
from examples.figures.study import TARGET, Curve, Study, curved, for_each, gathered, generated, searched, times
from examples.figures.style import LEGEND, attainment_axis, line, rate_and_scale_axes, tidy
from examples.figures.workers import Workers
from examples.palette import png
from examples.search import Estimate, ratio
from examples.slos import A800_1K_PREFILL
from models.costs import Volume

REQUESTS = 327
SEEDS = (1, 2, 3)
CP2K, CP2K_FCFS, OURS = "distserve-cp2k order=s-edf", "distserve-cp2k", "flowprefill"
SYSTEMS = (CP2K, CP2K_FCFS, OURS)
ORDERS = {CP2K: "S-EDF", "distserve-cp2k order=edf": "EDF", CP2K_FCFS: "FCFS"}  # between the chunks: for goodput
FACTORS = (1.0, 2.0, 2.83, 4.0, 5.66)  # of the trace's rate
LOADS, DRAWN = (1.0, 2.0, 4.0), 1  # of it, where targets are scaled; the one whose curve is drawn
SCALES = (2.0, 1.0, 0.5, 0.25, 0.125)


async def make(workers: Workers) -> Figure:
    where = Deployment("qwen3-30b-a3b", "a800-80g", tp=2)
    one_k = pass_seconds(where.timing, where.config.num_layers, Volume.of(0, 1024, 1))
    load = replace(generated("qwen", REQUESTS), slo_base=one_k / A800_1K_PREFILL)
    study = Study(workers, where, load, SEEDS)
    loads = [factor * study.rate for factor in LOADS]
    rates = [factor * study.rate for factor in FACTORS]
    knees, tightest, by_rate, by_scale = await asyncio.gather(
        for_each((*ORDERS, OURS), study.knee),
        gathered(for_each(SYSTEMS, partial(study.tightest, rate=rate)) for rate in loads),
        for_each(SYSTEMS, lambda system: study.by_rate(system, rates)),
        for_each(SYSTEMS, lambda system: study.by_scale(system, loads[DRAWN], SCALES)),
    )
    goodput = {other: ratio(knees[OURS], knees[other]) for other in ORDERS}
    tighter, fcfs_tighter = ([times(at[OURS], at[other]) for at in tightest] for other in (CP2K, CP2K_FCFS))
    return Figure(
        title="FlowPrefill, figure 17: goodput and the tightest targets of a mixture of experts",
        setting=(
            f"Qwen3-30B-A3B on A800 (TP2), 1P1D, simulated; {len(SEEDS)} x {REQUESTS} requests like QwenTrace's; "
            f"targets of Llama3-8B times {load.slo_base:.2f}, as 1,024 tokens take {1e3 * one_k:.0f} ms here"
        ),
        claims=[
            Claim(
                "1.6x the goodput of DistServe-CP2K",
                ", ".join(f"{shown(goodput[other])} with {order}" for other, order in ORDERS.items())
                + " between its chunks; in brackets the 95 % intervals over seeds",
                holds=(goodput[CP2K].value or 0.0) >= 1.55,
                why="the bar: it is with S-EDF; the paper states neither the order nor its targets for this model, and "
                f"its 1.6x lies within the interval with {' and '.join(within(goodput, 1.6)) or 'none'}",
            ),
            Claim(
                "2.4x tighter targets",
                f"{listed(tighter)} with S-EDF between its chunks, {listed(fcfs_tighter)} with FCFS, at "
                f"{', '.join(f'{rate:.1f}' for rate in loads)} requests a second",
                holds=max(tighter) >= 2.4,
                why="the bar: it is with S-EDF at one of these loads; the paper states neither load nor order, and "
                f"FCFS gives that or more at {sum(factor >= 2.4 for factor in fcfs_tighter)} of them",
            ),
        ],
        rows=[
            row
            for system in SYSTEMS
            for row in (
                *searched(system, knees[system], tightest[0][system], loads[0]),
                *(
                    searched(system, knees[system], at[system], rate)[-1]
                    for at, rate in zip(tightest[1:], loads[1:], strict=True)
                ),
                *curved(system, by_rate[system], by_scale[system], loads[DRAWN]),
            )
        ]
        + [row for system in ORDERS if system not in SYSTEMS for row in searched(system, knees[system])],
        png=plot(by_rate, by_scale, loads[DRAWN]),
    )


def within(factors: Mapping[str, Estimate], theirs: float) -> list[str]:
    """The orders whose interval `theirs` is in."""
    ends = {ORDERS[other]: (each.low, each.high) for other, each in factors.items()}
    return [
        order for order, (low, high) in ends.items() if low is not None and high is not None and low <= theirs <= high
    ]


def shown(factor: Estimate) -> str:
    if factor.value is None or factor.low is None or factor.high is None:
        return "not found"
    return f"{factor.value:.2f}x ({factor.low:.2f} to {factor.high:.2f})"


def listed(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:.1f}x" for factor in factors)


def plot(by_rate: Mapping[str, Curve], by_scale: Mapping[str, Curve], rate: float) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for system in SYSTEMS:
        style = line(system) | ({"alpha": 0.5} if system == CP2K_FCFS else {})
        left.plot(*zip(*by_rate[system], strict=True), label=system, **style)
        right.plot(*zip(*by_scale[system], strict=True), **style)
    rate_and_scale_axes(left, right, rate)
    for axes in (left, right):
        tidy(axes)
        attainment_axis(axes, TARGET, first=axes is left)
    figure.legend(*left.get_legend_handles_labels(), **LEGEND, ncols=len(SYSTEMS))
    return png(figure)
