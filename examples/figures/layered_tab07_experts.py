"""Layered Prefill's table 7: how many bytes of experts' weights 100 requests load.

A chunk meets most experts of every layer, so every chunk of a prompt loads them anew; a prompt that crosses the layers
in groups loads them once. Decodes load theirs in every step either way, and more often where steps are faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from examples.figures.figure import Claim, Figure
from examples.figures.layered import CHUNKED, LAYERED, SEEDS, SETTING, SOURCES, Outcome, both, change
from examples.figures.style import LEGEND, SYSTEMS, tidy
from examples.figures.workers import Workers
from examples.palette import INK, png

REQUESTS = 100
RATES = {"arxiv": 1.3, "sharegpt": 4.0}  # the highest at which the paper's chunked prefill still meets all targets
PAPER = {"arxiv": (35.6, 21.7), "sharegpt": (28.5, 25.1)}  # terabytes, chunked and layered
WITHIN = 0.08  # of the paper's change

Pair = tuple[Outcome, Outcome]


async def make(workers: Workers) -> Figure:
    loads = {source: await both(workers, source, rate, requests=REQUESTS) for source, rate in RATES.items()}
    return Figure(
        title="Layered Prefill, table 7: bytes of experts loaded for 100 requests",
        setting=f"{SETTING}, by the coverage model; {len(SEEDS)} x {REQUESTS} requests",
        claims=[claim(source, *loads[source]) for source in RATES],
        rows=[
            {
                "source": source,
                "rate_per_s": RATES[source],
                "system": system,
                "expert_tb": total(each),
                "of_prefills_tb": of_prefills(each),
                "decode_batch": each.decode_batch,
                "paper_tb": theirs,
            }
            for source, pair in loads.items()
            for system, each, theirs in zip((CHUNKED, LAYERED), pair, PAPER[source], strict=True)
        ],
        png=plot(loads),
    )


def total(each: Outcome) -> float:
    """Terabytes for 100 requests."""
    return 100 * each.expert_bytes / 1e12


def of_prefills(each: Outcome) -> float:
    """What of it is charged to prefill rows."""
    return 100 * sum(run.counters.prefill_expert_bytes for run in each.runs) / len(each.rows) / 1e12


def claim(source: str, chunked: Outcome, layered: Outcome) -> Claim:
    before, after = PAPER[source]
    theirs, ours = change(before, after), change(total(chunked), total(layered))
    prefills, decodes = ((f(chunked), f(layered)) for f in (of_prefills, lambda each: total(each) - of_prefills(each)))
    return Claim(
        f"{SOURCES[source]}: {before} -> {after} TB ({100 * theirs:.0f} %)",
        f"{total(chunked):.1f} -> {total(layered):.1f} TB ({100 * ours:+.0f} %) at {RATES[source]} requests a second: "
        f"prefills {prefills[0]:.1f} -> {prefills[1]:.1f}, decodes {decodes[0]:.1f} -> {decodes[1]:.1f}",
        holds=abs(ours - theirs) <= WITHIN,
        why=f"the bar: within {100 * WITHIN:.0f} points; steps are faster with groups, so fewer decodes share what one "
        f"loads, {chunked.decode_batch:.1f} -> {layered.decode_batch:.1f}",
    )


def plot(loads: Mapping[str, Pair]) -> bytes:
    figure, panels = plt.subplots(1, len(loads), figsize=(8, 3.8), layout="constrained")
    for axes, (source, pair) in zip(panels, loads.items(), strict=True):
        for place, (system, each) in enumerate(zip((CHUNKED, LAYERED), pair, strict=True)):
            prefills, colour = of_prefills(each), SYSTEMS[system][0]
            axes.bar(place, prefills, 0.6, color=colour, label="prefills")
            axes.bar(place, total(each) - prefills, 0.6, bottom=prefills, color=colour, alpha=0.4, label="decodes")
            axes.annotate(f"{total(each):.1f}", (place, total(each)), ha="center", va="bottom", fontsize=9, color=INK)
        axes.set_xticks(range(2), [CHUNKED, LAYERED])
        axes.set_title(f"{SOURCES[source]}, {RATES[source]} requests a second", loc="left", fontsize=11)
        tidy(axes)
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("terabytes for 100 requests")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], **LEGEND, ncols=2)
    return png(figure)
