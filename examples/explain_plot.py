"""The picture of an explained run: the same requests under each system, and the last system decision by decision.

A row is a request. A thin line: it waits; a solid bar: the executor computes its prefill; a pale bar: it has pulled
over. The upright stroke is its deadline, the last mark its first token: a dot in time, a cross too late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from engine.intervals import Phase
from examples.explain import Explained, letter_of
from examples.history import History
from examples.palette import FAINT, INK, LATE, SEQUENCE, png
from scheduling.request import Request

MOST_REQUESTS = 10
MOST_DECISIONS = 12
WRAP = 118  # characters in a line of a decision's reason

Place = Callable[[float], float]  # from seconds to the axis


def plot(runs: Sequence[Explained]) -> bytes:
    """A PNG. With more than MOST_REQUESTS requests or MOST_DECISIONS decisions it shows the first."""
    explained = runs[-1]
    requests = list(explained.history.requests.values())[:MOST_REQUESTS]
    colours = {request.id: SEQUENCE[row % len(SEQUENCE)] for row, request in enumerate(requests)}
    name = letter_of(len(explained.history.requests))
    lines = said(explained)
    row = 0.24 * len(requests)
    heights = [0.55 + row] * len(runs) + [0.95 + 1.3 * row, 0.25 + 0.185 * len(lines)]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(11.5, 0.9 + sum(heights)), height_ratios=heights, layout="constrained"
    )
    end = max(ends(run.history, requests) for run in runs)
    for run, ax in zip(runs, axes, strict=False):
        draw(ax, run.history, requests, name, colours, lambda time: time)
        ax.set_xlim(-0.01 * end, 1.02 * end)
        ax.set_title(run.system, loc="left", fontsize=10, fontweight="bold")
        ax.set_title(waits(run.history, requests, name), loc="right", fontsize=9, color=INK)
        ax.tick_params(labelbottom=run is explained)
    axes[len(runs) - 1].set_xlabel("seconds")
    decide(axes[-2], explained, requests, name, colours)
    reasons(axes[-1], lines)
    figure.legend(handles=legend(), loc="outside upper left", ncols=6, frameon=False, fontsize=9)
    return png(figure)


def draw(
    axes: Axes,
    history: History,
    requests: Sequence[Request],
    name: Callable[[Request], str],
    colours: Mapping[int, str],
    place: Place,
) -> None:
    """A row for each request, with time where `place` puts it."""
    rows = {request.id: row for row, request in enumerate(requests)}
    for phase in history.phases:
        if phase.request.id in rows:
            row, colour = rows[phase.request.id], colours[phase.request.id]
            start, width = place(phase.start), place(phase.end) - place(phase.start)
            if phase.phase is Phase.WAITING:
                axes.barh(row, width, 0.1, start, color=FAINT, linewidth=0)
            elif phase.phase in (Phase.RUNNING, Phase.PARKED):
                alpha = 1.0 if phase.phase is Phase.RUNNING else 0.25
                axes.barh(row, width, 0.62, start, fc=colour, alpha=alpha, ec="white", linewidth=0.8)  # slices show
    for request in requests:
        row, first = rows[request.id], history.first_tokens.get(request.id)
        if request.slo.ttft is not None:
            due = place(request.deadline)
            axes.plot([due, due], [row - 0.42, row + 0.42], color=INK, linewidth=1.2, zorder=3)
        if first is not None:
            marker, ink = ("X", LATE) if first > request.deadline else ("o", INK)
            axes.plot([place(first)], [row], marker=marker, color=ink, ms=6.5, mec="white", mew=0.7, zorder=4)
    axes.set_yticks(range(len(requests)), [f"{name(request)}  {title(request)}" for request in requests], fontsize=9)
    axes.set_ylim(len(requests) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def title(request: Request) -> str:
    return f"{request.label} {len(request.prompt):,}"


def waits(history: History, requests: Sequence[Request], name: Callable[[Request], str]) -> str:
    """What each request waited for its first token; late ones say so. Of many only how many were late."""
    if len(requests) > 4:
        count = sum(history.first_tokens.get(request.id, np.inf) > request.deadline for request in requests)
        return f"{count} of {len(requests)} late"
    words = []
    for request in requests:
        first = history.first_tokens.get(request.id)
        if first is not None:
            late = " (late)" if first > request.deadline else ""
            words.append(f"{name(request)} {1e3 * (first - request.arrival):,.0f} ms{late}")
    return "TTFT: " + ", ".join(words)


def ends(history: History, requests: Sequence[Request]) -> float:
    """The last of their first tokens, in seconds."""
    return max(history.first_tokens.get(request.id, request.arrival) for request in requests)


def decide(
    axes: Axes,
    explained: Explained,
    requests: Sequence[Request],
    name: Callable[[Request], str],
    colours: Mapping[int, str],
) -> None:
    """The schedule, with a number at each decision. Time is stretched where decisions are close to each other."""
    choices = explained.choices[:MOST_DECISIONS]
    last = ends(explained.history, requests)
    if len(explained.choices) > len(choices):
        last = explained.choices[len(choices)].time
    moments = sorted({0.0, *(choice.time for choice in choices), last})
    widths = np.sqrt(np.diff(moments) / last)
    widths = np.maximum(widths, widths.sum() / 18)  # room for a label
    places = np.concatenate([[0.0], np.cumsum(widths)])

    def place(time: float) -> float:
        return float(np.interp(time, moments, places)) if time <= last else float("nan")

    draw(axes, explained.history, requests, name, colours, place)
    taken: dict[float, int] = {}
    for number, choice in enumerate(choices, 1):
        x = place(choice.time)
        axes.axvline(x, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
        above = taken.setdefault(x, 0)
        taken[x] += 1
        axes.annotate(
            f"{number}",
            (x, -0.75 - 0.7 * above),
            annotation_clip=False,
            bbox={"boxstyle": "circle,pad=0.22", "fc": INK, "ec": "none"},
            ha="center",
            va="bottom",
            fontsize=9,
            fontweight="bold",
            color="white",
        )
    axes.set_xlim(-0.01 * places[-1], 1.02 * places[-1])
    axes.set_xticks(places, [f"{moment:.3f}" for moment in moments], fontsize=8)
    axes.set_xlabel("seconds, stretched where decisions are close together")
    axes.set_title(f"{explained.system}, decision by decision", loc="left", fontsize=10, fontweight="bold", pad=22)


def said(explained: Explained) -> list[tuple[str, str]]:
    """What each decision was about, and why: lines, the first of each decision with its number."""
    lines = []
    for number, choice in enumerate(explained.choices[:MOST_DECISIONS], 1):
        words = f"{'; '.join(choice.causes) or 'blocks are free'}.  {choice.why[0].upper()}{choice.why[1:]}."
        lines += [("" if row else f"{number}", line) for row, line in enumerate(wrap(words, WRAP))]
    return lines


def reasons(axes: Axes, lines: Sequence[tuple[str, str]]) -> None:
    axes.set_ylim(len(lines), 0)
    axes.set_xlim(0, 1)
    for row, (number, words) in enumerate(lines):
        axes.text(0.012, row + 0.5, number, ha="right", va="center", fontsize=9, fontweight="bold", color=INK)
        axes.text(0.025, row + 0.5, words, va="center", fontsize=9, color=INK)
    axes.set_axis_off()


def legend() -> list[Line2D | Patch]:
    return [
        Line2D([], [], color=FAINT, linewidth=2, label="waiting"),
        Patch(color=SEQUENCE[0], label="computed"),
        Patch(color=SEQUENCE[0], alpha=0.25, label="pulled over"),
        Line2D([], [], color=INK, marker="|", linestyle="", markersize=10, label="deadline"),
        Line2D([], [], color=INK, marker="o", linestyle="", label="first token"),
        Line2D([], [], color=LATE, marker="X", linestyle="", label="too late"),
    ]
