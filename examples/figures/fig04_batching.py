"""FlowPrefill's figure 4: what batching gains, by prompt length.

Short prompts share the host's work on a pass and the reading of the weights. One of 2K tokens fills the device alone,
so a batch of them takes about as long as all of them in turn.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from engine.deployment import Deployment
from engine.timing import pass_seconds
from examples.figures.figure import Claim, Figure
from examples.figures.style import LEGEND, headline, tidy
from examples.figures.workers import Workers
from examples.palette import MARKERS, SEQUENCE, png
from models.costs import Volume

LENGTHS = (32, 64, 128, 256, 512, 2048, 4096)
SHORT, LONG = (32, 64, 128, 256), (2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
MANY = 16  # prompts together, for the claims


def pass_time(deployment: Deployment, length: int, batch: int) -> float:
    """Seconds of one forward pass over a batch of prompts of this length: the TTFT of each."""
    one = Volume.of(0, length, 1)
    return pass_seconds(deployment.timing, deployment.config.num_layers, sum([one] * (batch - 1), one))


async def make(workers: Workers) -> Figure:
    deployment = Deployment(model="llama3-8b", hardware="a800-80g")
    ttft = {(length, batch): pass_time(deployment, length, batch) for length in LENGTHS for batch in BATCHES}
    gain = {length: MANY * ttft[length, 1] / ttft[length, MANY] for length in LENGTHS}
    growth = {length: ttft[length, MANY] / ttft[length, 1] for length in LENGTHS}
    return Figure(
        title="FlowPrefill, figure 4: what batching gains, by prompt length",
        setting="Llama3-8B on A800, one forward pass, cost model",
        claims=[
            Claim(
                "Prompts of 32 to 256 tokens gain throughput by batching",
                f"{MANY} together: " + ", ".join(f"{gain[length]:.1f}x at {length}" for length in SHORT),
                holds=min(gain[length] for length in SHORT) >= 1.5,
            ),
            Claim(
                "From 2K tokens on the device is near saturation, and TTFT is linear in the batch",
                f"{MANY} together: "
                + ", ".join(f"{gain[n]:.2f}x the throughput and {growth[n]:.1f}x the TTFT at {n:,}" for n in LONG),
                holds=max(gain[length] for length in LONG) <= 1.2,
            ),
        ],
        rows=[
            {
                "prompt_tokens": length,
                "batch": batch,
                "ttft_s": seconds,
                "tokens_per_s": length * batch / seconds,
                "throughput_over_one": batch * ttft[length, 1] / seconds,
            }
            for (length, batch), seconds in ttft.items()
        ],
        png=plot(ttft),
    )


def plot(ttft: dict[tuple[int, int], float]) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for length, colour, marker in zip(LENGTHS, SEQUENCE, MARKERS, strict=True):
        seconds = [ttft[length, batch] for batch in BATCHES]
        speed = [length * batch / s / 1e3 for batch, s in zip(BATCHES, seconds, strict=True)]
        style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.6}
        left.plot(BATCHES, speed, label=f"{length:,} tokens", **style)
        right.plot(BATCHES, [s * 1e3 for s in seconds], **style)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("prompts in the batch")
        tidy(axes)
    left.set_ylabel("thousand tokens a second")
    left.set_ylim(0)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.set_ylabel("TTFT, ms")
    headline(figure, "FlowPrefill, figure 4: what batching gains, by prompt length (Llama3-8B on A800)")
    figure.legend(*left.get_legend_handles_labels(), **LEGEND, ncols=len(LENGTHS))
    return png(figure)
