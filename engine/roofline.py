"""A model on a device: how long its forward passes take, from the operators' costs and the device's figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

from engine.course import Leg
from engine.hardware import DeviceSpec
from models.costs import ModelCosts, Volume

Seconds = Callable[[Volume], float]


class Roofline:
    """A `Timing` (engine/timing.py). Under tensor parallelism all ranks take the same time, and are one device."""

    def __init__(self, costs: ModelCosts, device: DeviceSpec) -> None:
        self.costs = costs
        self.device = device
        self._embed = device.seconds_of(costs.embed)
        self._head = device.seconds_of(costs.head)
        self._stretches = lru_cache(maxsize=1024)(self._timed_stretches)  # few layer ranges, asked for at every drive

    def before(self, volume: Volume) -> float:
        return self.device.step + self._embed(volume)

    def legs(self, first: int, last: int, *volumes: Volume) -> list[Leg]:
        together = volumes[0] if len(volumes) == 1 else sum(volumes[1:], volumes[0])
        legs = []
        for layers, names, operators in self._stretches(first, last):
            seconds = [sum(map(of, volumes)) if apart else of(together) for of, apart in operators]
            legs.append(Leg(layers, names, tuple(accumulate(seconds))))
        return legs

    def after(self, volume: Volume) -> float:
        return self._head(Volume(volume.drawn)) if volume.drawn else 0.0

    def hand_over(self, tokens: int) -> float:
        return self.device.transfer(tokens * self.costs.kv_bytes_per_token)

    def slowdown(self, volume: Volume) -> float:
        """None: every instance has devices of its own."""
        return 1.0

    def _timed_stretches(self, first: int, last: int) -> list[tuple[int, tuple[str, ...], list[tuple[Seconds, bool]]]]:
        """Alike layers of [first, last): how many, their operators' names, how long each of these takes, and whether it
        computes prefills and decodes apart, as attention does."""
        return [
            (
                layers,
                tuple(one.name for one in operators),
                [(self.device.seconds_of(one, self.costs.tp), one.flops_per_pair > 0) for one in operators],
            )
            for layers, operators in self.costs.stretches(first, last)
        ]
