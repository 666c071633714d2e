"""What an ablation has found: its runs, and what they say over seeds and against the first system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from examples.confidence import interval, paired
from examples.experiment import digest_of
from examples.results import ATTAINMENT, BY_CLASS, Metric, Record


@dataclass(frozen=True, slots=True)
class Spot:
    """One system at one rate and SLO scale, over all seeds. A figure that no run has is None."""

    system: str
    rate: float
    slo_scale: float
    seeds: int
    attainment: float | None
    low: float | None  # of the 95 % interval; None for a single seed
    high: float | None
    change: tuple[float, float, float] | None  # against the first system, seed by seed: mean, low, high
    means: Record  # of every figure of the runs
    worst: tuple[str, float] | None  # the type that fares worst, and its attainment


@dataclass(frozen=True, slots=True)
class Findings:
    """`runs`: a record each (examples/results.py) with its system, rate, SLO scale and seed. `knees`, `min_slo`: one
    entry for each search, with `low` and `high` of a 95 % interval and `times` the first system's value."""

    config: dict[str, Any]
    metric: Metric
    systems: Sequence[str]
    rates: Sequence[float]
    slo_scales: Sequence[float]
    seeds: Sequence[int]
    runs: Sequence[Record]
    knees: Sequence[Record]
    min_slo: Sequence[Record]

    @property
    def config_hash(self) -> str:
        return digest_of(repr(self.config))

    def spots(self) -> list[Spot]:
        """The grid that was asked for, without what the searches tried."""
        return [
            self.spot(system, rate, scale)
            for scale in self.slo_scales
            for rate in self.rates
            for system in self.systems
        ]

    def tried(self) -> list[Spot]:
        """Every rate and scale that some run was at, the searches' too, over the seeds that were there."""
        places = dict.fromkeys((run["system"], run["rate"], run["slo_scale"]) for run in self.runs)
        return [self.spot(*place) for place in places]

    def spot(self, system: str, rate: float, slo_scale: float) -> Spot:
        mine, base = self._at(system, rate, slo_scale), self._at(self.systems[0], rate, slo_scale)
        key = ATTAINMENT[self.metric]
        shares = [run[key] for run in mine if run[key] is not None]
        low, high = interval(shares) if len(shares) > 1 else (None, None)
        change = None
        if system != self.systems[0] and len(shares) == len(base) == len(mine):
            change = paired(shares, [run[key] for run in base])
        return Spot(
            system,
            rate,
            slo_scale,
            seeds=len(mine),
            attainment=mean(shares) if shares else None,
            low=low,
            high=high,
            change=change,
            means=_means(mine),
            worst=_worst(mine, self.metric),
        )

    def _at(self, system: str, rate: float, slo_scale: float) -> list[Record]:
        """In order of their seeds."""
        return [r for r in self.runs if (r["system"], r["rate"], r["slo_scale"]) == (system, rate, slo_scale)]


def _means(runs: Sequence[Record]) -> Record:
    figures: Record = {}
    for key in runs[0] if runs else ():
        values = [run[key] for run in runs if isinstance(run[key], int | float)]
        figures[key] = mean(values) if values else None
    return figures


def _worst(runs: Sequence[Record], metric: Metric) -> tuple[str, float] | None:
    """By the mean over the runs that have such requests."""
    shares: dict[str, list[float]] = {}
    for run in runs:
        for label, share in run[BY_CLASS[metric]].items():
            if share is not None:
                shares.setdefault(label, []).append(share)
    means = {label: mean(values) for label, values in shares.items()}
    return min(means.items(), key=lambda item: item[1]) if means else None
