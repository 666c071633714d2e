"""What Layered Prefill's figures share: Qwen3-30B-A3B on two H100, prefills and decodes on one instance, simulated.

Its targets (table 5) are not published in numbers. TBT follows its rule: five times a decode step of 32 requests with
4,096 tokens of context each. TTFT is our choice: 10 s on arXiv, 5 s on ShareGPT. A request meets TBT if its p99 gap
does. The device was fitted to runs of chunked prefill alone (examples/calibrate.py, calibrate_serving.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Final

import numpy as np

from engine.counters import Account, Counters
from engine.deployment import Deployment
from engine.energy import joules
from engine.metrics import Row, percentile
from engine.simulation import simulate
from engine.timing import pass_seconds
from examples.backends import simulated_arrival
from examples.figures.workers import Workers
from examples.token_gaps import TokenGaps
from examples.workload import at_rate, open_workload
from models.costs import Volume
from scheduling.presets import System, preset
from scheduling.request import SLO

MODEL, DENSE = "qwen3-30b-a3b", "qwen3-8b"
CHUNKED, LAYERED = "sarathi", "layered"  # chunks of 512 tokens; groups of layers with 512 tokens' worth of work
SETTING: Final = "Qwen3-30B-A3B on 2 H100 (TP2), simulated"
SEEDS: Final = (0, 1, 2)
REQUESTS: Final = 300  # a run
TTFT: Final = {"arxiv": 10.0, "sharegpt": 5.0}  # targets, seconds
SOURCES: Final = {"arxiv": "arXiv", "sharegpt": "ShareGPT"}


def deployment(model: str = MODEL) -> Deployment:
    return Deployment(model, "h100-80g-nano-vllm", tp=2)


def targets(source: str, model: str = MODEL) -> SLO:
    """As the module says."""
    where = deployment(model)
    one = Volume.of(4095, 1, 1)
    step = pass_seconds(where.timing, where.config.num_layers, sum([one] * 31, one))
    return SLO(TTFT[source], 5 * step)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: so many requests of one seed, against one system at one rate."""

    system: System
    source: str  # of the requests: a generator of examples/workload.py
    rate: float  # requests per second
    requests: int
    seed: int
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class Served:
    """How a trial went. `gaps`: seconds between the tokens of all requests."""

    rows: Sequence[Row]
    gaps: np.ndarray
    counters: Counters
    decode_batch: float  # rows in a pass that decodes, on average
    seconds: float


def serve(trial: Trial) -> Served:
    """In virtual time, until the last request has ended. Any process can do it."""
    workload = open_workload(trial.source)
    drawn = at_rate(workload.draw(trial.requests, seed=trial.seed), workload, trial.rate)
    slo = targets(trial.source, trial.model)
    arrivals = [replace(simulated_arrival(each), slo=slo) for each in drawn]
    books, gaps = Account(), TokenGaps()
    rows = simulate(trial.system, arrivals, deployment(trial.model), sinks=[books, gaps], counters=True)
    return Served(rows.rows, np.array(gaps.seconds), books.total, books.mean_decode_batch, rows.results().seconds)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system at one rate, over all seeds: figures of requests and gaps are over all of them, others are means."""

    runs: Sequence[Served]
    model: str

    @property
    def rows(self) -> list[Row]:
        return [row for run in self.runs for row in run.rows]

    @property
    def ttfts(self) -> list[float]:
        return [row.ttft for row in self.rows if row.ttft is not None]

    @property
    def ttft(self) -> float:
        """Mean, in seconds."""
        return mean(self.ttfts)

    @property
    def ttft_p99(self) -> float:
        return percentile(self.ttfts, 99)

    @property
    def latency(self) -> float:
        """Mean, in seconds, from arrival to the last token."""
        return mean(row.ended - row.arrival for row in self.rows if row.ended is not None)

    @property
    def gaps(self) -> np.ndarray:
        return np.concatenate([run.gaps for run in self.runs])

    @property
    def tbt(self) -> float:
        """Mean, in seconds."""
        return float(self.gaps.mean())

    @property
    def tbt_p99(self) -> float:
        """Of all gaps, in seconds."""
        return float(np.percentile(self.gaps, 99))

    @property
    def attainment(self) -> float:
        """The share of requests that meet both targets."""
        return mean(row.meets is True for row in self.rows)

    @property
    def expert_bytes(self) -> float:
        """Loaded for one request, decodes included."""
        return sum(run.counters.expert_bytes for run in self.runs) / len(self.rows)

    @property
    def energy(self) -> float:
        """Joules for each token, of prompts and outputs."""
        where = deployment(self.model)
        total = sum(joules(where.device, where.tp, run.seconds, run.counters) for run in self.runs)
        return total / sum(row.prompt_tokens + row.output_tokens for row in self.rows)

    @property
    def decode_batch(self) -> float:
        return mean(run.decode_batch for run in self.runs)


async def outcome(
    workers: Workers,
    system: System,
    source: str,
    rate: float,
    *,
    requests: int = REQUESTS,
    seeds: Sequence[int] = SEEDS,
    model: str = MODEL,
) -> Outcome:
    """The same requests for every system and rate, seed by seed."""
    trials = [Trial(system, source, rate, requests, seed, model) for seed in seeds]
    return Outcome(await asyncio.gather(*(workers(serve, trial) for trial in trials)), model)


async def both(workers: Workers, source: str, rate: float, **options: Any) -> tuple[Outcome, Outcome]:
    """Chunked and layered, side by side; `options` are those of `outcome`."""
    systems = [outcome(workers, preset(name), source, rate, **options) for name in (CHUNKED, LAYERED)]
    chunked, layered = await asyncio.gather(*systems)
    return chunked, layered


def change(before: float, after: float) -> float:
    """-0.4 where it has fallen by 40 %."""
    return after / before - 1
