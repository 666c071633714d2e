"""An ablation's picture: attainment by rate, attainment by SLO scale, and the knees beside them, as far as they were
asked for."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from examples.findings import Findings, Spot
from examples.palette import FAINT, INK, LINES, MARKERS, SEQUENCE, png
from examples.report import METRIC

MOST_OF_A_BAR = 2.0  # how far an interval is drawn, in lengths of the longest bar


def plot(findings: Findings) -> bytes:
    """A PNG. A curve at the first SLO scale (or rate, of the other panel), with bands of 95 % over seeds."""
    tried = findings.tried()
    scale = findings.slo_scales[0]
    by_rate = [spot for spot in tried if spot.slo_scale == scale]
    rate = findings.rates[0] if findings.rates else None
    by_scale = [spot for spot in tried if spot.rate == rate]
    panels = []
    if len({spot.rate for spot in by_rate}) > 1 or not by_scale:
        panels.append("rate")
    if len({spot.slo_scale for spot in by_scale}) > 1:
        panels.append("slo_scale")
    panels = panels or ["rate"]
    bars = [name for name, found in (("knees", findings.knees), ("min_slo", findings.min_slo)) if found]
    total = len(panels) + len(bars)
    columns = total if total <= 3 else 2
    size = 4.9 * columns + 0.6, 4.2 * -(-total // columns)
    figure, grid = plt.subplots(-(-total // columns), columns, figsize=size, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for panel, ax in zip(panels, axes, strict=False):
        if panel == "rate":
            _curves(ax, findings, by_rate, "rate", findings.config.get("knee"))
            ax.set_xlabel(f"requests per second (SLO scale {scale:g})")
        else:
            _curves(ax, findings, by_scale, "slo_scale", findings.config.get("min_slo"))
            ax.set_xlabel(f"SLO scale ({rate:g} requests per second)")
            ax.invert_xaxis()
    axes[0].set_ylabel(METRIC[findings.metric])
    for name, ax in zip(bars, axes[len(panels) :], strict=False):
        _bars(ax, findings, name)
    for ax in axes[total:]:
        ax.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(labels)), frameon=False, fontsize=9)
    return png(figure)


def _style(findings: Findings, system: str) -> tuple[str, str, str]:
    """Colour, marker and line: curves that lie on one another can be told apart."""
    place = list(findings.systems).index(system)
    return SEQUENCE[place % len(SEQUENCE)], MARKERS[place % len(MARKERS)], LINES[place % len(LINES)]


def _curve(spots: Sequence[Spot], across: str, seeds: int) -> list[Spot]:
    """In order, and of those that all seeds were at, if they make a curve: searches try other places for each seed."""
    spots = sorted((spot for spot in spots if spot.attainment is not None), key=lambda spot: getattr(spot, across))
    whole = [spot for spot in spots if spot.seeds == seeds]
    return whole if len(whole) > 1 else list(spots)


def _curves(axes: Axes, findings: Findings, spots: Sequence[Spot], across: str, target: float | None) -> None:
    if target is not None:
        axes.axhline(target, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        right = axes.get_yaxis_transform()
        axes.text(1.0, target, f"{target:.0%} ", transform=right, ha="right", va="bottom", fontsize=8)
    for system in findings.systems:
        colour, marker, line = _style(findings, system)
        mine = _curve([spot for spot in spots if spot.system == system], across, len(findings.seeds))
        x, y = [getattr(spot, across) for spot in mine], [spot.attainment or 0.0 for spot in mine]
        axes.plot(x, y, marker=marker, color=colour, label=system, ls=line, lw=1.6, ms=5, mfc="white", mew=1.4)
        banded = [spot for spot in mine if spot.low is not None and spot.high is not None]
        axes.fill_between(
            [getattr(spot, across) for spot in banded],
            [max(0.0, spot.low or 0.0) for spot in banded],
            [min(1.0, spot.high or 0.0) for spot in banded],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    values = [getattr(spot, across) for spot in spots]
    if values and max(values) > 3 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lowest = min((spot.low or spot.attainment or 0.0 for spot in spots), default=0.0)
    axes.set_ylim(-0.02 if lowest < 0.5 else floor(10 * lowest - 0.5) / 10, 1.02)
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, findings: Findings, name: str) -> None:
    """At the first SLO scale, or the first rate: value, interval, and times the first system's. An interval that would
    dwarf the bars is cut off, with an arrow."""
    knees = name == "knees"
    at, value = ("slo_scale", "rate") if knees else ("rate", "slo_scale")
    first = (findings.slo_scales if knees else findings.rates)[0]
    entries = [entry for entry in (findings.knees if knees else findings.min_slo) if entry[at] == first]
    longest_bar = max((entry[value] or 0.0 for entry in entries), default=0.0) or 1.0
    longest = min(MOST_OF_A_BAR * longest_bar, max([longest_bar, *(entry["high"] or 0.0 for entry in entries)]))
    for row, entry in enumerate(entries):
        colour, *_ = _style(findings, entry["system"])
        length = entry[value] or 0.0
        axes.barh(row, length, 0.6, color=colour, linewidth=0)
        if entry["low"] is not None and entry["high"] is not None:
            shown = min(entry["high"], longest)
            axes.plot([entry["low"], shown], [row, row], color=INK, linewidth=1.2)
            if shown < entry["high"]:
                axes.plot([shown], [row], marker=">", color=INK, ms=5)
        end = max(length, min(entry["high"] or 0.0, longest))
        label = "none" if entry[value] is None else f"{entry[value]:.3g}"
        if row and entry["times"] is not None:
            label += f"  ({entry['times']:.2g}x{'' if knees else ' as tight'})"
        axes.text(end + 0.03 * longest, row, label, va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(entries)), [entry["system"] for entry in entries], fontsize=9)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_xlim(0, 1.5 * longest)
    target = findings.config["knee" if knees else "min_slo"]
    title = f"highest rate with {target:.0%}" if knees else f"tightest SLO scale with {target:.0%}"
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
