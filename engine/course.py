"""A forward pass as cumulative time: when it passes which boundary, and where it can stop next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.preempt import Preempt


@dataclass(frozen=True, slots=True)
class Leg:
    """Consecutive layers that take the same time. `ends[i]`: when operator i of a layer ends, from the layer's start,
    in seconds."""

    layers: int
    operators: tuple[str, ...]
    ends: Sequence[float]

    @property
    def seconds(self) -> float:
        return self.layers * self.ends[-1]

    @property
    def boundaries(self) -> int:
        return self.layers * len(self.ends)


@dataclass(frozen=True, slots=True)
class Course:
    """The whole pass: `before` the first layer, its layers, and `after` the last. Boundaries count from 1, as gates do.

    Nothing here walks over layers: finding a boundary takes a division and a search in one layer's operators.
    """

    before: float
    legs: tuple[Leg, ...]
    after: float

    @property
    def seconds(self) -> float:
        return self.before + sum(leg.seconds for leg in self.legs) + self.after

    @property
    def boundaries(self) -> int:
        return sum(leg.boundaries for leg in self.legs)

    def passed(self, elapsed: float) -> int:
        """Boundaries passed after so many seconds."""
        passed, left = 0, elapsed - self.before
        for leg in self.legs:
            if left < leg.seconds:
                if left < 0:
                    return passed
                layer = min(int(left / leg.ends[-1]), leg.layers - 1)
                return passed + layer * len(leg.ends) + bisect_right(leg.ends, left - layer * leg.ends[-1])
            passed += leg.boundaries
            left -= leg.seconds
        return passed

    def find(self, boundary: int) -> tuple[float, str]:
        """When it is reached, in seconds from the start, and the operator that it stands behind."""
        time, left = self.before, boundary - 1
        for leg in self.legs:
            if left < leg.boundaries:
                layer, operator = divmod(left, len(leg.ends))
                return time + layer * leg.ends[-1] + leg.ends[operator], leg.operators[operator]
            left -= leg.boundaries
            time += leg.seconds
        raise ValueError(f"the pass has {self.boundaries} boundaries, there is no boundary {boundary}")

    def next_stop(self, passed: int, level: Preempt) -> int | None:
        """The first boundary behind the `passed` ones at which a drive of this level may be parked, if there is one."""
        first = 0
        for leg in self.legs:
            size = len(leg.ends)
            start = max(passed - first, 0)
            # The level looks at the operator's name alone, so one layer's worth of boundaries tells for all layers.
            for boundary in range(start, min(start + size, leg.boundaries)):
                if level.stops_at(leg.operators[boundary % size]):
                    return first + boundary + 1
            first += leg.boundaries
        return None


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps one after the other: the first takes `step` seconds after `moves` seconds of copying, and each one
    `growth` longer than the one before it, as contexts grow."""

    moves: float
    step: float
    growth: float
    count: int

    def end_of(self, number: int) -> float:
        """When step `number` (from 1) ends, in seconds from the start."""
        return self.moves + number * self.step + self.growth * number * (number - 1) / 2

    @property
    def seconds(self) -> float:
        return self.end_of(self.count)

    def under_way(self, elapsed: float) -> int:
        """The number of the step that runs after so many seconds. The moment a step ends belongs to the next one."""
        ended = bisect_right(range(1, self.count + 1), elapsed, key=self.end_of)
        return min(ended + 1, self.count)
