"""Layered Prefill's figure 2: what a prompt of 8,192 tokens costs by the size of its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt

from engine.calibration import QWEN3_30B_ON_H100, chunk_seconds
from engine.counting import Counting
from engine.work import Part, Work
from examples.figures.figure import Claim, Figure
from examples.figures.layered import deployment
from examples.figures.style import LEGEND, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, INK, ORANGE, png

TOKENS = 8192
LOADS = {512: 765, 1024: 405, 2048: 213, 4096: 110, 8192: 57}  # the paper's, gigabytes
WITHIN = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """Gigabytes of experts' weights, and seconds in the experts' part and in all else."""

    load: float
    experts: float
    others: float

    @property
    def seconds(self) -> float:
        return self.experts + self.others


def cost(chunk: int) -> Cost:
    costs = deployment().costs
    counting, layers = Counting(costs), costs.num_layers
    parts = [Part(range(chunk), start, ()) for start in range(0, TOKENS, chunk)]
    load = sum(counting.expected(Work(layers, (part,), last=layers)).expert_bytes for part in parts)
    return Cost(load / 1e9, *chunk_seconds(costs, deployment().device, chunk))


async def make(workers: Workers) -> Figure:
    ours = {chunk: cost(chunk) for chunk in LOADS}
    theirs = {chunk: Cost(LOADS[chunk], *seconds) for chunk, seconds in QWEN3_30B_ON_H100.items()}
    load = max(abs(ours[chunk].load / theirs[chunk].load - 1) for chunk in LOADS)
    time = max(abs(ours[chunk].seconds / theirs[chunk].seconds - 1) for chunk in LOADS)
    small, large = ours[512], ours[8192]
    return Figure(
        title="Layered Prefill, figure 2: a prompt of 8,192 tokens by the size of its chunks",
        setting="Qwen3-30B-A3B on 2 H100 (TP2), cost model, fitted to this figure as read off the paper's plot",
        claims=[
            Claim(
                "Experts loaded: 765, 405, 213, 110, 57 GB at 512 to 8,192",
                ", ".join(f"{each.load:.0f}" for each in ours.values()) + f" GB, within {100 * load:.0f} %",
                holds=load <= WITHIN,
                why="fitted, three figures to these and table 1 together",
            ),
            Claim(
                "Run time: 558, 370, 263, 232, 208 ms",
                ", ".join(f"{1e3 * each.seconds:.0f}" for each in ours.values()) + f" ms, within {100 * time:.0f} %",
                holds=time <= WITHIN,
                why="fitted: five figures to the ten times in and outside the experts' part",
            ),
            Claim(
                "At 512 the experts' part is more than half of it",
                f"{100 * small.experts / small.seconds:.0f} %; at 8,192 {100 * large.experts / large.seconds:.0f} %",
                holds=small.experts > small.others,
            ),
        ],
        rows=[
            {
                "chunk_tokens": chunk,
                "expert_gb": each.load,
                "expert_gb_per_chunk": each.load * chunk / TOKENS,
                "experts_ms": 1e3 * each.experts,
                "others_ms": 1e3 * each.others,
                "paper_expert_gb": theirs[chunk].load,
                "paper_experts_ms": 1e3 * theirs[chunk].experts,
                "paper_others_ms": 1e3 * theirs[chunk].others,
            }
            for chunk, each in ours.items()
        ],
        png=plot(ours, theirs),
    )


def plot(ours: Mapping[int, Cost], theirs: Mapping[int, Cost]) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    places = range(len(ours))
    left.bar(places, [each.load for each in ours.values()], 0.6, color=BLUE)
    left.plot(places, [each.load for each in theirs.values()], "_", color=INK, ms=24, mew=2)
    left.set_ylabel("gigabytes of experts loaded")
    others = [1e3 * each.others for each in ours.values()]
    right.bar(places, [1e3 * each.experts for each in ours.values()], 0.6, bottom=others, color=BLUE, label="experts")
    right.bar(places, others, 0.6, color=ORANGE, label="all else")
    totals, parts = ([1e3 * getattr(each, field) for each in theirs.values()] for field in ("seconds", "others"))
    right.plot(places, totals, "_", color=INK, ms=24, mew=2, label="the paper's")
    right.plot(places, parts, "_", color=INK, ms=24, mew=2)
    right.set_ylabel("milliseconds")
    for axes in (left, right):
        axes.set_xticks(places, [f"{chunk:,}" for chunk in ours])
        axes.set_xlabel("tokens in a chunk")
        tidy(axes)
        axes.grid(visible=False, axis="x")
    figure.legend(*right.get_legend_handles_labels(), **LEGEND, ncols=3)
    return png(figure)
