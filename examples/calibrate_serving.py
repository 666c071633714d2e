"""Fit what only serving shows, to Layered Prefill's chunked runs: how fast decodes are replayed, and the energy.

    python -m examples.calibrate_serving

Prefills are fitted by examples.calibrate. The three figures here are fitted to rows of chunked prefill on arXiv; no run
with layers in groups, neither a published nor a simulated one, had a part in them:

- decode_launch, to the 6.6 s that a request decodes at chunks of 512 tokens and 1.3 requests a second (table 6: 9.4 s
  from end to end, less 2.8 s to the first token);
- static_watts and joules_per_flop, to the energy per token at 512 tokens and 1.3 a second (60.2 mJ in table 2, 56.6 mJ
  in table 8) and at 2,048 tokens and 2.6 a second (32.4 mJ). A byte's energy is from the literature: these rows cannot
  tell it from the static power.

engine/hardware.py holds the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from engine.counters import Account, Counters
from engine.energy import joules
from engine.hardware import DEVICES, DeviceSpec
from engine.simulation import Deployment, simulate
from examples.backends import simulated_arrival
from examples.command import Parser
from examples.workload import at_rate, open_workload
from scheduling.batch import FillChunks
from scheduling.order import FCFS
from scheduling.placement import Piggyback
from scheduling.plan import Chunked
from scheduling.preempt import Preempt
from scheduling.presets import System

MODEL, TP, DEVICE = "qwen3-30b-a3b", 2, "h100-80g-nano-vllm"
SEEDS, REQUESTS = (0, 1, 2), 300
DECODE_SECONDS = 9.4 - 2.80


@dataclass(frozen=True, slots=True)
class Row:
    """A published run of chunked prefill on arXiv. Energies in joules per token, prompt and output."""

    chunk: int
    rate: float
    energies: tuple[float, ...]
    expert_gb: float  # a request, of prefills and decodes


ROWS = (Row(512, 1.3, (60.2e-3, 56.6e-3), 955), Row(2048, 2.6, (32.4e-3,), 304))


@dataclass(frozen=True, slots=True)
class Served:
    """Means over the seeds; `counters`, `seconds` and `tokens` are sums."""

    decode_seconds: float  # of a request
    expert_gb: float
    seconds: float
    tokens: int
    counters: Counters


def serve(chunk: int, rate: float, device: DeviceSpec) -> Served:
    system = System(FCFS(), FillChunks(chunk), Chunked(chunk), Preempt.SLICE, Piggyback())
    workload = open_workload("arxiv")
    counters, seconds, rows = Counters(), 0.0, []
    for seed in SEEDS:
        arrivals = map(simulated_arrival, at_rate(workload.draw(REQUESTS, seed=seed), workload, rate))
        books = Account()
        run = simulate(system, arrivals, Deployment(MODEL, device, TP), sinks=[books], counters=True)
        counters, seconds = counters + books.total, seconds + run.results().seconds
        rows += run.rows
    return Served(
        mean((row.ended or 0.0) - (row.first_token or 0.0) for row in rows),
        counters.expert_bytes / len(rows) / 1e9,
        seconds,
        sum(row.prompt_tokens + row.output_tokens for row in rows),
        counters,
    )


def fit_decode_launch(device: DeviceSpec) -> DeviceSpec:
    """By the secant method: decodes get slower with it in a nearly straight line."""
    row = ROWS[0]

    def late(launch: float) -> float:
        return serve(row.chunk, row.rate, replace(device, decode_launch=launch)).decode_seconds - DECODE_SECONDS

    before, now = 2e-6, 4e-6
    error_before = late(before)
    for _ in range(3):
        error = late(now)
        before, now, error_before = now, now - error * (now - before) / (error - error_before), error
    return replace(device, decode_launch=now)


def fit_energy(device: DeviceSpec, served: Sequence[Served]) -> DeviceSpec:
    """Least squares; with two runs, through the mean energy of each."""
    per_byte = device.joules_per_byte
    terms = [[TP * one.seconds / one.tokens, one.counters.flops / one.tokens] for one in served]
    left = [
        mean(row.energies) - per_byte * one.counters.bytes / one.tokens for row, one in zip(ROWS, served, strict=True)
    ]
    watts, per_flop = np.linalg.lstsq(np.array(terms), np.array(left), rcond=None)[0]
    return replace(device, static_watts=float(watts), joules_per_flop=float(per_flop))


def main(argv: Sequence[str] | None = None) -> None:
    Parser("calibrate_serving", __doc__).parse_args(argv)  # --help, and no other option
    kept = DEVICES[DEVICE]
    fitted = fit_decode_launch(kept)
    served = [serve(row.chunk, row.rate, fitted) for row in ROWS]
    fitted = fit_energy(fitted, served)
    for name in ("decode_launch", "static_watts", "joules_per_flop"):
        print(f"{name:>16}  fitted {getattr(fitted, name):.4g}  kept {getattr(kept, name):.4g}")
    print(f"\n{'chunk':>6}  {'rate':>4}  {'energy, mJ a token':>24}  {'experts, GB a request (held out)':>34}")
    for row, one in zip(ROWS, served, strict=True):
        energy = 1e3 * joules(fitted, TP, one.seconds, one.counters) / one.tokens
        theirs = " and ".join(f"{1e3 * value:.1f}" for value in row.energies)
        print(
            f"{row.chunk:>6}  {row.rate:>4}  {theirs:>16} {energy:>7.1f}  {row.expert_gb:>26.0f} {one.expert_gb:>7.0f}"
        )


if __name__ == "__main__":
    main()
