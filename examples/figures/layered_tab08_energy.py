"""Layered Prefill's table 8: energy for each token, at the same rate and at the highest that each system sustains."""

from __future__ import annotations

import asyncio

import matplotlib.pyplot as plt
import numpy as np

from engine.hardware import DEVICES
from examples.figures.figure import Claim, Figure
from examples.figures.layered import CHUNKED, LAYERED, REQUESTS, SEEDS, SETTING, Outcome, change, deployment, outcome
from examples.figures.layered_tab02_tradeoff import RATES
from examples.figures.layered_tab02_tradeoff import chunked as of_size
from examples.figures.style import SYSTEMS, tidy
from examples.figures.workers import Workers
from examples.palette import INK, png
from scheduling.presets import preset

# The paper's runs on arXiv: requests a second, and millijoules a token where it has them.
RUNS = ((CHUNKED, 1.3, 56.6), (LAYERED, 1.3, None), (LAYERED, 1.6, 44.2))
SAME = 0.09  # less at the same rate


async def make(workers: Workers) -> Figure:
    runs = [outcome(workers, preset(system), "arxiv", rate) for system, rate, _ in RUNS]
    *served, large = await asyncio.gather(*runs, outcome(workers, of_size(2048), "arxiv", RATES[2048]))
    chunked, layered, limit = served
    same, own = change(chunked.energy, layered.energy), change(chunked.energy, limit.energy)
    return Figure(
        title="Layered Prefill, table 8: energy for each token of prompts and outputs",
        setting=f"{SETTING}; arXiv, {len(SEEDS)} x {REQUESTS} requests; energy fitted to chunked runs alone",
        claims=[
            Claim(
                "-9 % at the same rate",
                f"{1e3 * chunked.energy:.1f} -> {1e3 * layered.energy:.1f} mJ ({100 * same:.0f} %) at 1.3 requests a "
                "second",
                holds=same <= -SAME,
                why="" if same <= -SAME else split(chunked, layered, large),
            ),
            Claim(
                "56.6 mJ at 1.3 requests a second -> 44.2 mJ at 1.6, the highest rate of each in time (-22 %)",
                f"{1e3 * chunked.energy:.1f} -> {1e3 * limit.energy:.1f} mJ ({100 * own:.0f} %)",
                holds=own <= -0.15,
                why="the bar: a fall of 15 % or more; the chunked figure is the one fitted to",
            ),
        ],
        rows=[
            {
                "system": system,
                "rate_per_s": rate,
                "energy_mj_per_token": 1e3 * each.energy,
                "expert_gb_per_request": each.expert_bytes / 1e9,
                "paper_mj_per_token": theirs,
            }
            for (system, rate, theirs), each in zip(RUNS, served, strict=True)
        ],
        png=plot(served),
    )


def split(chunked: Outcome, layered: Outcome, large: Outcome) -> str:
    """What cannot fall at the same rate, what does, and what it would be if bytes took more and static power less."""
    device, less = deployment().device, DEVICES["h100-80g"].static_watts
    static = device.static_watts * spent(chunked)[0]
    saved = spent(chunked)[2] - spent(layered)[2]
    runs = [spent(chunked), spent(large)]
    dynamic = [each.energy - less * terms[0] for each, terms in zip((chunked, large), runs, strict=True)]
    coefficients = less, *np.linalg.solve([terms[1:] for terms in runs], dynamic)
    otherwise = np.dot(coefficients, spent(layered)) / np.dot(coefficients, spent(chunked)) - 1
    return (
        f"{1e3 * static:.0f} of the {1e3 * chunked.energy:.0f} mJ are static power, which the rate decides; of bytes "
        f"moved {100 * saved / spent(chunked)[2]:.0f} % are saved, worth {1e3 * saved * device.joules_per_byte:.1f} mJ "
        f"at {1e12 * device.joules_per_byte:.0f} pJ each. Runs of chunks, the only ones fitted to, cannot tell the two "
        f"apart: with {less:.0f} W, as assumed of other H100s, not {device.static_watts:.0f}, they would give a byte "
        f"{1e12 * coefficients[2]:.0f} pJ, and groups {100 * otherwise:.0f} %"
    )


def spent(each: Outcome) -> tuple[float, float, float]:
    """Device seconds, FLOPs and bytes for each token."""
    tokens = sum(row.prompt_tokens + row.output_tokens for row in each.rows)
    totals = (
        deployment().tp * sum(run.seconds for run in each.runs),
        sum(run.counters.flops for run in each.runs),
        sum(run.counters.bytes for run in each.runs),
    )
    return totals[0] / tokens, totals[1] / tokens, totals[2] / tokens


def plot(served: list[Outcome]) -> bytes:
    figure, axes = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    for place, ((system, _, theirs), each) in enumerate(zip(RUNS, served, strict=True)):
        value = 1e3 * each.energy
        axes.bar(place, value, 0.6, color=SYSTEMS[system][0])
        axes.annotate(f"{value:.1f}", (place, max(value, theirs or 0)), ha="center", va="bottom", fontsize=9, color=INK)
        if theirs is not None:
            axes.plot(place, theirs, "_", color=INK, ms=40, mew=2)
    axes.set_xticks(range(len(RUNS)), [f"{system}\n{rate} req/s" for system, rate, _ in RUNS])
    axes.set_ylabel("millijoules a token")
    axes.set_title("dashes: the paper's", loc="left", fontsize=9, color=INK)
    tidy(axes)
    axes.grid(visible=False, axis="x")
    return png(figure)
