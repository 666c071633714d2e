"""A model on a device: how long its forward passes take, from the operators' costs and the device's figures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from engine.course import Leg
from engine.hardware import DeviceSpec
from models.costs import ModelCosts, Volume


@dataclass(frozen=True, slots=True)
class Roofline:
    """A `Timing` (engine/simulated.py). Under tensor parallelism all ranks take the same time, and are one device."""

    costs: ModelCosts
    device: DeviceSpec

    def before(self, volume: Volume) -> float:
        return self.device.step + self.device.seconds(self.costs.embed, volume)

    def legs(self, first: int, last: int, volume: Volume) -> list[Leg]:
        legs = []
        for layers, operators in self.costs.stretches(first, last):
            seconds = (self.device.seconds(operator, volume, self.costs.tp) for operator in operators)
            legs.append(Leg(layers, tuple(operator.name for operator in operators), tuple(accumulate(seconds))))
        return legs

    def after(self, volume: Volume) -> float:
        return self.device.seconds(self.costs.head, Volume(volume.drawn)) if volume.drawn else 0.0

    def hand_over(self, tokens: int) -> float:
        return self.device.transfer(tokens * self.costs.kv_bytes_per_token)
