"""FlowPrefill's figure 3: why chunks are no way out. One prompt of 32K tokens, prefilled in chunks of different sizes.

Whoever comes while a chunk runs waits for its end. Small chunks make that short, but each costs the host's work anew,
fills the device less, and reads all K and V before it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from engine.deployment import Deployment
from engine.timing import pass_seconds
from examples.figures.figure import Claim, Figure
from examples.figures.style import headline, ratio_axis, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, INK, ORANGE, png
from examples.slos import slo_table
from models.costs import Volume

TOKENS = 32_768
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SMALL, LARGE = 512, 8192  # for the claims


@dataclass(frozen=True, slots=True)
class Chunked:
    """A whole prefill in chunks of `size` tokens. Times in seconds."""

    size: int
    seconds: float
    longest: float  # of its chunks
    operator: float  # the longest operator of its longest chunk

    @property
    def tokens_per_s(self) -> float:
        return TOKENS / self.seconds


def prefill(deployment: Deployment, size: int) -> Chunked:
    timing, layers = deployment.timing, deployment.config.num_layers
    volumes = [Volume.of(start, size, drawn=1 if start + size == TOKENS else 0) for start in range(0, TOKENS, size)]
    times = [pass_seconds(timing, layers, volume) for volume in volumes]
    ends = timing.legs(0, layers, volumes[-1])[0].ends
    longest = max(end - start for start, end in zip((0.0, *ends), ends, strict=False))
    return Chunked(size, sum(times), max(times), longest)


async def make(workers: Workers) -> Figure:
    deployment = Deployment(model="llama3-8b", hardware="a800-80g")
    chunked = {size: prefill(deployment, size) for size in CHUNKS}
    best = max(each.tokens_per_s for each in chunked.values())
    small, large, whole = chunked[SMALL], chunked[LARGE], chunked[TOKENS]
    text = slo_table("llama3-8b")["text"].ttft or 0.0
    return Figure(
        title="FlowPrefill, figure 3: a 32K prompt in chunks, throughput against the wait for a chunk's end",
        setting="Llama3-8B on A800, cost model",
        claims=[
            Claim(
                "Small chunks cost throughput",
                f"{SMALL} tokens: {small.tokens_per_s / best:.0%} of the best throughput; {LARGE:,}: "
                f"{large.tokens_per_s / best:.0%}; whole: {whole.tokens_per_s / best:.0%}",
                holds=small.tokens_per_s < 0.9 * best,
            ),
            Claim(
                "Large chunks cost latency: others wait for the end of one",
                f"a chunk of {LARGE:,} takes up to {large.longest:.2f} s, one of {SMALL} {small.longest:.2f} s, and a "
                f"text is due within {text:g} s",
                holds=large.longest > text > small.longest,
            ),
        ],
        rows=[
            {
                "chunk_tokens": each.size,
                "prefill_s": each.seconds,
                "tokens_per_s": each.tokens_per_s,
                "longest_chunk_s": each.longest,
                "longest_operator_s": each.operator,
            }
            for each in chunked.values()
        ],
        png=plot(chunked, text),
    )


def plot(chunked: dict[int, Chunked], text: float) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    sizes = list(chunked)
    style = {"marker": "o", "lw": 1.6, "ms": 5, "mfc": "white", "mew": 1.4}
    left.plot(sizes, [each.tokens_per_s / 1e3 for each in chunked.values()], color=BLUE, **style)
    left.set_ylim(0)
    left.set_ylabel("thousand tokens a second")
    left.set_title("throughput of the prefill", loc="left", fontsize=10)
    right.plot(sizes, [each.longest * 1e3 for each in chunked.values()], color=ORANGE, label="a chunk", **style)
    style |= {"marker": "^", "ls": "--"}
    right.plot(sizes, [each.operator * 1e3 for each in chunked.values()], color=BLUE, label="an operator", **style)
    right.axhline(text * 1e3, color=INK, lw=1, ls=(0, (4, 3)))
    right.text(sizes[0], text * 1e3 * 1.12, "TTFT target of a text", fontsize=9, color=INK)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    right.set_ylabel("ms")
    right.set_title("longest wait for the end of", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=9, loc="lower right")
    headline(figure, "FlowPrefill, figure 3: a prompt of 32K tokens in chunks (Llama3-8B on A800)")
    for axes in (left, right):
        ratio_axis(axes, "tokens in a chunk")
        axes.set_xticks(sizes, [f"{size:,}" if size < 1024 else f"{size // 1024}K" for size in sizes])
        tidy(axes)
    return png(figure)
