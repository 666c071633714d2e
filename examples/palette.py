"""Colours that colour-blind readers can tell apart (Okabe and Ito), and how a figure becomes a PNG."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Final

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

INK: Final = "#222222"
FAINT: Final = "#B8B8B8"
LATE: Final = "#D55E00"

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442"
SEQUENCE: Final = (BLUE, ORANGE, GREEN, PINK, LATE, SKY, INK)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")  # so that a line is told apart without its colour too
LINES: Final = ("-", "--", "-.", ":")

# By type of request, everywhere.
TYPES: Final = {"text": BLUE, "image": PINK, "search": ORANGE, "file": GREEN, "arxiv": GREEN, "sharegpt": SKY}


def colour_of(labels: Iterable[str]) -> dict[str, str]:
    """Types have their own colours; other labels get what is left, in turn."""
    labels = list(labels)
    left = [colour for colour in SEQUENCE if colour not in {TYPES.get(label) for label in labels}]
    others = [label for label in labels if label not in TYPES]
    return {label: TYPES.get(label) or left[others.index(label) % len(left)] for label in labels}


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as a file's content; it is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    plt.close(figure)
    return buffer.getvalue()
