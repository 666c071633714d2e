"""Layered Prefill's figure 3: TTFT against TBT, request by request, and the frontier between the two."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from examples.figures.figure import Claim, Figure
from examples.figures.layered import (
    CHUNKED,
    LAYERED,
    REQUESTS,
    SETTING,
    Outcome,
    both,
    outcome,
    targets,
)
from examples.figures.style import LEGEND, SYSTEMS, line, tidy
from examples.figures.workers import Workers
from examples.palette import FAINT, INK, png
from scheduling.batch import FillChunks
from scheduling.layered import Layered
from scheduling.plan import Chunked
from scheduling.presets import System, preset
from scheduling.request import SLO

CROWDED = 1.5  # requests a second: beyond what chunks of 512 tokens sustain
CALM = 1.3  # within
SIZES = (256, 512, 1024, 2048)  # tokens of a chunk; of whole-model work in a layered iteration
SEEDS = (0,)


def sized(system: str, size: int) -> System:
    if system == CHUNKED:
        return replace(preset(system), batch=FillChunks(size), plan=Chunked(size))
    return replace(preset(system), plan=Layered(size))


Frontier = Mapping[int, Outcome]  # by size


async def make(workers: Workers) -> Figure:
    crowded, chunked, layered = await asyncio.gather(
        both(workers, "arxiv", CROWDED, seeds=SEEDS, requests=1000),
        frontier(workers, CHUNKED),
        frontier(workers, LAYERED),
    )
    before, after = crowded
    inside = [each.attainment for each in crowded]
    waits = [median(each.ttfts) for each in crowded]
    gaps = [median(row.tbt_p99 for row in each.rows if row.tbt_p99 is not None) for each in crowded]
    calm = waits[1] < waits[0] and gaps[1] <= gaps[0] and inside[1] >= 0.9 > inside[0]
    ahead = all(dominated(each, layered) for size, each in chunked.items() if size >= 512)
    return Figure(
        title="Layered Prefill, figure 3: TTFT against TBT",
        setting=(
            f"{SETTING}; arXiv; left {CROWDED} requests a second, 1,000 requests; right {CALM}, {REQUESTS} requests"
        ),
        claims=[
            Claim(
                "Queueing and prefill get shorter, and TBT stays good, where chunked prefill already collapses",
                f"median TTFT {waits[0]:.1f} -> {waits[1]:.1f} s, median of the p99 gaps {1e3 * gaps[0]:.0f} -> "
                f"{1e3 * gaps[1]:.0f} ms; in time {100 * inside[0]:.0f} -> {100 * inside[1]:.0f} %",
                holds=calm,
                why="" if calm else "not explained",
            ),
            Claim(
                "It moves the frontier between TTFT and TBT",
                "every chunk size from 512 tokens on has a layered setting that is better in both"
                if ahead
                else "some chunk sizes have no layered setting that is better in both",
                holds=ahead,
                why=f"mean TTFT against p99 TBT; at 256 tokens {small_chunks(chunked[256], layered)}",
            ),
        ],
        rows=[
            {
                "system": system,
                "size_tokens": size,
                "rate_per_s": CALM,
                "ttft_mean_s": each.ttft,
                "tbt_p99_ms": 1e3 * each.tbt_p99,
            }
            for system, of_size in ((CHUNKED, chunked), (LAYERED, layered))
            for size, each in of_size.items()
        ]
        + [
            {
                "system": system,
                "size_tokens": 512,
                "rate_per_s": CROWDED,
                "ttft_mean_s": each.ttft,
                "tbt_p99_ms": 1e3 * each.tbt_p99,
            }
            for system, each in zip((CHUNKED, LAYERED), (before, after), strict=True)
        ],
        png=plot(crowded, chunked, layered),
    )


async def frontier(workers: Workers, system: str) -> Frontier:
    runs = [outcome(workers, sized(system, size), "arxiv", CALM, seeds=SEEDS) for size in SIZES]
    return dict(zip(SIZES, await asyncio.gather(*runs), strict=True))


def dominated(one: Outcome, others: Frontier) -> bool:
    return any(each.ttft <= one.ttft and each.tbt_p99 <= one.tbt_p99 for each in others.values())


def small_chunks(one: Outcome, others: Frontier) -> str:
    return "too" if dominated(one, others) else "not"


def plot(crowded: tuple[Outcome, Outcome], chunked: Frontier, layered: Frontier) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for system, each in zip((CHUNKED, LAYERED), crowded, strict=True):
        points = [
            (row.ttft, 1e3 * row.tbt_p99) for row in each.rows if row.ttft is not None and row.tbt_p99 is not None
        ]
        left.plot(*zip(*points, strict=True), SYSTEMS[system][1], color=SYSTEMS[system][0], ms=3, alpha=0.4, lw=0)
    box(left, targets("arxiv"))
    left.set_xscale("log")
    left.set_xlabel("TTFT, s")
    left.set_ylabel("p99 gap of a request, ms")
    left.set_title(f"{CROWDED} requests a second; dashed: the targets", loc="left", fontsize=10)
    for system, of_size in ((CHUNKED, chunked), (LAYERED, layered)):
        points = [(each.ttft, 1e3 * each.tbt_p99) for each in of_size.values()]
        right.plot(*zip(*points, strict=True), label=system, **line(system))
        for size, (x, y) in zip(of_size, points, strict=True):
            aside = {"xytext": (5, 4)} if system == CHUNKED else {"xytext": (-6, -10), "ha": "right"}
            right.annotate(f"{size:,}", (x, y), textcoords="offset points", fontsize=8, color=INK, **aside)
    right.set_xscale("log")
    right.set_xlabel("mean TTFT, s")
    right.set_ylabel("p99 TBT, ms")
    right.set_title(f"{CALM} requests a second, by tokens of a chunk or of work", loc="left", fontsize=10)
    right.set_xlim(left=0.2)
    for axes in (left, right):
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0)
        tidy(axes)
    figure.legend(*right.get_legend_handles_labels(), **LEGEND, ncols=2)
    return png(figure)


def box(axes: Axes, slo: SLO) -> None:
    """Both targets."""
    assert slo.ttft is not None and slo.tbt is not None
    axes.axvline(slo.ttft, color=FAINT, lw=1, ls=(0, (4, 3)))
    axes.axhline(1e3 * slo.tbt, color=FAINT, lw=1, ls=(0, (4, 3)))
