"""What the factor of FlowPrefill's figure 9 depends on: the length of the run, the draw, and the batch.

Its knee lies above what the device can do, and a tenth of the requests is given up. A run starts empty, though, and
ends with nobody coming while the last ones still have time: its ends fare better than the rest, and of a short run they
are much. DistServe's knee is far below, and does not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from engine.deployment import Deployment
from engine.timing import pass_seconds
from examples.figures.fig09_goodput import REQUESTS as SLICE
from examples.figures.figure import Claim, Figure
from examples.figures.study import Study, for_each, generated
from examples.figures.style import headline, line, ratio_axis, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, INK, png
from examples.search import Estimate, combine, ratio
from models.costs import Volume

LENGTHS = {100: 12, SLICE: 12, 1000: 6}  # requests in a run, and how many seeds
BASE, OURS, RELEASE = "distserve", "flowprefill", "flowprefill-release"
BATCHES = {
    OURS: "4,096 tokens",
    f"{OURS} margin=0.1": "4,096, a tenth in reserve",
    f"{OURS} budget=2048": "2,048 tokens",
    f"{OURS} budget=2048 margin=0.1": "2,048, a tenth in reserve",
    f"{OURS} batch=alone": "none",
    RELEASE: "-release",
}
PAPER = 4.7


@dataclass(frozen=True, slots=True)
class Factor:
    """Over DistServe, and from which knee, in requests per second; `draws`: the factor of each seed."""

    over: Estimate
    knee: Estimate
    draws: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.over.value or 0:.1f}x ({self.over.low or 0:.1f} to {self.over.high or 0:.1f})"


async def make(workers: Workers) -> Figure:
    deployment = Deployment(model="llama3-8b", hardware="a800-80g")
    found: dict[tuple[str, int], Factor] = {}
    for length, seeds in LENGTHS.items():
        study = Study(workers, deployment, generated("qwen", length), range(1, seeds + 1))
        systems = BATCHES if length == SLICE else (OURS, RELEASE)
        knees = await for_each((BASE, *systems), study.knee)
        for system, knee in knees.items():
            pairs = zip(knee, knees[BASE], strict=True)
            draws = tuple((edge.value or 0.0) / (base.value or 1.0) for edge, base in pairs)
            found[system, length] = Factor(ratio(knee, knees[BASE]), combine(knee), draws)
    slice_, spread = found[OURS, SLICE], found[OURS, SLICE].draws
    alone = capacity(deployment)
    at = {system: found[system, SLICE] for system in BATCHES}
    return Figure(
        title="FlowPrefill, figure 9, further: what its factor over DistServe depends on",
        setting=(
            f"Llama3-8B on A800, 1P1D, simulated; requests like QwenTrace's, Poisson, {max(LENGTHS.values())} seeds "
            f"({LENGTHS[1000]} for 1,000 requests); in brackets the 95 % intervals"
        ),
        claims=[
            Claim(
                f"4.7x the goodput of DistServe or more, measured on one slice of {SLICE} requests",
                ", ".join(f"{found[OURS, length]} with {length:,}" for length in LENGTHS)
                + f" requests a run; one draw of {SLICE} gives {min(spread):.1f}x to {max(spread):.1f}x",
                holds=(slice_.over.value or 0.0) >= PAPER,
                why=(
                    f"The factor falls with the length. The device can do {alone:.1f} prompts a second one by one; "
                    f"FlowPrefill's knee lies above ({knees_of(found, OURS)}): a tenth may be late, and a run starts "
                    "empty and ends with nobody coming, where more are in time than between. DistServe's stays "
                    f"({knees_of(found, BASE)}). {SLICE} is the length of the paper's slice, and was not chosen for "
                    "its result"
                ),
            ),
            Claim(
                "Batches of up to 4K tokens are a good balance",
                f"at the knee, with 4,096 tokens {at[OURS]}, with 2,048 {at[f'{OURS} budget=2048']}, without batches "
                f"{at[f'{OURS} batch=alone']}; with 4,096 and a tenth of the target in reserve "
                f"{at[f'{OURS} margin=0.1']}",
                holds=(at[OURS].over.value or 0.0) >= 0.98 * max(each.over.value or 0.0 for each in at.values()),
                why=(
                    "A batch is full when its head has no time to spare, and texts that come while it runs, due after "
                    "its head, wait for all of it. A reserve and a smaller budget keep batches short"
                ),
            ),
        ],
        rows=[
            {
                "system": system,
                "requests": length,
                "knee_per_s": each.knee.value,
                "over_distserve": each.over.value,
                "low": each.over.low,
                "high": each.over.high,
            }
            for (system, length), each in found.items()
        ],
        png=plot(found),
    )


def capacity(deployment: Deployment) -> float:
    """Prompts a second, one by one."""
    arrivals = generated("qwen", 2000).arrivals(1.0, 1.0, seed=1)
    timing, layers = deployment.timing, deployment.config.num_layers
    return 1 / mean(pass_seconds(timing, layers, Volume.of(0, arrival.prompt_tokens, 1)) for arrival in arrivals)


def knees_of(found: Mapping[tuple[str, int], Factor], system: str) -> str:
    return ", ".join(f"{found[system, length].knee.value or 0:.1f}" for length in LENGTHS)


def plot(found: Mapping[tuple[str, int], Factor]) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for system in (OURS, RELEASE):
        factors = [found[system, length] for length in LENGTHS]
        bars(left, list(LENGTHS), factors, label=system, **line(system))
    ratio_axis(left, "requests in a run")
    left.set_xticks(list(LENGTHS), [f"{length:,}" for length in LENGTHS])
    left.set_ylabel("goodput over DistServe's")
    left.set_ylim(0)
    left.set_title("by the length of the run", loc="left", fontsize=10)
    names = [name.replace(", ", ",\n") for name in BATCHES.values()]
    factors = [found[system, SLICE] for system in BATCHES]
    bars(right, list(range(len(names))), factors, color=BLUE, marker="o", ls="", ms=5, mfc="white", mew=1.4)
    right.set_xticks(range(len(names)), names, fontsize=8)
    right.set_title(f"by the batch, {SLICE} requests", loc="left", fontsize=10)
    right.set_xlabel("most tokens in a batch")
    for axes in (left, right):
        axes.axhline(PAPER, color=INK, lw=1, ls=(0, (4, 3)), label=f"the paper: {PAPER}x or more")
        tidy(axes)
    left.legend(frameon=False, fontsize=9)
    headline(figure, "FlowPrefill, figure 9, further: goodput over DistServe's (Llama3-8B on A800)")
    return png(figure)


def bars(axes: Axes, places: list[int], factors: list[Factor], **look: Any) -> None:
    """With the intervals."""
    middle = [each.over.value or 0.0 for each in factors]
    down = [value - (each.over.low or 0.0) for value, each in zip(middle, factors, strict=True)]
    up = [(each.over.high or 0.0) - value for value, each in zip(middle, factors, strict=True)]
    axes.errorbar(places, middle, yerr=(down, up), capsize=3, elinewidth=1, **look)
