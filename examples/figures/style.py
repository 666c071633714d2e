"""How the figures look, beside the colours of examples/palette.py: a system has one colour, marker and line in all."""

from __future__ import annotations

from typing import Any, Final

from matplotlib.axes import Axes

from examples.palette import BLUE, GREEN, INK, LATE, ORANGE, PINK, SKY

LEGEND: Final[dict[str, Any]] = {"loc": "outside upper center", "frameon": False, "fontsize": 9}  # of a figure

# Colour, marker and line of the systems that are compared.
SYSTEMS: Final[dict[str, tuple[str, str, str]]] = {
    "distserve": (INK, "s", "-"),
    "distserve-cp2k": (ORANGE, "^", "--"),
    "distserve-cp8k": (PINK, "v", "-."),
    "flowprefill-layer": (SKY, "D", ":"),
    "flowprefill": (BLUE, "o", "-"),
    "vllm-cp2k": (ORANGE, "^", "--"),
    "flowprefill-colocated": (BLUE, "o", "-"),
    "sarathi": (ORANGE, "^", "--"),
    "layered": (GREEN, "D", "-"),
    "layered-s-edf": (LATE, "P", ":"),
}


def line(system: str) -> dict[str, Any]:
    """Arguments of `Axes.plot` for a system of SYSTEMS."""
    colour, marker, style = SYSTEMS[system]
    return {"color": colour, "marker": marker, "ls": style, "lw": 1.6, "ms": 5, "mfc": "white", "mew": 1.4}


def tidy(axes: Axes) -> None:
    """No box, a faint grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
