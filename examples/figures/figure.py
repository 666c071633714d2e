"""What a figure is once it is made: a picture, its data, and what the paper claims beside what came out."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.command import Outputs

Row = Mapping[str, object]  # a line of the CSV; the keys are its head, units included


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says, what came out here, and whether the one holds for the other.

    `why` says why not, or what a claim that holds rests on. A claim that does not hold, and has no reason that somebody
    checked, is told as not explained.
    """

    paper: str
    ours: str
    holds: bool
    why: str = ""

    @property
    def reason(self) -> str:
        why = self.why or ("" if self.holds else "not explained")
        return why[:1].upper() + why[1:]


@dataclass(frozen=True, slots=True)
class Figure:
    """`title`: what it shows, and of which paper; `setting`: on what it was measured; `png`: the file's content."""

    title: str
    setting: str
    claims: Sequence[Claim]
    rows: Sequence[Row]
    png: bytes

    def text(self) -> str:
        """As a person reads it."""
        lines = [self.title, f"  {self.setting}"]
        for claim in self.claims:
            lines += [f"  paper  {claim.paper}", f"  ours   {claim.ours}"]
            lines += [
                f"  {'holds' if claim.holds else 'does not hold'}{': ' if claim.reason else ''}{claim.reason}",
                "",
            ]
        return "\n".join(lines).rstrip()


def write(name: str, figure: Figure, folder: Path) -> list[Path]:
    """NAME.png and NAME.csv in `folder`: both, or neither."""
    outputs = Outputs()
    outputs.add(folder / f"{name}.png", figure.png)
    outputs.add(folder / f"{name}.csv", csv_of(figure.rows))
    return outputs.commit()


def csv_of(rows: Sequence[Row]) -> str:
    """Numbers with six significant digits; the first row's keys are the head."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()


def table(figures: Mapping[str, Figure]) -> str:
    """All claims as one Markdown table."""
    lines = ["| figure | the paper | here | holds |", "|---|---|---|---|"]
    for name, figure in figures.items():
        for number, claim in enumerate(figure.claims):
            verdict = "yes" if claim.holds else "**no**"
            holds = f"{verdict}. {claim.reason}" if claim.reason else verdict
            cells = ("" if number else name, claim.paper, claim.ours, holds)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
