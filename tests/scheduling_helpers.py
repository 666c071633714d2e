"""A virtual device and its owner, for scheduler tests: events in, decisions carried out, a clock that jumps.

It stands where engine/prefill.py and an executor stand, without torch, asyncio or KV tensors, and mistrusts every
decision: what may not be started, parked or resumed fails the test at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

from scheduling.batch import blocks_needed
from scheduling.cohort import Cohort, Phase
from scheduling.plan import Share
from scheduling.predictor import Predictor
from scheduling.presets import System
from scheduling.request import SLO, Request, State
from scheduling.scheduler import Decision, Scheduler

# Binary fractions throughout, so that times add up exactly and a slack of zero is zero.
PREDICTOR = Predictor(per_step=2**-5, per_token=2**-6, per_pair=2**-12)
BLOCK = 4
BOUNDARIES = ("attention", "o_proj", "gate_up_proj", "down_proj") * 2  # of two layers; each operator takes as long
RAISES_AT = 3  # boundaries that a forward with a bad member passes before it raises


Contender = Request | Cohort  # who could be computed next


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come. Times in seconds; `bad`: a forward pass with this request in it raises."""

    arrival: float
    tokens: int
    ttft: float | None = None
    abort_at: float | None = None
    bad: bool = False


@dataclass(eq=False, slots=True)
class Drive:
    cohort: Cohort
    operator_seconds: float
    since: float  # when it was started or resumed, and
    passed: int = 0  # how many boundaries it had passed by then
    asked: bool = False  # to park
    reply: int = -1  # number of the reply to come; an earlier one is void


@dataclass(slots=True)
class Blocks:
    free: int
    block_size: int = BLOCK


class Device:
    """`speed`: real seconds per predicted one. `handover`: seconds until a finished prompt's blocks are free again.
    `together`: all events of one moment come before one decision, as from an inbox; else each has its own."""

    def __init__(
        self,
        system: System,
        jobs: list[Job],
        *,
        speed: float = 1.0,
        num_blocks: int = 1000,
        handover: float = 0.0,
        together: bool = True,
        park_limit_bytes: float = inf,
    ) -> None:
        jobs = sorted(jobs, key=lambda job: job.arrival)  # ids count in order of arrival
        self.now = 0.0
        self.blocks = Blocks(num_blocks)
        self.scheduler = Scheduler(
            system, PREDICTOR, self.blocks, 2, park_limit_bytes=park_limit_bytes, bytes_per_token=1
        )
        self.num_blocks, self.speed, self.handover, self.together = num_blocks, speed, handover, together
        self.park_limit_bytes = park_limit_bytes
        self.requests = [Request(i, range(j.tokens), slo=SLO(j.ttft), arrival=j.arrival) for i, j in enumerate(jobs)]
        self.bad = {request for request, job in zip(self.requests, jobs, strict=True) if job.bad}
        self.second_opinion: Callable[[list[Contender], Cohort | None], Contender | None] | None = None

        # What happened.
        self.causes = 0  # events that are not the reply to a park
        self.parks: list[Cohort] = []
        self.starts: list[tuple[float, Cohort]] = []
        self.opinions: list[tuple[Contender | None, Cohort | None, Decision]] = []  # second, what ran, the scheduler's
        self.finished_at: dict[Request, float] = {}
        self.computed: dict[Request, list[Share]] = {request: [] for request in self.requests}

        self._drives: dict[Cohort, Drive] = {}  # running and parked
        self._held: dict[Request, int] = {}  # blocks
        self._in_handover = 0  # blocks of requests that have left, not free yet
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()
        for request, job in zip(self.requests, jobs, strict=True):
            self._at(job.arrival, partial(self._arrive, request))
            if job.abort_at is not None:
                self._at(max(job.abort_at, job.arrival), partial(self._abort, request))

    def run(self) -> None:
        """Play everything to its end."""
        while self._events:
            assert next(self._ids) < 100_000, "it never ends"
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
                if not self.together:
                    break
            self._decide()

    def done(self, cohort: Cohort) -> float:
        """Fraction of its boundaries that a running or parked drive has passed by now."""
        return self._passed(self._drives[cohort]) / len(BOUNDARIES)

    # Events

    def _arrive(self, request: Request) -> None:
        self.causes += 1
        if not request.state.terminal:
            self.scheduler.on_arrival(request)

    def _abort(self, request: Request) -> None:
        self.causes += 1
        if not request.state.terminal:
            request.state = State.ABORTED
            self.scheduler.on_abort(request)
            self._free_unused()

    def _freed(self, blocks: int) -> None:
        self.causes += 1
        self.blocks.free += blocks
        self._in_handover -= blocks

    def _parked(self, drive: Drive, boundary: int) -> None:
        drive.passed, drive.asked = boundary, False
        self.scheduler.on_parked(drive.cohort, boundary / len(BOUNDARIES))

    def _finished(self, drive: Drive) -> None:
        self.causes += 1
        del self._drives[drive.cohort]
        members = list(drive.cohort.members)
        for share in drive.cohort.shares:
            if share.request in members:
                assert share.start == sum(s.tokens for s in self.computed[share.request]), "not where it stopped"
                self.computed[share.request].append(share)
        for request in self.scheduler.on_completion(drive.cohort):
            request.state = State.FINISHED
            self.finished_at[request] = self.now
            self._hand_back(self._held.pop(request), self.handover)
        self._free_unused()

    def _failed(self, drive: Drive) -> None:
        self.causes += 1
        del self._drives[drive.cohort]
        for request in self.scheduler.on_failure(drive.cohort):
            request.state = State.FAILED
        self._free_unused()

    # Decisions

    def _decide(self) -> None:
        running = self.scheduler.running
        if running is not None:
            self.scheduler.on_progress(self.done(running))
        parked = list(self.scheduler.parked)
        waiting = list(self.scheduler.waiting)
        opinion = self._ask_for_a_second_opinion()
        decision = self.scheduler.decide(self.now)
        if opinion is not None:
            self.opinions.append((*opinion, decision))
        assert [decision.park, decision.start, decision.resume].count(None) >= 2, "one thing at a time"
        for request in decision.refuse:
            assert request in waiting and request.computed == 0
            request.state = State.REFUSED
        for cohort in decision.close:
            assert cohort in parked and not cohort.members
            del self._drives[cohort]
        self._free_unused()
        if decision.park is not None:
            assert decision.park is running and running.phase == Phase.PARKING
            drive = self._drives[running]
            assert not drive.asked, "asked twice"
            assert running.abandoned or self.scheduler.system.preempt.inside_a_forward
            held = sum(c.tokens for c in (*self.scheduler.parked, running))
            assert running.abandoned or held <= self.park_limit_bytes
            self.parks.append(running)
            drive.asked = True
            self._run(drive)
        if decision.start is not None:
            assert running is None
            assert set(decision.start.members) <= set(waiting)
            self._start(decision.start)
        if decision.resume is not None:
            assert running is None and decision.resume in parked and decision.resume.members
            drive = self._drives[decision.resume]
            drive.since = self.now
            self._run(drive)
        self._check()

    def _ask_for_a_second_opinion(self) -> tuple[Contender | None, Cohort | None] | None:
        """None where there is nothing to choose: the running drive is about to stop, or nobody waits for it."""
        running = self.scheduler.running
        if self.second_opinion is None or (running and (running.phase == Phase.PARKING or running.abandoned)):
            return None
        cohorts = [cohort for cohort in (*self.scheduler.parked, running) if cohort and cohort.members]
        waiting = list(self.scheduler.waiting)
        return self.second_opinion([*waiting, *cohorts], running), running

    def _start(self, cohort: Cohort) -> None:
        assert cohort.members == [share.request for share in cohort.shares]
        for share in cohort.shares:
            request = share.request
            if needed := blocks_needed(request, BLOCK):
                assert request not in self._held
                self._held[request] = needed
                self.blocks.free -= needed
                request.admitted = True
        assert self.blocks.free >= 0, "more blocks than there are"
        self.starts.append((self.now, cohort))
        seconds = self.speed * PREDICTOR(cohort.extents)
        drive = self._drives[cohort] = Drive(cohort, seconds / len(BOUNDARIES), self.now)
        self._run(drive)

    def _run(self, drive: Drive) -> None:
        """Let it go on, to its end or to the next boundary at which it may do as asked. One reply will come."""
        end, reply = len(BOUNDARIES), partial(self._finished, drive)
        stops = range(self._passed(drive) + 1, end + 1)
        if drive.passed < RAISES_AT and any(share.request in self.bad for share in drive.cohort.shares):
            end, reply = RAISES_AT, partial(self._failed, drive)
            stops = range(stops.start, end)
        level = self.scheduler.system.preempt
        for boundary in stops if drive.asked else ():
            if drive.cohort.abandoned or level.stops_at(BOUNDARIES[boundary - 1]):
                end, reply = boundary, partial(self._parked, drive, boundary)
                break
        drive.reply = next(self._ids)
        time = drive.since + (end - drive.passed) * drive.operator_seconds
        self._at(time, partial(self._reply, drive, drive.reply, reply))

    def _reply(self, drive: Drive, number: int, reply: Callable[[], None]) -> None:
        if number == drive.reply:
            reply()

    def _passed(self, drive: Drive) -> int:
        if drive.cohort in self.scheduler.parked:
            return drive.passed
        return min(len(BOUNDARIES), drive.passed + int((self.now - drive.since) / drive.operator_seconds))

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ids), event))

    def _free_unused(self) -> None:
        """Blocks of requests that have ended, unless a forward pass, running or parked, may still touch them."""
        leased = {share.request for cohort in self._drives for share in cohort.shares}
        for request in [request for request in self._held if request.state.terminal and request not in leased]:
            self._hand_back(self._held.pop(request), 0.0)

    def _hand_back(self, blocks: int, delay: float) -> None:
        self._in_handover += blocks
        self._at(self.now + delay, partial(self._freed, blocks))

    def _check(self) -> None:
        scheduler = self.scheduler
        assert self.blocks.free + self._in_handover + sum(self._held.values()) == self.num_blocks
        cohorts = [*scheduler.parked, *([scheduler.running] if scheduler.running else [])]
        assert set(cohorts) == set(self._drives), "a drive nobody knows of"
        places = list(scheduler.waiting) + [r for cohort in cohorts for r in cohort.members]
        assert len(set(places)) == len(places), "in two places at once"
        assert all(not request.state.terminal for request in places)
        if not self._events:
            assert places == [] and all(request.state.terminal for request in self.requests), "someone was forgotten"
            assert self.blocks.free == self.num_blocks
