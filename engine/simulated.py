"""An executor without a forward pass: it adds up what the operators cost, and lets that much virtual time pass.

It takes the same work, parks at the boundary where the real one would, and gives the same replies. A drive costs a few
timers, not one for each operator: where it stops is found in the cumulative cost of its operators. Tokens are all 0.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.executor import Drive, Finished, OnReply, Parked
from engine.gate import Gate
from engine.sampling import Sampled
from engine.virtual import VirtualLoop
from engine.work import Computed, Part, Work
from models.costs import Load
from scheduling.predictor import attention_pairs
from scheduling.preempt import Preempt

_TOKEN = Sampled(0)


class Timing(Protocol):
    """How long one model's forward passes take on one device, in seconds."""

    operators: tuple[str, ...]

    def before(self, load: Load) -> float:
        """From the start of a drive to its first layer: the host's work on a step, the embedding."""
        ...

    def layer(self, load: Load) -> Sequence[float]:
        """Of each operator of one layer."""
        ...

    def after(self, load: Load) -> float:
        """From the last layer to the reply: final norm, head, draws."""
        ...

    def transfer(self, tokens: int) -> float:
        """To copy the K and V of so many tokens here from the device of a prefill instance."""
        ...


@dataclass(frozen=True, slots=True)
class Leg:
    """Consecutive layers crossed with the same rows. `ends`: when each operator of a layer ends, from its start on."""

    layers: int
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.layers * self.ends[-1]


@dataclass(frozen=True, slots=True)
class Course:
    """The whole forward pass as cumulative cost. Boundaries count from 1, as gates do; `passed` of 0 is none."""

    before: float
    legs: tuple[Leg, ...]
    after: float

    @property
    def seconds(self) -> float:
        return self.before + sum(leg.seconds for leg in self.legs) + self.after

    def time_of(self, boundary: int) -> float:
        """Seconds from the start to a boundary."""
        time = self.before
        for leg in self.legs:
            size = leg.layers * len(leg.ends)
            if boundary <= size:
                layer, operator = divmod(boundary - 1, len(leg.ends))
                return time + layer * leg.ends[-1] + leg.ends[operator]
            boundary -= size
            time += leg.seconds
        raise ValueError("the course has fewer boundaries than that")

    def passed(self, elapsed: float) -> int:
        """Boundaries passed after so many seconds."""
        passed, time = 0, elapsed - self.before
        for leg in self.legs:
            if time < leg.seconds:
                layer = max(0, min(int(time / leg.ends[-1]), leg.layers - 1))
                return passed + layer * len(leg.ends) + bisect_right(leg.ends, time - layer * leg.ends[-1])
            passed += leg.layers * len(leg.ends)
            time -= leg.seconds
        return passed


class SimulatedGate(Gate):
    """Tells its drive at once of a request to park: no operator comes by to look."""

    __slots__ = ("_park_requested", "on_request")

    def __init__(self, level: Preempt) -> None:
        self.on_request: Callable[[], None] = lambda: None
        super().__init__(level)

    @property
    def park_requested(self) -> bool:  # type: ignore[override]
        return self._park_requested

    @park_requested.setter
    def park_requested(self, value: bool) -> None:
        self._park_requested = value
        if value:
            self.on_request()


@dataclass(eq=False, slots=True)
class SimulatedDrive(Drive):
    """`elapsed` seconds of it had passed at the moment `since`, when it last began to move (None: it stands)."""

    course: Course = Course(0.0, (), 0.0)
    now: Callable[[], float] = lambda: 0.0
    elapsed: float = 0.0
    since: float | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def progress(self) -> float:
        """Seconds of it that have passed."""
        return self.elapsed if self.since is None else self.elapsed + self.now() - self.since

    @property
    def done(self) -> float:
        if self.since is None:
            return self.gate.passed / self.boundaries
        return self.course.passed(self.progress) / self.boundaries


class SimulatedExecutor:
    """One simulated device. `timing` says how long things take."""

    def __init__(self, loop: VirtualLoop, timing: Timing) -> None:
        self.on_reply: OnReply = lambda reply: None
        self._loop = loop
        self._timing = timing

    def prepare(self, drive: int, work: Work, preempt: Preempt) -> SimulatedDrive:
        boundaries = work.layers_crossed * len(self._timing.operators)
        prepared = SimulatedDrive(
            drive, None, SimulatedGate(preempt), boundaries, work, course=self._course(work), now=self._loop.now
        )
        prepared.gate.on_request = lambda: self._on_request(prepared)
        return prepared

    def start(self, drive: Drive) -> None:
        assert isinstance(drive, SimulatedDrive)
        drive.since = self._loop.now()
        drive.timer = self._loop.call_later(drive.course.seconds - drive.elapsed, self._finish, drive)

    def resume(self, drive: Drive) -> None:
        drive.gate.park_requested = False
        self.start(drive)

    async def ready(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)

    def _course(self, work: Work) -> Course:
        prefill, decode = load_of(work.prefill), load_of(work.decode)
        both = prefill + decode
        layers = [(work.last - work.first if work.prefill else 0, both)]
        if work.decode:
            layers = [(work.first, decode), *layers, (work.layers - work.last, decode)]
        legs = tuple(Leg(count, _cumulative(self._timing.layer(load))) for count, load in layers if count)
        return Course(self._timing.before(both), legs, self._timing.after(both))

    def _on_request(self, drive: SimulatedDrive) -> None:
        """Find the first boundary ahead where the drive's level lets it stop; there may be none before its end."""
        if drive.since is None:
            return
        boundary = max(drive.course.passed(drive.progress), drive.gate.passed) + 1
        operators = self._timing.operators
        while boundary <= drive.boundaries and not drive.gate.level.stops_at(
            operators[(boundary - 1) % len(operators)]
        ):
            boundary += 1
        if boundary > drive.boundaries:
            return
        assert drive.timer is not None
        drive.timer.cancel()
        wait = drive.course.time_of(boundary) - drive.progress
        drive.timer = self._loop.call_later(max(0.0, wait), self._park, drive, boundary)

    def _park(self, drive: SimulatedDrive, boundary: int) -> None:
        operators = self._timing.operators
        drive.since, drive.elapsed = None, drive.course.time_of(boundary)
        drive.gate.passed, drive.gate.last = boundary, operators[(boundary - 1) % len(operators)]
        self.on_reply(Parked(drive.id, self._loop.now()))

    def _finish(self, drive: SimulatedDrive) -> None:
        assert drive.work is not None
        drive.since, drive.elapsed = None, drive.course.seconds
        drive.gate.passed = drive.boundaries
        work = drive.work
        computed = Computed(
            tuple((_TOKEN,) * len(part.draws) for part in work.prefill),
            tuple((_TOKEN,) * len(part.draws) for part in work.decode),
        )
        self.on_reply(Finished(drive.id, self._loop.now(), computed))


def load_of(parts: Sequence[Part]) -> Load:
    return Load(
        rows=sum(len(part.tokens) for part in parts),
        pairs=sum(attention_pairs(part.context, len(part.tokens)) for part in parts),
        keys=sum(part.context + len(part.tokens) for part in parts),
        drawn=sum(1 for part in parts if part.draws),
    )


def _cumulative(seconds: Sequence[float]) -> tuple[float, ...]:
    total, ends = 0.0, []
    for each in seconds:
        total += each
        ends.append(total)
    return tuple(ends)
