"""The highest value at which something still holds, where it need not hold below it: knees of attainment curves.

Attainment is not monotone in the load: a run with a little more of it may fare better by luck. So the search is this,
on a geometric grid of 16 steps to a doubling (4.4 % each), from a starting point:

1. Bracket: double while it holds, or halve until it does. 2. Bisect on the grid, until a point holds and the next does
not. 3. Look at the two points beyond that one. If either holds, go on from there, and look again.

What it finds is a point that was measured to hold and above which three neighbours were measured not to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean

from examples.confidence import interval

STEPS = 16  # of the grid, to a doubling
DOUBLINGS = 8  # how far from the start to look, up and down

Holds = Callable[[float], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Edge:
    """`value`: the highest that held, None if none did; `beyond`: the next of the grid, None if that was not tried."""

    value: float | None
    beyond: float | None


async def highest(holds: Holds, start: float) -> Edge:
    """Search from `start`, as the module says. `holds` is asked once for each point of the grid."""
    known: dict[int, bool] = {}
    limit = STEPS * DOUBLINGS

    def at(step: int) -> float:
        return float(start * 2 ** (step / STEPS))

    async def ask(step: int) -> bool:
        if step not in known:
            known[step] = await holds(at(step))
        return known[step]

    # 1.
    low = high = 0
    if await ask(0):
        while low == high:
            high = low + STEPS
            if high > limit:
                return Edge(at(low), None)
            if await ask(high):
                low = high
    else:
        while low == high:
            low = high - STEPS
            if low < -limit:
                return Edge(None, at(high))
            if not await ask(low):
                high = low
    while True:
        # 2.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await ask(middle) else (low, middle)
        # 3.
        beyond = (high + 1, high + 2)
        held = [step for step, held in zip(beyond, await asyncio.gather(*map(ask, beyond)), strict=True) if held]
        if not held:
            return Edge(at(low), at(high))
        low = held[-1]
        high = low + 1
        while await ask(high):
            low, high = high, high + 1
            if high > limit:
                return Edge(at(low), None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, on the scale of ratios, with its 95 % interval; None where a search found no such end."""

    value: float | None
    low: float | None
    high: float | None


def combine(edges: Sequence[Edge]) -> Estimate:
    """One search for each seed. The interval covers the differences between seeds and the step of the grid."""
    values = [edge.value for edge in edges if edge.value is not None]
    if len(values) < len(edges):  # for some seed nothing held
        return Estimate(None, None, max(edge.beyond for edge in edges if edge.beyond is not None))
    logs = [log(value) for value in values]
    middle, low, high = (exp(value) for value in (mean(logs), *interval(logs)))
    if any(edge.beyond is None for edge in edges):  # for some seed everything held
        return Estimate(middle, low, None)
    return Estimate(middle, low, max(high, exp(mean(log(edge.beyond or 0.0) for edge in edges))))


def ratio(edges: Sequence[Edge], base: Sequence[Edge]) -> Estimate:
    """How many times as high as `base`, seed by seed: the same arrivals, so what they have in common falls out."""
    pairs = [(a.value, b.value) for a, b in zip(edges, base, strict=True)]
    logs = [log(a / b) for a, b in pairs if a is not None and b is not None]
    if len(logs) < len(pairs):
        return Estimate(None, None, None)
    low, high = interval(logs)
    return Estimate(exp(mean(logs)), exp(low), exp(high))
