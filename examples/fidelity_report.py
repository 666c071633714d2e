"""Two live runs and a simulation of the same requests, compared: how far it is from them, and they from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

import numpy as np

from engine.metrics import Row, percentile
from examples.token_gaps import TokenGaps

TTFT_AIM, TBT_AIM, TIMES_LIVE = 0.10, 0.15, 1.5


@dataclass(frozen=True, slots=True)
class Served:
    """One run. Rows in the order of the requests; `gaps`: seconds between tokens, over all requests."""

    rows: Sequence[Row]
    gaps: Sequence[float]

    @classmethod
    def of(cls, rows: Sequence[Row], gaps: TokenGaps) -> Served:
        return cls(sorted(rows, key=lambda row: row.id), gaps.seconds)

    @property
    def attainment(self) -> float:
        return sum(row.meets_ttft is True for row in self.rows) / len(self.rows)

    def ttft(self, percent: float) -> float:
        return percentile([row.ttft for row in self.rows if row.ttft is not None], percent)

    def tbt(self, percent: float) -> float:
        """nan where no request has two tokens."""
        return percentile(self.gaps, percent) if self.gaps else nan


@dataclass(frozen=True, slots=True)
class Distance:
    """Of the simulation from the mean of the live runs, and of these from each other, both relative to that mean; or in
    points of attainment."""

    simulated: float
    live: float
    aim: float = TTFT_AIM

    @property
    def holds(self) -> bool:
        """Within the aim, or 1.5 times what the live runs differ by."""
        return abs(self.simulated) <= max(self.aim, TIMES_LIVE * self.live)

    def __str__(self) -> str:
        return f"{self.simulated:>+7.1%} ({self.live:>5.1%}){' ' if self.holds else '!'}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`rank_simulated`: Spearman's correlation of the requests' TTFTs with the live ones, the mean over both runs;
    `rank_live`: between the live runs."""

    system: str
    load: float
    rate: float
    requests: int
    live_ttft_p50: float
    live_attainment: float
    live_tbt_p50: float
    ttft_p50: Distance
    ttft_p90: Distance
    attainment: Distance
    tbt_p50: Distance
    tbt_p99: Distance
    rank_simulated: float
    rank_live: float

    @classmethod
    def of(cls, system: str, load: float, rate: float, live: Served, again: Served, simulated: Served) -> Comparison:
        """Runs of the same requests."""

        def mean(figure: Callable[[Served], float]) -> float:
            return (figure(live) + figure(again)) / 2

        def distance(figure: Callable[[Served], float], *, relative: bool = True, aim: float = TTFT_AIM) -> Distance:
            unit = mean(figure) if relative else 1.0
            return Distance((figure(simulated) - mean(figure)) / unit, abs(figure(live) - figure(again)) / unit, aim)

        return cls(
            system=system,
            load=load,
            rate=rate,
            requests=len(live.rows),
            live_ttft_p50=mean(lambda run: run.ttft(50)),
            live_attainment=mean(lambda run: run.attainment),
            live_tbt_p50=mean(lambda run: run.tbt(50)),
            ttft_p50=distance(lambda run: run.ttft(50)),
            ttft_p90=distance(lambda run: run.ttft(90)),
            attainment=distance(lambda run: run.attainment, relative=False),
            tbt_p50=distance(lambda run: run.tbt(50), aim=TBT_AIM),
            tbt_p99=distance(lambda run: run.tbt(99), aim=TBT_AIM),
            rank_simulated=mean(lambda run: rank_correlation(simulated.rows, run.rows)),
            rank_live=rank_correlation(live.rows, again.rows),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rank_correlation(rows: Sequence[Row], others: Sequence[Row]) -> float:
    """Spearman's, of the TTFTs of those requests that got a first token in both; nan where all are alike."""
    pairs = [(a.ttft, b.ttft) for a, b in zip(rows, others, strict=True) if a.ttft is not None and b.ttft is not None]
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    return float(np.corrcoef(ranks[0], ranks[1]).flat[1])


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return [float(rank) for rank in ((ends - 1 + ends - counts) / 2)[inverse]]


def table(comparisons: Sequence[Comparison], *, heading: bool = True) -> str:
    """One line a comparison: the simulation's distance from live, and in brackets that between the live runs; `!` where
    the aim is missed."""
    lines = []
    if heading:
        figures = "".join(f"{name:>17}" for name in ("TTFT p50", "TTFT p90", "TTFT met", "TBT p50", "TBT p99"))
        lines.append(f"{'system':<16}{'load':>5}{'req/s':>7}{'n':>6}{figures}{'rank':>15}")
    for c in comparisons:
        distances = "".join(f"{d!s:>17}" for d in (c.ttft_p50, c.ttft_p90, c.attainment, c.tbt_p50, c.tbt_p99))
        ranks = f"{c.rank_simulated:>8.3f} ({c.rank_live:.3f})"
        lines.append(f"{c.system:<16}{c.load:>5.1f}{c.rate:>7.2f}{c.requests:>6}{distances}{ranks}")
    return "\n".join(lines)
