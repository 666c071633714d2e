"""Layered Prefill's table 11: few groups of layers give early first tokens, many give even gaps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import matplotlib.pyplot as plt

from examples.figures.figure import Claim, Figure
from examples.figures.layered import REQUESTS, SETTING, Outcome, outcome
from examples.figures.style import line, ratio_axis, tidy
from examples.figures.workers import Workers
from examples.palette import INK, png
from scheduling.layered import Layered
from scheduling.presets import System, preset

RATE, SEEDS = 1.3, (0, 1)
GROUPS = (2, 4, 8, 16, 24)
SYSTEM = "layered-chunked"  # as in the authors' code, which cuts prompts of more than 8,192 tokens


def grouped(groups: int) -> System:
    system = preset(SYSTEM)
    assert isinstance(system.plan, Layered)
    return replace(system, plan=replace(system.plan, fixed_groups=groups))


async def make(workers: Workers) -> Figure:
    runs = await asyncio.gather(*(outcome(workers, grouped(g), "arxiv", RATE, seeds=SEEDS) for g in GROUPS))
    served = dict(zip(GROUPS, runs, strict=True))
    few, many = served[2], served[16]
    earliest = min(served, key=lambda groups: served[groups].ttft)
    return Figure(
        title="Layered Prefill, table 11: how many groups of layers",
        setting=(
            f"{SETTING}; arXiv, {len(SEEDS)} x {REQUESTS} requests, {RATE} a second (the paper's rate is not known); "
            "chunks of 8,192 tokens, each crossing so many groups"
        ),
        claims=[
            Claim(
                "Two groups: the earliest first token, and gaps of 138 ms at p99",
                f"earliest with {earliest} ({served[earliest].ttft:.2f} s); {1e3 * few.tbt_p99:.0f} ms with two",
                holds=earliest == 2 and abs(few.tbt_p99 / 0.138 - 1) <= 0.25,
                why="the bar for gaps: within a quarter",
            ),
            Claim(
                "Sixteen groups: gaps of 35.7 ms at p99, first token after 1.27 s",
                f"{1e3 * many.tbt_p99:.1f} ms, {many.ttft:.2f} s",
                holds=abs(many.tbt_p99 / 0.0357 - 1) <= 0.25 and many.ttft > few.ttft,
                why="the bar for gaps: within a quarter; the first token depends on the load, which is not known",
            ),
        ],
        rows=[
            {
                "groups": groups,
                "ttft_mean_s": each.ttft,
                "tbt_mean_ms": 1e3 * each.tbt,
                "tbt_p99_ms": 1e3 * each.tbt_p99,
                "expert_gb_per_request": each.expert_bytes / 1e9,
            }
            for groups, each in served.items()
        ],
        png=plot(served),
    )


def plot(served: Mapping[int, Outcome]) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(list(served), [each.ttft for each in served.values()], **line("layered"))
    left.set_ylabel("mean TTFT, s")
    right.plot(list(served), [1e3 * each.tbt_p99 for each in served.values()], **line("layered"))
    right.plot([2, 16], [138, 35.7], "_", color=INK, ms=18, mew=2, label="the paper's")
    right.set_ylabel("p99 TBT, ms")
    right.legend(frameon=False)
    for axes in (left, right):
        ratio_axis(axes, "groups of layers")
        axes.set_ylim(0)
        tidy(axes)
    return png(figure)
