"""FlowPrefill's figure 15: operators and chunks together, for prompts of more than 32K tokens.

Of such a prompt one operator alone takes long. Chunks bound that, and how large they are is a choice again. The trace
has no prompts that long: here a tenth of its searches has 32K to 128K tokens, with the target of a search, which they
cannot meet; the question is what they do to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from engine.deployment import Deployment
from examples.backends import simulated
from examples.figures.figure import Claim, Figure
from examples.figures.study import Study, gathered, generated
from examples.figures.style import headline, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, GREEN, LATE, MARKERS, ORANGE, png

REQUESTS, SEEDS = 500, (1, 2, 3, 4)
CHUNKS = ("1024", "2048", "4096", "8192", "16384", "32768", "none")
LOADS = (1.0, 2**0.5, 2.0, 2**1.5)  # over the trace's rate, at the published targets
SCALES = (1.0, 2**-0.5, 0.5, 2**-1.5)  # of the targets, at the trace's rate
COLOURS = (GREEN, BLUE, ORANGE, LATE)


@dataclass(frozen=True, slots=True)
class Found:
    attainment: float
    blocking_ms: float


async def make(workers: Workers) -> Figure:
    deployment = Deployment(model="llama3-8b", hardware="a800-80g")
    study = Study(workers, deployment, generated("qwen-long", REQUESTS), SEEDS)

    async def measure(chunk: str, load: float, scale: float) -> Found:
        records = await study.over_seeds(simulated, f"flowprefill chunk={chunk}", load * study.rate, scale)
        return Found(
            mean(record["ttft_attainment"] for record in records),
            mean(record["blocking_mean_ms"] for record in records),
        )

    places = [*((load, 1.0) for load in LOADS), *((1.0, scale) for scale in SCALES[1:])]
    keys = [(chunk, *place) for chunk, place in product(CHUNKS, places)]
    results = dict(zip(keys, await gathered(measure(*key) for key in keys), strict=True))
    everywhere = {chunk: mean(results[chunk, *place].attainment for place in places) for chunk in CHUNKS}
    by_load = {chunk: mean(results[chunk, load, 1.0].attainment for load in LOADS) for chunk in CHUNKS}
    tight = {chunk: mean(results[chunk, 1.0, scale].attainment for scale in SCALES[1:]) for chunk in CHUNKS}
    return Figure(
        title="FlowPrefill, figure 15: chunks of prompts above 32K tokens",
        setting=(
            f"Llama3-8B on A800, `flowprefill`, simulated; {REQUESTS} requests a run like QwenTrace's, but a tenth of "
            f"the searches has 32K to 128K tokens; {len(SEEDS)} seeds"
        ),
        claims=[
            Claim(
                "A medium chunk (8K) is best: 2K is overhead, 16K too coarse",
                f"in time, over all rates and targets of the picture: {shares(everywhere)}; whole prompts "
                f"{everywhere['none']:.0%}; the best of all is {name(max(everywhere, key=everywhere.__getitem__))}",
                holds=everywhere["8192"] > max(everywhere["2048"], everywhere["16384"]),
                why=(
                    f"Overhead shows at high rates ({shares(by_load)}), coarseness with tight targets ({shares(tight)})"
                ),
            )
        ],
        rows=[
            {
                "chunk_tokens": chunk,
                "rate_per_s": load * study.rate,
                "slo_scale": scale,
                "ttft_attainment": each.attainment,
                "blocking_mean_ms": each.blocking_ms,
            }
            for (chunk, load, scale), each in results.items()
        ],
        png=plot(results, study.rate),
    )


def shares(of: Mapping[str, float]) -> str:
    return ", ".join(f"{of[chunk]:.1%} with {name(chunk)}" for chunk in ("2048", "4096", "8192", "16384"))


def name(chunk: str) -> str:
    return "whole" if chunk == "none" else f"{int(chunk) // 1024}K"


def plot(results: Mapping[tuple[str, float, float], Found], rate: float) -> bytes:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11.5, 4), layout="constrained")
    chunked = CHUNKS[:-1]

    def draw(axes: Axes, chunks: Sequence[str], values: Sequence[float], place: int, label: str) -> None:
        look: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place], "mfc": "white", "mew": 1.4}
        axes.plot([name(chunk) for chunk in chunks], values, label=label, lw=1.6, ms=5, **look)

    for place, load in enumerate(LOADS):
        attained = [results[chunk, load, 1.0].attainment for chunk in chunked]
        draw(left, chunked, attained, place, f"{load * rate:.2g} requests/s")
    for place, scale in enumerate(SCALES):
        attained = [results[chunk, 1.0, scale].attainment for chunk in chunked]
        draw(middle, chunked, attained, place, f"targets x {scale:.2g}")
    waits = [results[chunk, 1.0, 1.0].blocking_ms for chunk in CHUNKS]
    draw(right, CHUNKS, waits, 0, f"{rate:.2g} requests/s")
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    for axes in (left, middle):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_title("requests that meet TTFT, by rate", loc="left", fontsize=10)
    middle.set_title(f"by target, at {rate:.2g} requests/s", loc="left", fontsize=10)
    right.set_title("mean ms until a prefill has parked", loc="left", fontsize=10)
    for axes in (left, middle, right):
        axes.set_xlabel("chunk of a prompt above 32K")
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)
    headline(
        figure, "FlowPrefill, figure 15: chunks of prompts above 32K tokens, parked at operators (Llama3-8B on A800)"
    )
    return png(figure)
