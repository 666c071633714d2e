"""Layered Prefill's ablation: on a dense model groups of layers lose against chunks.

Every layer's weights are read whole for a handful of decodes, too. Chunks share that reading with decodes; groups make
the decodes read all other layers alone, in every iteration, and have no experts to save.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import matplotlib.pyplot as plt

from examples.figures.figure import Claim, Figure
from examples.figures.layered import CHUNKED, DENSE, LAYERED, REQUESTS, Outcome, both, change
from examples.figures.style import LEGEND, line, tidy
from examples.figures.workers import Workers
from examples.palette import png

RATES = (1.3, 1.6, 2.0, 2.3, 2.5)
SEEDS = (0, 1)
PAPER = (0.955, 1.45)  # mean TTFT, s: chunked and layered

Pairs = Mapping[float, tuple[Outcome, Outcome]]  # by rate


async def make(workers: Workers) -> Figure:
    found = await asyncio.gather(*(both(workers, "arxiv", rate, seeds=SEEDS, model=DENSE) for rate in RATES))
    pairs = dict(zip(RATES, found, strict=True))
    rate = min(pairs, key=lambda rate: abs(pairs[rate][0].ttft - PAPER[0]))
    chunked, layered = pairs[rate]
    later, longer = change(chunked.ttft, layered.ttft), change(chunked.tbt, layered.tbt)
    return Figure(
        title="Layered Prefill, ablation: chunks and groups of layers on a dense model",
        setting=(
            f"Qwen3-8B on 2 H100 (TP2), simulated; arXiv, {len(SEEDS)} x {REQUESTS} requests; the paper's rate is not "
            f"known, {rate} a second gives its TTFT with chunks"
        ),
        claims=[
            Claim(
                f"Mean TTFT {PAPER[0]} s with chunks, {PAPER[1]} s with groups ({100 * change(*PAPER):+.0f} %)",
                f"{chunked.ttft:.2f} and {layered.ttft:.2f} s ({100 * later:+.0f} %) at {rate} requests a second",
                holds=later > 0,
                why="the bar: groups are worse; by how much depends on the load",
            ),
            Claim(
                "TBT is worse, too",
                f"mean {1e3 * chunked.tbt:.1f} and {1e3 * layered.tbt:.1f} ms ({100 * longer:+.0f} %), p99 "
                f"{1e3 * chunked.tbt_p99:.1f} and {1e3 * layered.tbt_p99:.1f} ms",
                holds=longer > 0,
                why="" if longer > 0 else "not explained",
            ),
        ],
        rows=[
            {
                "system": system,
                "rate_per_s": rate,
                "ttft_mean_s": each.ttft,
                "tbt_mean_ms": 1e3 * each.tbt,
                "tbt_p99_ms": 1e3 * each.tbt_p99,
                "energy_mj_per_token": 1e3 * each.energy,
            }
            for rate, pair in pairs.items()
            for system, each in zip((CHUNKED, LAYERED), pair, strict=True)
        ],
        png=plot(pairs),
    )


def plot(pairs: Pairs) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for number, system in enumerate((CHUNKED, LAYERED)):
        left.plot(list(pairs), [pair[number].ttft for pair in pairs.values()], label=system, **line(system))
        right.plot(list(pairs), [1e3 * pair[number].tbt for pair in pairs.values()], **line(system))
    left.set_ylabel("mean TTFT, s")
    right.set_ylabel("mean TBT, ms")
    for axes in (left, right):
        axes.set_xlabel("requests a second")
        axes.set_ylim(0)
        tidy(axes)
    figure.legend(*left.get_legend_handles_labels(), **LEGEND, ncols=2)
    return png(figure)
