"""Two live runs and a simulation of the same requests, compared: how far it is from them, and they from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engine.metrics import Row, percentile

AIM, TIMES_LIVE = 0.10, 1.5


@dataclass(frozen=True, slots=True)
class Distance:
    """Of the simulation from the mean of the live runs, and of these from each other, both relative to that mean; or in
    points of attainment."""

    simulated: float
    live: float

    @property
    def holds(self) -> bool:
        """Within 10 %, or 1.5 times what the live runs differ by."""
        return abs(self.simulated) <= max(AIM, TIMES_LIVE * self.live)

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
    ttft_p50: Distance
    ttft_p90: Distance
    attainment: Distance
    rank_simulated: float
    rank_live: float

    @classmethod
    def of(
        cls, system: str, load: float, rate: float, live: Sequence[Row], again: Sequence[Row], simulated: Sequence[Row]
    ) -> Comparison:
        """Rows of the same requests, in the same order."""

        def distance(figure: Callable[[Sequence[Row]], float], *, relative: bool) -> Distance:
            one, other, sim = figure(live), figure(again), figure(simulated)
            mean = (one + other) / 2
            unit = mean if relative else 1.0
            return Distance((sim - mean) / unit, abs(one - other) / unit)

        return cls(
            system=system,
            load=load,
            rate=rate,
            requests=len(live),
            live_ttft_p50=(_ttft(live, 50) + _ttft(again, 50)) / 2,
            live_attainment=(_attainment(live) + _attainment(again)) / 2,
            ttft_p50=distance(lambda rows: _ttft(rows, 50), relative=True),
            ttft_p90=distance(lambda rows: _ttft(rows, 90), relative=True),
            attainment=distance(_attainment, relative=False),
            rank_simulated=(rank_correlation(simulated, live) + rank_correlation(simulated, again)) / 2,
            rank_live=rank_correlation(live, again),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _ttft(rows: Sequence[Row], percent: float) -> float:
    return percentile([row.ttft for row in rows if row.ttft is not None], percent)


def _attainment(rows: Sequence[Row]) -> float:
    return sum(row.meets_ttft is True for row in rows) / len(rows)


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
    """One line a comparison: simulation's distance from live, and in brackets that between the live runs; `!` where the
    aim is missed."""
    lines = []
    if heading:
        lines.append(
            f"{'system':<18}{'load':>5}{'req/s':>7}{'n':>6}{'live TTFT p50':>15}{'p50':>17}{'p90':>17}"
            f"{'attainment':>12}{'':>17}{'rank':>9}"
        )
    for c in comparisons:
        live = f"{c.load:>5.1f}{c.rate:>7.2f}{c.requests:>6}{c.live_ttft_p50 * 1e3:>12.0f} ms"
        ttft, ranks = f"{c.ttft_p50!s:>17}{c.ttft_p90!s:>17}", f"{c.rank_simulated:>7.3f} ({c.rank_live:.3f})"
        lines.append(f"{c.system:<18}{live}{ttft}{c.live_attainment:>12.1%}{c.attainment!s:>17}{ranks}")
    return "\n".join(lines)
