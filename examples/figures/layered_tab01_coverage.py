"""Layered Prefill's table 1: which share of a layer's experts a batch of decodes meets."""

from __future__ import annotations

from typing import cast

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from examples.figures.figure import Claim, Figure
from examples.figures.layered import MODEL
from examples.figures.style import LEGEND, ratio_axis, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, FAINT, INK, ORANGE, png
from models.architectures import ARCHITECTURES
from models.config import MoEConfig
from models.coverage import coverage, separate_rows

PAPER = {16: 0.50, 32: 0.55, 64: 0.70, 128: 0.863}
BOUNDS = (16, 64)  # of these the paper says "below"
BATCHES = tuple(2**i for i in range(13))
WITHIN = 0.03

MOE = cast(MoEConfig, ARCHITECTURES[MODEL].moe)


def even(rows: int) -> float:
    """If every row chose its experts evenly and by itself."""
    return 1 - (1 - MOE.experts_per_token / MOE.num_experts) ** rows


def of_prompt(tokens: int) -> float:
    return coverage(MOE, separate_rows(tokens))


async def make(workers: Workers) -> Figure:
    ours = {batch: coverage(MOE, batch) for batch in PAPER}
    worst = max(
        max(ours[batch] - PAPER[batch], 0) if batch in BOUNDS else abs(ours[batch] - PAPER[batch]) for batch in PAPER
    )
    return Figure(
        title="Layered Prefill, table 1: the share of a layer's experts that a batch meets",
        setting="Qwen3-30B-A3B, 8 of 128 experts a token; the coverage model, fitted to this table and to figure 2",
        claims=[
            Claim(
                "Decodes of ShareGPT: below 50 % at 16, about 55 % at 32, below 70 % at 64, 86.3 % at 128",
                ", ".join(f"{100 * share:.0f} % at {batch}" for batch, share in ours.items()),
                holds=worst <= WITHIN,
                why=f"fitted, three figures to nine points, of figure 2 the others: within {100 * worst:.0f} points",
            ),
            Claim(
                "Even routing would be far off: 64, 87, 98 and 100 %",
                ", ".join(f"{100 * even(batch):.0f} %" for batch in PAPER),
                holds=all(even(batch) > theirs + 0.1 for batch, theirs in PAPER.items()),
            ),
        ],
        rows=[
            {
                "rows": batch,
                "decodes": coverage(MOE, batch),
                "tokens_of_one_prompt": of_prompt(batch),
                "even_routing": even(batch),
                "paper_decodes": PAPER.get(batch),
            }
            for batch in BATCHES
        ],
        png=plot(),
    )


def plot() -> bytes:
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    every = range(1, BATCHES[-1] + 1)
    axes.plot(every, [even(rows) for rows in every], color=FAINT, label="even routing")
    axes.plot(every, [coverage(MOE, rows) for rows in every], color=BLUE, lw=1.8, label="decodes, the model")
    axes.plot(
        every, [of_prompt(rows) for rows in every], color=ORANGE, ls="--", label="tokens of one prompt, the model"
    )
    for marker, batches, label in (("o", PAPER.keys() - BOUNDS, "the paper's"), ("v", BOUNDS, "below, the paper says")):
        axes.plot(sorted(batches), [PAPER[batch] for batch in sorted(batches)], marker, color=INK, ms=6, label=label)
    ratio_axis(axes, "rows")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel("experts that some row is routed to")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.03)
    tidy(axes)
    figure.legend(*axes.get_legend_handles_labels(), **LEGEND, ncols=2)
    return png(figure)
