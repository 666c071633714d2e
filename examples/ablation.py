"""Carry out an ablation: its grid of runs, and the searches for knees and for the tightest SLOs, all side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from engine.simulation import Deployment
from examples.experiment import Live, Load, Run, Variant, code_digest, describe
from examples.findings import Findings
from examples.results import ATTAINMENT, Metric, Record
from examples.runner import Runner
from examples.search import Edge, Estimate, combine, highest, ratio

AROUND = (0.5, 0.71, 1.0, 1.41, 2.0)  # of a knee: where to measure the curve through it


@dataclass(frozen=True, slots=True)
class Ablation:
    """All that is asked for. The first system is the one that others are compared with."""

    variants: Sequence[Variant]
    backend: Deployment | Live
    load: Load
    rates: Sequence[float]
    slo_scales: Sequence[float]
    seeds: Sequence[int]
    metric: Metric
    knee: float | None = None  # an attainment
    min_slo: float | None = None  # an attainment

    def run(self, variant: Variant, rate: float, slo_scale: float, seed: int) -> Run:
        return Run(variant, self.backend, self.load, rate, slo_scale, seed)

    @property
    def config(self) -> dict[str, Any]:
        """What the figures depend on, in words."""
        return {
            "systems": {variant.name: describe(variant.system) for variant in self.variants},
            "backend": repr(self.backend),
            "load": repr(self.load),
            "rates": list(self.rates),
            "slo_scales": list(self.slo_scales),
            "seeds": list(self.seeds),
            "metric": self.metric,
            "knee": self.knee,
            "min_slo": self.min_slo,
            "code": code_digest(),
        }


async def carry_out(ablation: Ablation, runner: Runner) -> Findings:
    """`ablation.rates` may be empty if there is something to search for."""
    grid = product(ablation.slo_scales, ablation.rates, ablation.variants, ablation.seeds)
    runs = [ablation.run(variant, rate, scale, seed) for scale, rate, variant, seed in grid]
    searches = asyncio.gather(search_knees(ablation, runner), search_slos(ablation, runner))
    (knees, min_slo), _ = await asyncio.gather(searches, asyncio.gather(*map(runner, runs)))
    names = [variant.name for variant in ablation.variants]

    def place(record: Record) -> tuple[Any, ...]:
        return record["slo_scale"], record["rate"], names.index(record["system"]), record["seed"]

    return Findings(
        config=ablation.config,
        metric=ablation.metric,
        systems=names,
        rates=ablation.rates,
        slo_scales=ablation.slo_scales,
        seeds=ablation.seeds,
        runs=sorted(runner.records.values(), key=place),
        knees=knees,
        min_slo=min_slo,
    )


async def search_knees(ablation: Ablation, runner: Runner) -> list[Record]:
    """For each SLO scale and system the highest rate with enough attainment."""
    if ablation.knee is None:
        return []
    start = ablation.rates[0] if ablation.rates else ablation.load.workload().rate
    search = Search(ablation, runner, ablation.knee, lambda v, scale, rate, seed: ablation.run(v, rate, scale, seed))
    return [
        {"system": name, "slo_scale": scale, "rate": knee.value, "low": knee.low, "high": knee.high, **times(ratio)}
        for name, scale, knee, ratio in await search(ablation.slo_scales, start)
    ]


async def search_slos(ablation: Ablation, runner: Runner) -> list[Record]:
    """For each rate and system the tightest SLO scale with enough attainment; `times` as tight as the first system's.
    What is searched upwards is tightness, 1 / scale."""
    if ablation.min_slo is None:
        return []
    start = 1 / ablation.slo_scales[0]
    search = Search(ablation, runner, ablation.min_slo, lambda v, rate, x, seed: ablation.run(v, rate, 1 / x, seed))

    def scale(tightness: float | None) -> float | None:
        return None if tightness is None else 1 / tightness

    return [
        {
            "system": name,
            "rate": rate,
            "slo_scale": scale(tight.value),
            "low": scale(tight.high),
            "high": scale(tight.low),
            **times(ratio),
        }
        for name, rate, tight, ratio in await search(ablation.rates, start)
    ]


@dataclass(frozen=True, slots=True)
class Search:
    """For each setting and system the highest value at which `run(system, setting, value, seed)` attains `target`: a
    search for each seed, all of them at once. Around what they find together all seeds are run, for a curve to show."""

    ablation: Ablation
    runner: Runner
    target: float
    run: Callable[[Variant, float, float, int], Run]

    async def __call__(self, settings: Sequence[float], start: float) -> list[tuple[str, float, Estimate, Estimate]]:
        """(system, setting, value with its interval over seeds, value over the first system's)."""
        variants, seeds = self.ablation.variants, self.ablation.seeds
        keys = list(product(settings, variants, seeds))
        edges = iter(await asyncio.gather(*(self._edge(*key, start) for key in keys)))
        found, around = [], []
        for setting in settings:
            of = [[next(edges) for _ in seeds] for _ in variants]
            for variant, mine in zip(variants, of, strict=True):
                estimate = combine(mine)
                found.append((variant.name, setting, estimate, ratio(mine, of[0])))
                if estimate.value is not None:
                    values = [estimate.value * factor for factor in AROUND]
                    around += [self.run(variant, setting, value, seed) for value in values for seed in seeds]
        await asyncio.gather(*map(self.runner, around))
        return found

    async def _edge(self, setting: float, variant: Variant, seed: int, start: float) -> Edge:
        async def holds(value: float) -> bool:
            record = await self.runner(self.run(variant, setting, value, seed))
            attained = record[ATTAINMENT[self.ablation.metric]]
            return attained is not None and bool(attained >= self.target)

        return await highest(holds, start)


def times(ratio: Estimate) -> Record:
    return {"times": ratio.value, "times_low": ratio.low, "times_high": ratio.high}
