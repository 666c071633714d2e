"""How long does a newcomer wait for a running prefill to pull over, and what do the gates cost?

    python -m examples.blocking --model smollm2 --tokens 1024 --json out/blocking.json

1. Blocking: park requests at random moments of a prefill, at operator and at layer level, through the real executor.
   Beside it the mean that the operator times predict for a random moment: sum(d^2) / (2 sum(d)).
2. Cost of gates: nanoseconds a gate times gates, over the forward pass at 128 tokens; and by alternating forward
   passes with and without gates, with a confidence interval.
3. The event loop's lag while the executor computes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from engine.executor import Finished, park
from engine.gate import Gate
from engine.metrics import percentile
from examples.driving import Driver, describe, run, serving_threads
from examples.gate_cost import gate_nanoseconds, paired_overhead
from models.decoder import Model
from models.load import load_model
from scheduling.preempt import Preempt

PARKS_PER_FORWARD = 5
GATE_COST_TOKENS = 128  # a short prompt, where gates weigh most
TICK = 0.002  # seconds between looks at the loop's lag


class TimedGate(Gate):
    """Notes the moment of every boundary; otherwise the gate it stands before."""

    __slots__ = ("_gate", "_now", "times")

    def __init__(self, gate: Gate, driver: Driver) -> None:
        super().__init__(gate.level)
        self._gate = gate
        self._now = driver.clock.now
        self.times: list[tuple[str, float]] = []

    def operator(self, name: str) -> Gate:
        gate = self._gate.operator(name)
        self.times.append((name, self._now()))
        return gate


@dataclass(frozen=True, slots=True)
class Blocking:
    """Park request to reply, in milliseconds."""

    mean_ms: float
    max_ms: float
    n: int
    predicted_mean_ms: float


async def operator_times(driver: Driver, prompt: Sequence[int], repeats: int = 5) -> list[tuple[str, float]]:
    """(operator, seconds) from boundary to boundary, medians over repeats; the last is the head and sampling."""
    runs = []
    for _ in range(repeats):
        gate = TimedGate(driver.gate(), driver)
        drive = driver.prefill(prompt, gate)
        began = driver.clock.now()
        finished = await driver.drive(drive)
        moments = [began, *(time for _, time in gate.times), finished.time]
        runs.append([after - before for before, after in pairwise(moments)])
    names = [*(name for name, _ in gate.times), "head"]
    return list(zip(names, map(median, zip(*runs, strict=True)), strict=True))


def predicted_mean(times: Sequence[tuple[str, float]], level: Preempt) -> float:
    """Expected wait, in seconds, from a random moment to the next boundary where `level` may stop.

    A random moment falls in a stretch of length d with probability d / sum, and half of it remains on average.
    """
    stretches = [0.0]
    for operator, seconds in times:
        stretches[-1] += seconds
        if level.stops_at(operator):
            stretches.append(0.0)
    return sum(d * d for d in stretches) / (2 * sum(stretches))


async def measure_parks(
    driver: Driver, prompt: Sequence[int], level: Preempt, seconds: float, random: Random
) -> list[float]:
    """Drive one prefill of about `seconds` and ask it to park at random moments. Seconds from request to reply.

    The moments are uniform over its running time, one in each of PARKS_PER_FORWARD equal parts of it.
    """
    part = seconds / PARKS_PER_FORWARD
    moments = [(index + random.random()) * part for index in range(PARKS_PER_FORWARD)]
    blocked = []
    drive = driver.prefill(prompt, driver.gate(level))
    driver.start(drive)
    resumed, ran = driver.clock.now(), 0.0  # `ran`: running time up to `resumed`
    for moment in moments:
        await asyncio.sleep(max(0.0, moment - ran - (driver.clock.now() - resumed)))
        requested = driver.clock.now()
        park(drive)
        reply = await driver.reply()
        # A forward pass that was done before it was asked has nothing to tell; one that ended first blocked till then.
        if reply.time >= requested:
            blocked.append(reply.time - requested)
        if isinstance(reply, Finished):
            return blocked
        ran += reply.time - resumed
        driver.resume(drive)
        resumed = driver.clock.now()
    await driver.reply()
    return blocked


async def loop_lag(driver: Driver, prompt: Sequence[int], seconds: float) -> list[float]:
    """How late, in seconds, a coroutine that wants to run every TICK does run while the executor computes."""
    lags: list[float] = []

    async def tick() -> None:
        due = driver.clock.now()
        while True:
            due += TICK
            await asyncio.sleep(max(0.0, due - driver.clock.now()))
            late = driver.clock.now() - due
            lags.append(late)
            due += max(0.0, late)  # one late tick is not to make the next ones late too

    ticking = asyncio.ensure_future(tick())
    began = driver.clock.now()
    while driver.clock.now() < began + seconds:
        await driver.seconds(prompt)
    ticking.cancel()
    return lags


async def measure(
    model: Model, tokens: int, *, parks: int, pairs: int, lag_seconds: float, threads: int, seed: int
) -> dict[str, Any]:
    """All three measurements. Keys end with their unit; overheads are fractions."""
    random = Random(seed)
    driver = Driver(model, max(tokens, GATE_COST_TOKENS), threads=threads)
    prompt, short = driver.prompt(tokens), driver.prompt(GATE_COST_TOKENS)
    for _ in range(2):
        await driver.seconds(prompt)  # warm up

    times = await operator_times(driver, prompt)
    forward = sum(seconds for _, seconds in times)
    blocked: dict[Preempt, list[float]] = {Preempt.OPERATOR: [], Preempt.LAYER: []}
    while min(map(len, blocked.values())) < parks:
        for level, waits in blocked.items():  # in turn, so that a slow minute of the machine falls on both
            waits += await measure_parks(driver, prompt, level, forward, random)
    operator, layer = (
        Blocking(mean(waits) * 1e3, max(waits) * 1e3, len(waits), predicted_mean(times, level) * 1e3)
        for level, waits in blocked.items()
    )

    short_forward = median([await driver.seconds(short) for _ in range(10)])
    nanoseconds = await gate_nanoseconds(driver)
    paired = await paired_overhead(driver, short, pairs, random)
    lags = await loop_lag(driver, prompt, lag_seconds)
    await driver.close()
    return {
        "tokens": tokens,
        "threads": threads,
        "machine": describe(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "forward_ms": forward * 1e3,
        "operator": asdict(operator),
        "layer": asdict(layer),
        "ratio": layer.mean_ms / operator.mean_ms,
        "predicted_ratio": layer.predicted_mean_ms / operator.predicted_mean_ms,
        "gates": driver.gates,
        "gate_ns": nanoseconds,
        "gate_forward_ms": short_forward * 1e3,
        "gate_overhead": nanoseconds * 1e-9 * driver.gates / short_forward,
        "gate_overhead_paired": paired,
        "loop_lag_p50_ms": percentile(lags, 50) * 1e3,
        "loop_lag_p99_ms": percentile(lags, 99) * 1e3,
        "loop_lag_max_ms": max(lags) * 1e3,
    }


def summary(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    lines = [
        f"{result['model']}, {result['tokens']} tokens, {result['threads']} thread(s), {result['dtype']}: "
        f"a prefill takes {result['forward_ms']:,.0f} ms",
        "",
        f"{'blocking, ms':<16}{'mean':>8}{'predicted':>11}{'max':>8}{'n':>6}",
    ]
    for level in ("operator", "layer"):
        row = result[level]
        figures = f"{row['mean_ms']:>8.2f}{row['predicted_mean_ms']:>11.2f}{row['max_ms']:>8.2f}{row['n']:>6}"
        lines.append(f"{'  ' + level:<16}{figures}")
    paired = result["gate_overhead_paired"]
    lines += [
        f"{'  layer/operator':<16}{result['ratio']:>8.2f}{result['predicted_ratio']:>11.2f}",
        "",
        f"gates at {GATE_COST_TOKENS} tokens: {result['gates']} of {result['gate_ns']:.0f} ns in "
        f"{result['gate_forward_ms']:.1f} ms = {result['gate_overhead']:.4%}",
        f"  gated against gate-free, {paired['pairs']} pairs: {paired['median']:+.2%} "
        f"(95 % interval {paired['low']:+.2%} to {paired['high']:+.2%})",
        f"event loop's lag while computing: p50 {result['loop_lag_p50_ms']:.2f} ms, "
        f"p99 {result['loop_lag_p99_ms']:.2f} ms, max {result['loop_lag_max_ms']:.2f} ms",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024, help="prompt length (default %(default)s)")
    parser.add_argument("--parks", type=int, default=100, help="park requests at each level (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of gated and gate-free runs (default %(default)s)")
    parser.add_argument("--lag-seconds", type=float, default=5.0, help="of watching the loop (default %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of the executor (default: as when serving)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    for name in ("tokens", "parks", "pairs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    try:
        model = load_model(args.model, dtype=args.dtype, device=args.device)
    except ValueError as error:
        parser.error(str(error))
    threads = args.threads or serving_threads()
    sizes = {"parks": args.parks, "pairs": args.pairs, "lag_seconds": args.lag_seconds}
    result = {"model": args.model} | run(measure(model, args.tokens, threads=threads, seed=args.seed, **sizes))
    print(summary(result))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
