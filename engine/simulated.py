"""An executor without a forward pass: it adds up what the operators cost, and lets that much virtual time pass.

It takes the same work as the others, parks at the boundary where the real one would, and gives the same replies. A
drive costs a timer or two, not one for each operator: where it stops is found in its cumulative cost
(engine/course.py). Consecutive decode steps of the same choices are run in one go. Tokens are all 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.counters import Counters
from engine.counting import Counting
from engine.course import Course, Leg, Steps
from engine.executor import Drive, Finished, OnReply, Parked
from engine.gate import Gate
from engine.sampling import Sampled
from engine.virtual import VirtualLoop
from engine.work import Computed, Repeated, Stretch, Work, volume
from models.costs import Volume
from scheduling.preempt import Preempt

_TOKEN = Sampled(0)


class Timing(Protocol):
    """How long one model's forward passes take on one device, in seconds."""

    def before(self, volume: Volume) -> float:
        """From the start of a drive to its first layer: the host's work on a step, the embedding."""
        ...

    def legs(self, first: int, last: int, volume: Volume) -> list[Leg]:
        """The layers [first, last)."""
        ...

    def after(self, volume: Volume) -> float:
        """From the last layer to the reply: final norm, head, draws."""
        ...

    def hand_over(self, tokens: int) -> float:
        """To copy the K and V of so many tokens from the device of a prefill instance to that of a decode instance."""
        ...


def pass_seconds(timing: Timing, num_layers: int, volume: Volume) -> float:
    """Of one forward pass in which all rows cross all layers."""
    layers = sum(leg.seconds for leg in timing.legs(0, num_layers, volume))
    return timing.before(volume) + layers + timing.after(volume)


class SimulatedGate(Gate):
    """Tells its drive at once of a request to park: no operator comes by to look."""

    __slots__ = ("_park_requested", "on_request")

    def __init__(self, level: Preempt) -> None:
        self.on_request: Callable[[], None] = lambda: None
        super().__init__(level)

    @property
    def park_requested(self) -> bool:
        return self._park_requested

    @park_requested.setter
    def park_requested(self, value: bool) -> None:
        self._park_requested = value
        if value:
            self.on_request()


@dataclass(eq=False, slots=True, kw_only=True)
class SimulatedDrive(Drive):
    """`elapsed` seconds of it had passed when it began to move, or `since` then if it moves now."""

    course: Course | Steps
    now: Callable[[], float]
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
        if isinstance(self.course, Steps):
            return self.progress / self.course.seconds
        return self.course.passed(self.progress) / self.boundaries


class SimulatedExecutor:
    """One device, real or a group under tensor parallelism, on which `timing` says how long things take. `counting`: to
    count what they read, too."""

    repeats = True

    def __init__(self, loop: VirtualLoop, timing: Timing, counting: Counting | None = None) -> None:
        self.on_reply: OnReply = lambda reply: None
        self._loop = loop
        self._timing = timing
        self._counting = counting

    def prepare(self, drive: int, work: Work, preempt: Preempt) -> SimulatedDrive:
        course = self._course(work) if work.repeated is None else self._steps(work, work.repeated)
        boundaries = 1 if isinstance(course, Steps) else course.boundaries
        gate = SimulatedGate(preempt)
        prepared = SimulatedDrive(drive, None, gate, boundaries, work, course=course, now=self._loop.now)
        gate.on_request = lambda: self._on_request(prepared)
        return prepared

    def start(self, drive: Drive) -> None:
        assert isinstance(drive, SimulatedDrive)
        drive.since = self._loop.now()
        self._end_in(drive, drive.course.seconds - drive.elapsed, self._finish)

    def resume(self, drive: Drive) -> None:
        drive.gate.park_requested = False
        self.start(drive)

    async def ready(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)

    # What a drive costs

    def _course(self, work: Work) -> Course:
        timing = self._timing
        prefill, decode = volume(work.prefill), work.decoded
        both = prefill + decode
        legs: list[Leg] = []
        if work.decode:
            legs += timing.legs(0, work.first, decode)
        if work.prefill:
            legs += timing.legs(work.first, work.last, both)
        if work.decode:
            legs += timing.legs(work.last, work.layers, decode)
        before = self._moves(work) + timing.before(both)
        return Course(before, tuple(legs), timing.after(both))

    def _steps(self, work: Work, repeated: Repeated) -> Steps:
        first, last = repeated.volume, repeated.volume.later(repeated.steps - 1)
        step = pass_seconds(self._timing, work.layers, first)
        growth = 0.0
        if repeated.steps > 1:
            growth = (pass_seconds(self._timing, work.layers, last) - step) / (repeated.steps - 1)
        return Steps(self._moves(work), step, growth, repeated.steps)

    def _moves(self, work: Work) -> float:
        return sum(self._timing.hand_over(move.handed_over) for move in work.before if move.handed_over)

    # How it ends

    def _on_request(self, drive: SimulatedDrive) -> None:
        """The drive stops at the first boundary ahead where its level allows it; there may be none before its end."""
        if drive.since is None:
            return
        if isinstance(drive.course, Steps):
            number = drive.course.under_way(drive.progress)
            self._end_in(drive, drive.course.end_of(number) - drive.progress, self._finish, number)
            return
        passed = max(drive.course.passed(drive.progress), drive.gate.passed)
        stop = drive.course.next_stop(passed, drive.gate.level)
        if stop is not None:
            time, operator = drive.course.find(stop)
            self._end_in(drive, time - drive.progress, self._park, stop, operator)

    def _end_in(self, drive: SimulatedDrive, seconds: float, end: Callable[..., None], *args: object) -> None:
        if drive.timer is not None:
            drive.timer.cancel()
        drive.timer = self._loop.call_later(max(seconds, 0.0), end, drive, *args)

    def _park(self, drive: SimulatedDrive, boundary: int, operator: str) -> None:
        assert isinstance(drive.course, Course)
        drive.since, drive.timer = None, None
        drive.elapsed, _ = drive.course.find(boundary)
        drive.gate.passed, drive.gate.last = boundary, operator
        self.on_reply(Parked(drive.id, self._loop.now()))

    def _finish(self, drive: SimulatedDrive, steps: int | None = None) -> None:
        """`steps`: those of several that were done, if not all."""
        work, now = drive.work, self._loop.now()
        assert work is not None and drive.since is not None
        began = drive.since
        drive.since, drive.timer = None, None
        drive.gate.passed = drive.boundaries
        prefill = tuple((_TOKEN,) * len(part.draws) for part in work.prefill)
        decode = tuple((_TOKEN,) * len(part.draws) for part in work.decode)
        stretch: Stretch | None = None
        if isinstance(drive.course, Steps):
            stretch = Stretch(began + drive.course.end_of(1), now, drive.course.count if steps is None else steps)
        counters: Counters | None = None
        if self._counting is not None:
            counters = self._counting.expected(work, stretch.steps if stretch else 1)
        self.on_reply(Finished(drive.id, now, Computed(prefill, decode, stretch, counters)))
