"""A virtual device and its owner, for scheduler tests: events in, decisions carried out, a clock that jumps.

It stands where engine/prefill.py and an executor stand, without torch, asyncio or KV tensors, and mistrusts every
decision: what may not be started, parked or resumed fails the test at once.
"""

from __future__ import annotations

import heapq
from collections import Counter
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
LAYER = ("attention", "o_proj", "gate_up_proj", "down_proj")  # every operator takes as long as any other
LAYERS = 2
BOUNDARIES = LAYER * LAYERS
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
class Crossing:
    """A cohort on its way through the layers, slice by slice."""

    cohort: Cohort
    operator_seconds: float
    since: float  # when it was last started or resumed, and
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
            system, PREDICTOR, self.blocks, LAYERS, park_limit_bytes=park_limit_bytes, bytes_per_token=1
        )
        self.num_blocks, self.speed, self.handover, self.together = num_blocks, speed, handover, together
        self.park_limit_bytes = park_limit_bytes
        self.requests = [Request(i, range(j.tokens), slo=SLO(j.ttft), arrival=j.arrival) for i, j in enumerate(jobs)]
        self.bad = {request for request, job in zip(self.requests, jobs, strict=True) if job.bad}
        self.second_opinion: Callable[[list[Contender], Cohort | None], Contender | None] | None = None

        # What happened.
        self.causes = 0  # events that are not the reply to a park
        self.parks: list[Cohort] = []
        self.failures: Counter[Request] = Counter()  # forward passes that raised with the request in them
        self.starts: list[tuple[float, Cohort]] = []
        self.opinions: list[tuple[Contender | None, Cohort | None, Decision]] = []  # second, what ran, the scheduler's
        self.finished_at: dict[Request, float] = {}
        self.computed: dict[Request, list[Share]] = {request: [] for request in self.requests}

        self._crossings: dict[Cohort, Crossing] = {}  # running and parked
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
        """The fraction of all boundaries that a running or parked cohort has passed by now."""
        return self._passed(self._crossings[cohort]) / len(BOUNDARIES)

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

    def _parked(self, crossing: Crossing, boundary: int) -> None:
        crossing.passed, crossing.asked = boundary, False
        self.scheduler.on_parked(crossing.cohort, _inside(crossing.cohort, boundary))

    def _finished(self, crossing: Crossing) -> None:
        self.causes += 1
        crossing.passed, crossing.asked = _slice_end(crossing.cohort), False
        if not crossing.cohort.last_slice:
            assert self.scheduler.on_completion(crossing.cohort) == []
            return
        del self._crossings[crossing.cohort]
        members = list(crossing.cohort.members)
        for share in crossing.cohort.shares:
            if share.request in members:
                assert share.start == sum(s.tokens for s in self.computed[share.request]), "not where it stopped"
                self.computed[share.request].append(share)
        for request in self.scheduler.on_completion(crossing.cohort):
            request.state = State.FINISHED
            self.finished_at[request] = self.now
            self._hand_back(self._held.pop(request), self.handover)
        self._free_unused()

    def _failed(self, crossing: Crossing) -> None:
        self.causes += 1
        del self._crossings[crossing.cohort]
        self.failures.update(crossing.cohort.members)
        for request in self.scheduler.on_failure(crossing.cohort):
            request.state = State.FAILED
        self._free_unused()

    # Decisions

    def _decide(self) -> None:
        running = self.scheduler.running
        if running is not None:
            self.scheduler.on_progress(_inside(running, self._passed(self._crossings[running])))
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
            del self._crossings[cohort]
        self._free_unused()
        if decision.park is not None:
            assert decision.park is running and running.phase == Phase.PARKING
            crossing = self._crossings[running]
            assert not crossing.asked, "asked twice"
            assert running.abandoned or self.scheduler.system.preempt.inside_a_forward
            held = sum(c.tokens for c in (*self.scheduler.parked, running))
            assert running.abandoned or held <= self.park_limit_bytes
            self.parks.append(running)
            crossing.asked = True
            self._run(crossing)
        if decision.start is not None:
            assert running is None
            assert set(decision.start.members) <= set(waiting)
            self._start(decision.start)
        if decision.resume is not None:
            assert running is None and decision.resume in parked and decision.resume.members
            crossing = self._crossings[decision.resume]
            crossing.since = self.now
            self._run(crossing)
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
        if not cohort.head.admitted:
            aside = sum(parked.tokens for parked in self.scheduler.parked)
            assert aside <= self.park_limit_bytes, "something new, although too much stands aside already"
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
        crossing = self._crossings[cohort] = Crossing(cohort, seconds / len(BOUNDARIES), self.now)
        self._run(crossing)

    def _run(self, crossing: Crossing) -> None:
        """Let it go on, to its end or to the next boundary at which it may do as asked. One reply will come."""
        end, reply = _slice_end(crossing.cohort), partial(self._finished, crossing)
        stops = range(self._passed(crossing) + 1, end + 1)
        if crossing.passed < RAISES_AT and any(share.request in self.bad for share in crossing.cohort.shares):
            end, reply = RAISES_AT, partial(self._failed, crossing)
            stops = range(stops.start, end)
        level = self.scheduler.system.preempt
        for boundary in stops if crossing.asked else ():
            if crossing.cohort.abandoned or level.stops_at(BOUNDARIES[boundary - 1]):
                end, reply = boundary, partial(self._parked, crossing, boundary)
                break
        crossing.reply = next(self._ids)
        time = crossing.since + (end - crossing.passed) * crossing.operator_seconds
        self._at(time, partial(self._reply, crossing, crossing.reply, reply))

    def _reply(self, crossing: Crossing, number: int, reply: Callable[[], None]) -> None:
        if number == crossing.reply:
            reply()

    def _passed(self, crossing: Crossing) -> int:
        if crossing.cohort in self.scheduler.parked:
            return crossing.passed
        since_then = int((self.now - crossing.since) / crossing.operator_seconds)
        return min(_slice_end(crossing.cohort), crossing.passed + since_then)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ids), event))

    def _free_unused(self) -> None:
        """Blocks of requests that have ended, unless a forward pass, running or parked, may still touch them."""
        leased = {share.request for cohort in self._crossings for share in cohort.shares}
        for request in [request for request in self._held if request.state.terminal and request not in leased]:
            self._hand_back(self._held.pop(request), 0.0)

    def _hand_back(self, blocks: int, delay: float) -> None:
        self._in_handover += blocks
        self._at(self.now + delay, partial(self._freed, blocks))

    def _check(self) -> None:
        scheduler = self.scheduler
        assert self.blocks.free + self._in_handover + sum(self._held.values()) == self.num_blocks
        cohorts = [*scheduler.parked, *([scheduler.running] if scheduler.running else [])]
        assert set(cohorts) == set(self._crossings), "a drive nobody knows of"
        places = list(scheduler.waiting) + [r for cohort in cohorts for r in cohort.members]
        assert len(set(places)) == len(places), "in two places at once"
        assert all(not request.state.terminal for request in places)
        if not self._events:
            assert places == [] and all(request.state.terminal for request in self.requests), "someone was forgotten"
            assert self.blocks.free == self.num_blocks


def _slice_end(cohort: Cohort) -> int:
    """The boundaries passed when the cohort's present slice is done."""
    return cohort.layers[1] * len(LAYER)


def _inside(cohort: Cohort, passed: int) -> float:
    """The fraction of the present slice's boundaries that lie behind, `passed` of all having been passed."""
    first, last = cohort.layers
    return (passed - first * len(LAYER)) / ((last - first) * len(LAYER))
