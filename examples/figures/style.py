"""How the figures look, beside the colours of examples/palette.py: a system has one colour, marker and line in all."""

from __future__ import annotations

from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from examples.palette import BLUE, FAINT, GREEN, INK, LATE, ORANGE, PINK, SKY

LEGEND: Final[dict[str, Any]] = {"loc": "outside lower center", "frameon": False, "fontsize": 9}  # of a figure

# Colour, marker and line of the systems that are compared.
SYSTEMS: Final[dict[str, tuple[str, str, str]]] = {
    "distserve": (INK, "s", "-"),
    "distserve-cp2k": (LATE, "v", ":"),
    "distserve-cp2k order=s-edf": (ORANGE, "^", "--"),
    "distserve-cp8k": (PINK, "v", "-."),
    "flowprefill-layer": (SKY, "D", ":"),
    "flowprefill": (BLUE, "o", "-"),
    "flowprefill-release": (GREEN, "D", ":"),
    "vllm-cp2k": (ORANGE, "^", "--"),
    "flowprefill-colocated": (SKY, "D", ":"),
    "layby-colocated": (BLUE, "o", "-"),
    "sarathi": (ORANGE, "^", "--"),
    "layered": (GREEN, "D", "-"),
    "layered-s-edf": (LATE, "P", ":"),
}


def line(system: str) -> dict[str, Any]:
    """Arguments of `Axes.plot` for a system of SYSTEMS, or one of which some answers have been changed."""
    colour, marker, style = SYSTEMS.get(system) or SYSTEMS[system.split()[0]]
    return {"color": colour, "marker": marker, "ls": style, "lw": 1.6, "ms": 5, "mfc": "white", "mew": 1.4}


def tidy(axes: Axes) -> None:
    """No box, a faint grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)


def ratio_axis(axes: Axes, label: str) -> None:
    """Across, on a scale of ratios: request rates, SLO scales, token counts. Call it when everything is drawn."""
    low, high = axes.get_xlim()
    axes.set_xscale("log", base=2)
    wide = max(high, low) > 64 * max(min(high, low), 1e-9)
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0)) if wide else LogLocator(2, subs=(1.0, 1.5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:.3g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)


def rate_and_scale_axes(rates: Axes, scales: Axes, load: float) -> None:
    """Across two panels: request rates; and SLO scales at so many requests a second, tighter to the right."""
    ratio_axis(rates, "requests per second")
    ratio_axis(scales, f"SLO scale at {load:.2g} requests/s (tighter: right)")
    scales.invert_xaxis()


def attainment_axis(axes: Axes, target: float, *, first: bool = True) -> None:
    """Upwards, from 0 to 100 %, with a line at the target; `first` has the label."""
    axes.axhline(target, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if first:
        axes.set_ylabel("requests that meet TTFT")


def headline(figure: Figure, text: str) -> None:
    """What the picture shows, at its upper left."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
