"""Layered Prefill's figure 5: how many tokens a request has, by the time since it arrived."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

from examples.figures.figure import Claim, Figure
from examples.figures.layered import CHUNKED, LAYERED, REQUESTS, SEEDS, SETTING, Outcome, both, change
from examples.figures.style import SYSTEMS, tidy
from examples.figures.workers import Workers
from examples.palette import png

RATE = 1.3
TIMES = np.arange(0, 20.01, 0.1)  # seconds since the arrival


async def make(workers: Workers) -> Figure:
    served = dict(zip((CHUNKED, LAYERED), await both(workers, "arxiv", RATE), strict=True))
    tokens = {system: trajectory(each) for system, each in served.items()}
    chunked, layered = served.values()
    first, last = change(chunked.ttft, layered.ttft), change(chunked.latency, layered.latency)
    slopes = [each.tbt for each in served.values()]
    holds = first < 0 and slopes[1] < slopes[0] and last <= -0.35
    return Figure(
        title="Layered Prefill, figure 5: tokens of a request over time",
        setting=f"{SETTING}; arXiv, {RATE} requests a second, {len(SEEDS)} x {REQUESTS} requests, their mean",
        claims=[
            Claim(
                "The first token comes earlier, the others follow faster, and the last is there 41 % earlier",
                f"first {chunked.ttft:.2f} -> {layered.ttft:.2f} s, then every {1e3 * slopes[0]:.0f} -> "
                f"{1e3 * slopes[1]:.0f} ms, last {chunked.latency:.2f} -> {layered.latency:.2f} s ({100 * last:.0f} %)",
                holds=holds,
                why="" if holds else "not explained",
            )
        ],
        rows=[
            {"seconds": float(time), **{f"{system}_tokens": float(tokens[system][i]) for system in served}}
            for i, time in enumerate(TIMES)
        ],
        png=plot(tokens),
    )


def trajectory(each: Outcome) -> np.ndarray:
    """The mean over all requests at each of TIMES; between its first and last token a request gets them evenly."""
    total = np.zeros(len(TIMES))
    for row in each.rows:
        assert row.ttft is not None and row.ended is not None
        total += np.interp(
            TIMES, (row.ttft, row.ended - row.arrival), (1, row.output_tokens), left=0, right=row.output_tokens
        )
    return total / len(each.rows)


def plot(tokens: dict[str, np.ndarray]) -> bytes:
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for system, values in tokens.items():
        colour, _, style = SYSTEMS[system]
        axes.plot(TIMES, values, color=colour, ls=style, lw=1.8, label=system)
    axes.set_xlabel("seconds since the arrival")
    axes.set_ylabel("tokens of a request, mean")
    axes.set_ylim(0)
    axes.legend(frameon=False)
    tidy(axes)
    return png(figure)
