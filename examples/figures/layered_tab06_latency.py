"""Layered Prefill's table 6: latencies of chunked and layered prefill at the same rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from examples.figures.figure import Claim, Figure
from examples.figures.layered import CHUNKED, LAYERED, REQUESTS, SEEDS, SETTING, Outcome, both, change
from examples.figures.style import LEGEND, SYSTEMS, tidy
from examples.figures.workers import Workers
from examples.palette import INK, png

RATE = 1.3


@dataclass(frozen=True, slots=True)
class Latency:
    """A field of `Outcome`, and what the paper has for it: seconds under chunked and layered prefill, where given.

    The claim holds if ours falls by at least `wanted`: what the project set out to show, or the paper's cut less eight
    points.
    """

    field: str
    name: str
    paper: str
    wanted: float
    chunked: float | None = None
    layered: float | None = None


TTFTS = (
    Latency("ttft", "mean TTFT", "2.80 -> 1.24 s (-56 %)", 0.50, 2.80, 1.24),
    Latency("ttft_p99", "p99 TTFT", "8.65 -> 4.10 s (-53 %)", 0.45, 8.65, 4.10),
    Latency("latency", "mean end to end", "9.4 -> 5.5 s (-41 %)", 0.35, 9.4, 5.5),
)
TBTS = (Latency("tbt", "mean TBT", "-35 %", 0.27), Latency("tbt_p99", "p99 TBT", "-27 %", 0.19))


async def make(workers: Workers) -> Figure:
    chunked, layered = await both(workers, "arxiv", RATE)

    def claim(latency: Latency) -> Claim:
        before, after = getattr(chunked, latency.field), getattr(layered, latency.field)
        ours = f"{before:.2f} -> {after:.2f} s" if before >= 1 else f"{1e3 * before:.1f} -> {1e3 * after:.1f} ms"
        cut = -change(before, after)
        why = "not explained: less of a cut than in the paper" if cut < latency.wanted else ""
        return Claim(f"{latency.name} {latency.paper}", f"{ours} ({-100 * cut:.0f} %)", cut >= latency.wanted, why)

    return Figure(
        title="Layered Prefill, table 6: latencies at the same rate",
        setting=f"{SETTING}; arXiv, {RATE} requests a second, {len(SEEDS)} x {REQUESTS} requests",
        claims=[claim(latency) for latency in (*TTFTS, *TBTS)],
        rows=[
            {
                "latency": latency.name,
                "chunked_s": getattr(chunked, latency.field),
                "layered_s": getattr(layered, latency.field),
                "change": change(getattr(chunked, latency.field), getattr(layered, latency.field)),
                "paper_chunked_s": latency.chunked,
                "paper_layered_s": latency.layered,
            }
            for latency in (*TTFTS, *TBTS)
        ],
        png=plot(chunked, layered),
    )


def plot(chunked: Outcome, layered: Outcome) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", width_ratios=(3, 2))
    bars(left, TTFTS, chunked, layered, 1.0, "seconds")
    bars(right, TBTS, chunked, layered, 1e3, "milliseconds")
    figure.legend(*left.get_legend_handles_labels(), **LEGEND, ncols=3)
    return png(figure)


def bars(axes: Axes, latencies: Sequence[Latency], chunked: Outcome, layered: Outcome, unit: float, label: str) -> None:
    """The paper's figures are dashes over the bars."""
    for system, result, offset in ((CHUNKED, chunked, -0.2), (LAYERED, layered, 0.2)):
        for place, latency in enumerate(latencies):
            value = unit * getattr(result, latency.field)
            theirs = latency.chunked if system == CHUNKED else latency.layered
            first = place == 0
            axes.bar(place + offset, value, 0.36, color=SYSTEMS[system][0], label=system if first else None)
            axes.annotate(f"{value:.3g}", (place + offset, value), ha="center", va="bottom", fontsize=8, color=INK)
            if theirs is not None:
                legend = "the paper's" if first and system == LAYERED else None
                axes.plot(place + offset, unit * theirs, "_", color=INK, ms=18, mew=2, label=legend)
    axes.set_xticks(range(len(latencies)), [latency.name for latency in latencies])
    axes.set_ylabel(label)
    tidy(axes)
    axes.grid(visible=False, axis="x")
