"""Systems under one load on one deployment: what they attain, how much they bear, how tight a target they keep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final, TypeVar

from engine.deployment import Deployment
from examples.backends import simulated
from examples.experiment import Load, Run, variant
from examples.figures.figure import Row
from examples.figures.workers import Workers
from examples.search import Edge, combine, highest, ratio

T = TypeVar("T")

Curve = Sequence[tuple[float, float]]

TARGET: Final = 0.9  # attainment at a knee


def generated(source: str, requests: int, model: str = "llama3-8b", *, cv: float = 1.0) -> Load:
    """Poisson arrivals (cv 1) of one of the generators of examples/workload.py, with the SLOs of `model`."""
    return Load(source, digest="", requests=requests, cv=cv, model=model)


@dataclass(frozen=True, slots=True)
class Study:
    """Systems are named as `examples.experiment.variant` reads them: a preset, and behind it the answers to change.

    Every seed draws other requests, and the same ones for all systems, rates and SLO scales.
    """

    workers: Workers
    deployment: Deployment
    load: Load
    seeds: Sequence[int]

    @property
    def rate(self) -> float:
        """Of the trace as it comes, in requests per second."""
        return self.load.workload().rate

    async def over_seeds(self, of: Callable[[Run], T], system: str, rate: float, scale: float = 1.0) -> list[T]:
        """`of` each seed's run; `scale` multiplies the SLOs."""
        named = variant(system)
        runs = [Run(named, self.deployment, self.load, rate, scale, seed) for seed in self.seeds]
        return await gathered(self.workers(of, run) for run in runs)

    async def attainment(self, system: str, rate: float, scale: float = 1.0) -> float:
        """Of TTFT, the mean over seeds."""
        shares: list[float] = [r["ttft_attainment"] for r in await self.over_seeds(simulated, system, rate, scale)]
        return mean(shares)

    async def by_rate(self, system: str, rates: Sequence[float]) -> Curve:
        """(rate, attainment)"""
        return list(zip(rates, await gathered(self.attainment(system, rate) for rate in rates), strict=True))

    async def by_scale(self, system: str, rate: float, scales: Sequence[float]) -> Curve:
        """(SLO scale, attainment)"""
        shares = await gathered(self.attainment(system, rate, scale) for scale in scales)
        return list(zip(scales, shares, strict=True))

    async def knee(self, system: str) -> Sequence[Edge]:
        """For each seed the highest rate at which at least TARGET of the requests meet TTFT."""
        return await self._search(system, self.rate, tight=None)

    async def tightest(self, system: str, rate: float) -> Sequence[Edge]:
        """For each seed the tightest SLOs with at least TARGET, as 1 / SLO scale: more is tighter."""
        return await self._search(system, 1.0, tight=rate)

    async def _search(self, system: str, start: float, *, tight: float | None) -> Sequence[Edge]:
        named = variant(system)

        async def search(seed: int) -> Edge:
            async def holds(value: float) -> bool:
                rate, scale = (value, 1.0) if tight is None else (tight, 1 / value)
                record = await self.workers(simulated, Run(named, self.deployment, self.load, rate, scale, seed))
                return bool(record["ttft_attainment"] >= TARGET)

            return await highest(holds, start)

        return await asyncio.gather(*map(search, self.seeds))


async def gathered(work: Iterable[Awaitable[T]]) -> list[T]:
    """All of it, side by side."""
    return list(await asyncio.gather(*work))


async def for_each(systems: Iterable[str], of: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """`of` every system, side by side."""
    systems = list(systems)
    return dict(zip(systems, await gathered(map(of, systems)), strict=True))


def searched(system: str, knee: Sequence[Edge], tightest: Sequence[Edge] = (), load: float = 0.0) -> list[Row]:
    """What searches have found, as lines of a CSV; `load`: the rate at which SLOs were scaled."""
    lines = []
    rate = combine(knee)
    lines.append(_row(system, "knee", rate.value, 1.0, rate.low, rate.high, TARGET))
    if tightest:
        tight = combine(tightest)
        scale, low, high = (None if end is None else 1 / end for end in (tight.value, tight.high, tight.low))
        lines.append(_row(system, "tightest", load, scale, low, high, TARGET))
    return lines


def curved(system: str, by_rate: Curve, by_scale: Curve = (), load: float = 0.0) -> list[Row]:
    """Curves as lines of the same CSV."""
    lines = [_row(system, "attainment", rate, 1.0, None, None, share) for rate, share in by_rate]
    return lines + [_row(system, "attainment", load, scale, None, None, share) for scale, share in by_scale]


def _row(system: str, what: str, rate: object, scale: object, low: object, high: object, share: float) -> Row:
    """`low` and `high`: of the 95 % interval of the rate or the scale that was searched for."""
    return {
        "system": system,
        "what": what,
        "rate_per_s": rate,
        "slo_scale": scale,
        "low": low,
        "high": high,
        "ttft_attainment": share,
    }


def times(edges: Sequence[Edge], base: Sequence[Edge]) -> float:
    """How many times as high as `base`, seed by seed; not a number where a search found nothing."""
    return ratio(edges, base).value or float("nan")
