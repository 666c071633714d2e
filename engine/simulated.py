"""An executor without a forward pass: it adds up what the operators cost, and lets that much virtual time pass.

It takes the same work as the others, parks at the boundary where the real one would, and gives the same replies. A
drive costs a timer or two, not one for each operator: where it stops is found in its cumulative cost
(engine/course.py). Consecutive decode steps of the same choices are run in one go. Tokens are all 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine.counters import Counters
from engine.counting import Counting
from engine.course import Course, Leg, Steps
from engine.executor import Drive, Finished, OnReply, Parked
from engine.gate import Gate
from engine.sampling import Sampled
from engine.timing import Timing, pass_seconds
from engine.virtual import VirtualLoop
from engine.work import Computed, Repeated, Stretch, Work, volume
from scheduling.preempt import Preempt

_TOKEN = Sampled(0)


class SimulatedGate(Gate):
    """Tells its drive at once of a request to park: no operator comes by to look."""

    __slots__ = ("_park_requested", "on_request")

    def __init__(self, level: Preempt) -> None:
        self.on_request: Callable[[], None] | None = None
        super().__init__(level)

    @property
    def park_requested(self) -> bool:
        return self._park_requested

    @park_requested.setter
    def park_requested(self, value: bool) -> None:
        self._park_requested = value
        if value and self.on_request is not None:
            self.on_request()


@dataclass(eq=False, slots=True, kw_only=True)
class SimulatedDrive(Drive):
    """It has come `elapsed` seconds of its course far; or had at the moment `since`, from when on it moves at `rate`.

    `stop`: the boundary or step that it ends with, if it does not go all the way. `first_step`: when the first of
    several steps is done.
    """

    course: Course | Steps
    now: Callable[[], float]
    elapsed: float = 0.0
    since: float | None = None
    rate: float = 1.0
    slowdown: float = 1.0  # while a neighbour is busy, it takes so many times as long
    stop: int | None = None
    goal: float = 0.0  # seconds of its course at which it ends
    first_step: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def progress(self) -> float:
        """Seconds of its course that lie behind it."""
        return self.elapsed if self.since is None else self.elapsed + (self.now() - self.since) * self.rate

    @property
    def done(self) -> float:
        if self.since is None:
            return self.gate.passed / self.boundaries
        if isinstance(self.course, Steps):
            return self.progress / self.course.seconds
        return self.course.passed(self.progress) / self.boundaries

    def move(self, rate: float) -> None:
        """Go on from here at this rate."""
        self.elapsed, self.since, self.rate = self.progress, self.now(), rate


class SimulatedExecutor:
    """One device, real or a group under tensor parallelism, on which `timing` says how long things take.

    `counting`: to count what they read, too. `neighbours` are executors on the same machine: while one of them is busy,
    drives here take longer.
    """

    repeats = True

    def __init__(self, loop: VirtualLoop, timing: Timing, counting: Counting | None = None) -> None:
        self.on_reply: OnReply = lambda reply: None
        self.neighbours: list[SimulatedExecutor] = []
        self._loop = loop
        self._timing = timing
        self._counting = counting
        self._moving: SimulatedDrive | None = None

    def prepare(self, drive: int, work: Work, preempt: Preempt) -> SimulatedDrive:
        course = self._course(work) if work.repeated is None else self._steps(work, work.repeated)
        boundaries = 1 if isinstance(course, Steps) else course.boundaries
        prepared = SimulatedDrive(
            drive, None, SimulatedGate(preempt), boundaries, work, course=course, now=self._loop.now
        )
        if self.neighbours:
            prepared.slowdown = self._timing.slowdown(volume(work.prefill) + work.decoded)
        return prepared

    def start(self, drive: Drive) -> None:
        assert isinstance(drive, SimulatedDrive) and isinstance(drive.gate, SimulatedGate)
        drive.gate.on_request = self._stop_soon
        drive.move(self._rate(drive))
        if isinstance(drive.course, Steps):
            drive.first_step = self._loop.now() + drive.course.end_of(1) / drive.rate
        self._set(drive)
        if drive.gate.park_requested:
            self._stop_soon()

    def resume(self, drive: Drive) -> None:
        assert isinstance(drive, SimulatedDrive)
        drive.gate.park_requested, drive.stop = False, None
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
            legs += timing.legs(work.first, work.last, prefill, *([decode] if decode.rows else ()))
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

    # How fast it goes

    def _rate(self, drive: SimulatedDrive) -> float:
        return 1 / drive.slowdown if any(other._moving is not None for other in self.neighbours) else 1.0

    def _set(self, drive: SimulatedDrive | None) -> None:
        """This drive moves from now on, or none."""
        if (self._moving is None) != (drive is None):
            self._moving = drive
            for other in self.neighbours:
                other._retime()
        self._moving = drive
        if drive is not None:
            self._expect(drive)

    def _retime(self) -> None:
        """A neighbour has begun or ended."""
        drive = self._moving
        if drive is None or drive.rate == self._rate(drive):
            return
        drive.move(self._rate(drive))
        if isinstance(drive.course, Steps):
            drive.stop = drive.course.under_way(drive.progress)  # the steps that are told of together are alike
        self._expect(drive)

    # How it ends

    def _stop_soon(self) -> None:
        """The drive stops at the first boundary ahead where its level allows it; there may be none before its end."""
        drive = self._moving
        assert drive is not None
        if isinstance(drive.course, Steps):
            drive.stop = drive.course.under_way(drive.progress)
        else:
            passed = max(drive.course.passed(drive.progress), drive.gate.passed)
            drive.stop = drive.course.next_stop(passed, drive.gate.level)
        self._expect(drive)

    def _expect(self, drive: SimulatedDrive) -> None:
        if drive.timer is not None:
            drive.timer.cancel()
        if drive.stop is None:
            drive.goal = drive.course.seconds
        elif isinstance(drive.course, Steps):
            drive.goal = drive.course.end_of(drive.stop)
        else:
            drive.goal, _ = drive.course.find(drive.stop)
        seconds = max(drive.goal - drive.progress, 0.0) / drive.rate
        drive.timer = self._loop.call_later(seconds, self._end, drive)

    def _end(self, drive: SimulatedDrive) -> None:
        assert isinstance(drive.gate, SimulatedGate)
        drive.elapsed, drive.since, drive.timer, drive.gate.on_request = drive.goal, None, None, None
        self._set(None)
        if isinstance(drive.course, Course) and drive.stop is not None:
            drive.gate.passed = drive.stop
            _, drive.gate.last = drive.course.find(drive.stop)
            self.on_reply(Parked(drive.id, self._loop.now()))
        else:
            drive.gate.passed = drive.boundaries
            self.on_reply(Finished(drive.id, self._loop.now(), self._computed(drive)))

    def _computed(self, drive: SimulatedDrive) -> Computed:
        work = drive.work
        assert work is not None
        prefill = tuple((_TOKEN,) * len(part.draws) for part in work.prefill)
        decode = tuple((_TOKEN,) * len(part.draws) for part in work.decode)
        stretch: Stretch | None = None
        if isinstance(drive.course, Steps):
            now = self._loop.now()
            stretch = Stretch(min(drive.first_step, now), now, drive.stop or drive.course.count)
        counters: Counters | None = None
        if self._counting is not None:
            counters = self._counting.expected(work, stretch.steps if stretch else 1)
        return Computed(prefill, decode, stretch, counters)
