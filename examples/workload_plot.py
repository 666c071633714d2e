"""Lengths and arrivals by type: FlowPrefill's figure 1."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from engine.metrics import percentile
from examples.arrivals import Arrival
from examples.palette import INK, colour_of, png

TYPE_ORDER = ("text", "image", "search", "file")
MOST_POINTS = 4000  # in the scatter plot


def plot(arrivals: Sequence[Arrival], name: str) -> bytes:
    """A PNG: how long the prompts of each type are, and when they come."""
    found = sorted({arrival.label for arrival in arrivals}, key=lambda label: (*_place(label), label))
    colours = colour_of(found)
    figure = plt.figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.55))  # type: ignore[misc]
    rows = left.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(arrival.prompt_tokens for arrival in arrivals)
    shortest = min(arrival.prompt_tokens for arrival in arrivals)
    bins = np.geomspace(max(1, 0.9 * shortest), 1.1 * longest, 48).tolist()
    for axes, label in zip(rows, found, strict=True):
        _lengths(axes, [a for a in arrivals if a.label == label], len(arrivals), bins, colours[label], label)
    rows[-1].set_xlabel("prompt tokens")
    rows[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    above, below = right.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    _scatter(above, arrivals, found, colours)
    _counts(below, arrivals, found, colours)
    figure.suptitle(f"{name}: {len(arrivals):,} requests", x=0.01, ha="left", fontsize=11, fontweight="bold")
    return png(figure)


def _place(label: str) -> tuple[int]:
    return (TYPE_ORDER.index(label) if label in TYPE_ORDER else len(TYPE_ORDER),)


def _lengths(axes: Axes, mine: Sequence[Arrival], of: int, bins: list[float], colour: str, label: str) -> None:
    lengths = [arrival.prompt_tokens for arrival in mine]
    axes.hist(lengths, bins=bins, color=colour, linewidth=0)
    middle = percentile(lengths, 50)  # as in the table
    axes.axvline(middle, color=INK, linewidth=1.2)
    axes.set_xscale("log")
    slo = mine[0].slo.ttft
    due = "" if slo is None or len({arrival.slo for arrival in mine}) > 1 else f", TTFT SLO {slo:g} s"
    axes.set_title(f"{label}: {len(mine) / of:.1%}, median {middle:,.0f}{due}", loc="left", fontsize=9, color=INK)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _scatter(axes: Axes, arrivals: Sequence[Arrival], labels: Sequence[str], colours: dict[str, str]) -> None:
    shown = arrivals[:: -(-len(arrivals) // MOST_POINTS)]
    for label in labels:
        points = [(arrival.time, arrival.prompt_tokens) for arrival in shown if arrival.label == label]
        times, lengths = zip(*points, strict=True) if points else ((), ())
        axes.scatter(times, lengths, s=11, color=colours[label], label=label, linewidth=0, alpha=0.75)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("prompt tokens")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(labels), frameon=False, fontsize=9, markerscale=1.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#EEEEEE")
    axes.set_axisbelow(True)


def _counts(axes: Axes, arrivals: Sequence[Arrival], labels: Sequence[str], colours: dict[str, str]) -> None:
    """Stacked counts. Ten seconds a bar at least: stamps of some traces are no finer."""
    seconds = max(arrivals[-1].time, 1e-9)
    width = max(10.0, 10.0 * round(seconds / 600)) if seconds > 60 else seconds / 12
    edges = np.arange(0, seconds + width, width).tolist()
    times = [[arrival.time for arrival in arrivals if arrival.label == label] for label in labels]
    axes.hist(times, bins=edges, stacked=True, color=[colours[label] for label in labels], linewidth=0, rwidth=0.9)
    axes.set_ylabel(f"requests\nin {width:.3g} s")
    axes.set_xlabel("seconds")
    axes.set_xlim(0, seconds)
    axes.spines[["top", "right"]].set_visible(False)
