"""FlowPrefill's figure 10: what slack is worth. The same system with three orders, all of them by deadline.

EDF         earliest deadline first, late or not
D-EDF       a request counts as late, and goes behind all others, once its deadline has passed. (The paper has no
            definition; this is our reading.)
S-EDF       ... once what it still needs no longer fits before its deadline
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import matplotlib.pyplot as plt

from engine.deployment import Deployment
from examples.figures.figure import Claim, Figure
from examples.figures.study import TARGET, Curve, Study, curved, for_each, generated, searched, times
from examples.figures.style import LEGEND, attainment_axis, headline, rate_and_scale_axes, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, ORANGE, PINK, png

REQUESTS, SEEDS = 600, (1, 2, 3, 4)
EDF, D_EDF, S_EDF = "flowprefill order=edf", "flowprefill order=d-edf", "flowprefill"
STYLES = {EDF: ("EDF", ORANGE, "^", "--"), D_EDF: ("D-EDF", PINK, "v", "-."), S_EDF: ("S-EDF", BLUE, "o", "-")}
RATES = [2 ** (step / 4) for step in range(3, 12)]  # over the trace's
SCALES = [2 ** (-step / 4) for step in range(10)]
LOAD = 2.0  # at which targets are scaled, over the trace's rate


async def make(workers: Workers) -> Figure:
    study = Study(workers, Deployment(model="llama3-8b", hardware="a800-80g"), generated("qwen", REQUESTS), SEEDS)
    load = LOAD * study.rate
    at = [factor * study.rate for factor in RATES]
    knees, tightest, rates, scales = await asyncio.gather(
        for_each(STYLES, study.knee),
        for_each(STYLES, lambda system: study.tightest(system, load)),
        for_each(STYLES, lambda system: study.by_rate(system, at)),
        for_each(STYLES, lambda system: study.by_scale(system, load, SCALES)),
    )
    goodput = [times(knees[S_EDF], knees[other]) for other in (D_EDF, EDF)]
    tighter = [times(tightest[S_EDF], tightest[other]) for other in (D_EDF, EDF)]
    most = rates[S_EDF][-1][0]
    left = ", ".join(f"{STYLES[system][0]} {curve[-1][1]:.0%}" for system, curve in rates.items())
    return Figure(
        title="FlowPrefill, figure 10: S-EDF, D-EDF and EDF",
        setting=f"Llama3-8B on A800, simulated; {REQUESTS} requests a run like QwenTrace's, {len(SEEDS)} seeds",
        claims=[
            Claim(
                "S-EDF has a higher goodput than D-EDF and EDF",
                f"{goodput[0]:.2f}x and {goodput[1]:.2f}x; at {most:.3g} requests a second in time: {left}",
                holds=min(goodput) > 1,
                why="D-EDF is not defined in the paper; here a request is late from its deadline on",
            ),
            Claim(
                "S-EDF keeps tighter targets than D-EDF and EDF",
                f"{tighter[0]:.2f}x and {tighter[1]:.2f}x, at {load:.2g} requests a second",
                holds=min(tighter) > 1,
                why="As above",
            ),
        ],
        rows=[
            row
            for system in STYLES
            for row in (
                *searched(system, knees[system], tightest[system], load),
                *curved(system, rates[system], scales[system], load),
            )
        ],
        png=plot(rates, scales, load),
    )


def plot(rates: Mapping[str, Curve], scales: Mapping[str, Curve], load: float) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for system, (name, colour, marker, style) in STYLES.items():
        look = {"color": colour, "marker": marker, "ls": style, "lw": 1.6, "ms": 5, "mfc": "white", "mew": 1.4}
        left.plot(*zip(*rates[system], strict=True), label=name, **look)
        right.plot(*zip(*scales[system], strict=True), **look)
    rate_and_scale_axes(left, right, load)
    for axes in (left, right):
        tidy(axes)
        attainment_axis(axes, TARGET, first=axes is left)
    headline(figure, "FlowPrefill, figure 10: what slack is worth (Llama3-8B on A800)")
    figure.legend(*left.get_legend_handles_labels(), **LEGEND, ncols=len(STYLES))
    return png(figure)
