"""What the gates of a forward pass cost: each by itself, and all of them beside a forward pass without any."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from random import Random
from statistics import median
from time import perf_counter_ns
from typing import Any

from engine.gate import Gate
from examples.driving import Driver


class NoGate(Gate):
    """What the forward pass awaits where there is no gate: nothing, at the least cost a call can have."""

    __slots__ = ()

    def operator(self, name: str) -> Gate:
        return self

    def __await__(self) -> Generator[None]:
        return iter(())  # type: ignore[return-value]


async def gate_nanoseconds(driver: Driver, repeats: int = 20_000) -> float:
    """What one `await gate.operator(name)` costs on the executor's thread, loop overhead taken off. Best of five."""

    async def gated() -> int:
        gate = driver.gate()
        began = perf_counter_ns()
        for _ in range(repeats):
            await gate.operator("qkv_proj")
        return perf_counter_ns() - began

    async def empty() -> int:
        began = perf_counter_ns()
        for _ in range(repeats):
            pass
        return perf_counter_ns() - began

    with_gates = [await driver.call(gated()) for _ in range(5)]
    without = [await driver.call(empty()) for _ in range(5)]
    return (min(with_gates) - min(without)) / repeats


async def paired_overhead(driver: Driver, prompt: Sequence[int], pairs: int, random: Random) -> dict[str, Any]:
    """Gated against gate-free forward passes, alternating in random order: median of the pairs' ratios, less one.

    The interval is a 95 % bootstrap one of that median: other work on the machine makes outliers, not normal noise.
    """
    ratios = []
    for _ in range(pairs):
        seconds = {}
        for gated in random.sample((True, False), 2):
            seconds[gated] = await driver.seconds(prompt, driver.gate() if gated else NoGate())
        ratios.append(seconds[True] / seconds[False])
    medians = sorted(median(random.choices(ratios, k=pairs)) for _ in range(2000))
    low, high = medians[49], medians[1949]
    return {"median": median(ratios) - 1, "low": low - 1, "high": high - 1, "pairs": pairs}
