"""The demo's picture: the same seconds of every system one above the other, and beside each what it attained.

A row is a request. A thin line: it waits; a solid bar: the executor computes its prefill; a pale bar: it has pulled
over. The upright stroke is its deadline, the last mark its first token: a dot in time, a cross too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from engine.intervals import Phase
from engine.metrics import Results
from examples.demo_report import Outcome
from examples.history import History
from examples.palette import FAINT, INK, LATE, colour_of, png
from scheduling.request import Request

PALE = 0.25  # of what is parked

MOST_ROWS = 14

Colours = Mapping[str, str]  # by the type of request


@dataclass(frozen=True, slots=True)
class Window:
    """The seconds to look at, counted from the first arrival, and the requests to show, by id, in order of arrival."""

    start: float
    end: float
    requests: list[int]
    star: int  # the long prefill that pulls over


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw what systems made of the same arrivals into a PNG. The window is chosen by the last one."""
    window = choose_window(outcomes[-1].history)
    results = outcomes[0].results
    colours = colour_of(sorted(results.labels, key=lambda label: -results.labels[label].n))
    height = 1.2 + len(outcomes) * (0.9 + 0.2 * len(window.requests))
    figure, axes = plt.subplots(
        len(outcomes),
        2,
        figsize=(13, height),
        width_ratios=(5.5, 1),
        sharex="col",
        squeeze=False,
        layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1),
    )
    for outcome, (left, right) in zip(outcomes, axes, strict=True):
        draw_timeline(left, outcome.history, window, colours)
        draw_attainment(right, outcome.results, colours)
        left.set_title(outcome.system, loc="left", fontweight="bold", fontsize=11)
        left.set_title(describe(outcome.results), loc="right", fontsize=9, color=INK)
    axes[-1][0].set_xlabel("seconds since the first arrival (the same requests, model and kernels for each system)")
    axes[0][1].set_title("first token in time", loc="left", fontsize=9, color=INK)
    handles = legend(colours)
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=9)
    path.write_bytes(png(figure))


def choose_window(history: History) -> Window:
    """The stay of the prefill that was parked most often, of those short enough to show all that arrived meanwhile."""
    parks: Counter[int] = Counter()
    began: dict[int, float] = {}
    for phase in history.phases:
        if phase.phase is Phase.PARKED:
            parks[phase.request.id] += 1
        elif phase.phase is Phase.RUNNING:
            began.setdefault(phase.request.id, phase.start)
    served = [id for id in history.requests if id in began and id in history.first_tokens]
    if not served:
        raise ValueError("nothing to draw: no request got its first token")

    def worth_seeing(id: int) -> tuple[bool, int, int]:
        stay = began[id], history.first_tokens[id]
        met = sum(stay[0] <= request.arrival <= stay[1] for request in history.requests.values())
        return met <= MOST_ROWS - 4, parks[id], len(history.requests[id].prompt)

    star = max(served, key=worth_seeing)
    length = history.first_tokens[star] - began[star]
    start, left = began[star] - 0.1 * length, history.first_tokens[star]
    end = left + 0.35 * length
    arrived = sorted(history.requests.values(), key=lambda request: request.arrival)
    shown = [request.id for request in arrived if request.id == star or start <= request.arrival <= left]
    first = max(0, shown.index(star) - 2)
    origin = arrived[0].arrival
    return Window(start - origin, end - origin, shown[first : first + MOST_ROWS], star)


def draw_timeline(axes: Axes, history: History, window: Window, colours: Colours) -> None:
    """One row for the executor, then one for each request of the window."""
    origin = min(request.arrival for request in history.requests.values())
    place = {id: row + 1.35 for row, id in enumerate(window.requests)}
    for drive in history.drives:
        if drive.kind == "prefill" and not drive.parked:
            cohort = [history.requests[id] for id in drive.requests]
            draw_cohort(axes, cohort, drive.start - origin, drive.end - origin, colours)
    for phase in history.phases:
        if phase.request.id in place:
            row, begin, length = place[phase.request.id], phase.start - origin, phase.end - phase.start
            colour = colours[phase.request.label]
            if phase.phase is Phase.WAITING:
                axes.barh(row, length, 0.1, begin, color=FAINT, linewidth=0)
            elif phase.phase is Phase.RUNNING:
                axes.barh(row, length, 0.64, begin, color=colour, linewidth=0)
            elif phase.phase is Phase.PARKED:
                axes.barh(row, length, 0.64, begin, color=colour, alpha=PALE, linewidth=0)
    for id, row in place.items():
        draw_marks(axes, history, history.requests[id], row, origin)
    axes.set_xlim(window.start, window.end)
    axes.set_ylim(max(place.values()) + 0.7, -0.75)
    names = [title(history.requests[id]) for id in place]
    axes.set_yticks([0, *place.values()], ["executor", *names], fontsize=8)
    axes.get_yticklabels()[1 + window.requests.index(window.star)].set_fontweight("bold")
    axes.axhline(0.68, color=FAINT, linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_cohort(axes: Axes, cohort: Sequence[Request], start: float, end: float, colours: Colours) -> None:
    """One stretch of the executor's time, split by the tokens of each type in the cohort."""
    tokens = {label: sum(len(request.prompt) for request in cohort if request.label == label) for label in colours}
    bottom = -0.45
    for label, count in tokens.items():
        height, colour = 0.9 * count / sum(tokens.values()), colours[label]
        axes.add_patch(Rectangle((start, bottom), end - start, height, fc=colour, ec="white", linewidth=0.4))
        bottom += height


def draw_marks(axes: Axes, history: History, request: Request, row: float, origin: float) -> None:
    """Deadline and first token."""
    deadline, first = request.deadline - origin, history.first_tokens.get(request.id)
    axes.plot([deadline, deadline], [row - 0.42, row + 0.42], color=INK, linewidth=1.1, zorder=3)
    if first is not None:
        marker, colour = ("X", LATE) if first > request.deadline else ("o", INK)
        axes.plot(first - origin, row, marker, color=colour, ms=6, mec="white", mew=0.6, zorder=4)


def describe(results: Results) -> str:
    """The figures of the run that the drawing cannot show."""
    blocking = results.blocking
    parks = "never parked"
    if blocking.mean is not None:
        mean, longest = blocking.mean * 1e3, blocking.max * 1e3
        parks = f"parked {blocking.n} times, blocking {mean:.1f} ms on average, {longest:.0f} ms at most"
    return f"{parks}; {results.total.met_per_s:.2f} requests met per second"


def title(request: Request) -> str:
    return f"{request.label} {len(request.prompt):,}"


def draw_attainment(axes: Axes, results: Results, colours: Colours) -> None:
    """Bars by type, and in total."""
    bars = [(label, results.labels[label].ttft_attainment, colour) for label, colour in colours.items()]
    bars.append(("all", results.total.ttft_attainment, INK))
    for row, (_, share, colour) in enumerate(bars):
        value = 0.0 if share is None else share
        axes.barh(row, 1, 0.62, color="#F0F0F0", linewidth=0)
        axes.barh(row, value, 0.62, color=colour, linewidth=0)
        axes.text(1.04, row, "-" if share is None else f"{value:.0%}", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=9)
    axes.set_xlim(0, 1.28)
    axes.set_ylim(len(bars) - 0.2, -0.8)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def legend(colours: Colours) -> list[Line2D | Patch]:
    return [
        *(Patch(color=colour, label=label) for label, colour in colours.items()),
        Line2D([], [], color=FAINT, linewidth=2, label="waiting"),
        Patch(color=next(iter(colours.values())), alpha=PALE, label="parked"),
        Line2D([], [], color=INK, marker="|", linestyle="", markersize=10, label="deadline"),
        Line2D([], [], color=INK, marker="o", linestyle="", label="first token"),
        Line2D([], [], color=LATE, marker="X", linestyle="", label="too late"),
    ]
