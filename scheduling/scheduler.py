"""FlowPrefill's Algorithm 2 as a state machine: events in, one decision out.

No I/O, no clock, no torch, no asyncio: the same object runs in tests, in simulation and on a GPU. The owner (a prefill
instance) reports events, calls `decide(now)` after each, and carries the decision out. A decision is taken only on
events: arrival, completion, parked, abort, blocks freed. There is no timer and no polling.

A park starts nothing. Its reply is an event of its own and causes a fresh decision, so no stale signal can ever stop
the next cohort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Protocol

from scheduling.batch import Forming, blocks_needed
from scheduling.cohort import Cohort, Phase
from scheduling.order import Candidate, Rank
from scheduling.parked import Parked
from scheduling.plan import later_extents, next_share
from scheduling.predictor import Predict
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.ranked import Size
from scheduling.request import Request, State
from scheduling.waiting import waiting_for


class Blocks(Protocol):
    """What the scheduler reads of a KV quota; it never changes it."""

    @property
    def free(self) -> int: ...

    @property
    def block_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What the owner must do, in this order. At most one of park, start and resume is set."""

    refuse: tuple[Request, ...] = ()  # late requests that the order turns away
    close: tuple[Cohort, ...] = ()  # parked cohorts that everybody has left
    park: Cohort | None = None
    start: Cohort | None = None
    resume: Cohort | None = None


class Scheduler:
    """Whom to compute next on one executor.

    `park_limit_bytes` bounds what parked cohorts keep alive (activations and KV blocks, `bytes_per_token` for each
    token of their shares): at the bound nothing more is parked.
    """

    def __init__(
        self,
        system: System,
        predict: Predict,
        blocks: Blocks,
        num_layers: int,
        *,
        park_limit_bytes: float = inf,
        bytes_per_token: int = 0,
    ) -> None:
        self.system = system
        self.waiting = waiting_for(system.order)
        self.running: Cohort | None = None
        self.parked = Parked(system.order)
        self._predict = predict
        self._blocks = blocks
        self._num_layers = num_layers
        self._park_limit_bytes = park_limit_bytes
        self._bytes_per_token = bytes_per_token
        self.decode_rows = 0  # decodes that share the next pass; their owner keeps it true
        self._ids = count()

    # Events

    def on_arrival(self, request: Request) -> None:
        self._wait(request)

    def on_progress(self, inside: float) -> None:
        """Tell how far the running drive has come, as a fraction of its operators; before a decision."""
        if self.running is not None:
            self.running.inside = inside

    def on_parked(self, cohort: Cohort, inside: float) -> None:
        """The cohort has pulled over with its work so far; or without it, where preempting means to start over."""
        cohort.inside = inside
        if self.system.preempt == Preempt.RESTART:
            for request in cohort.members:
                self._wait(request)
            cohort.members.clear()
        self._set_aside(cohort)

    def on_completion(self, cohort: Cohort) -> list[Request]:
        """The cohort's slice is computed. Returns the members whose prompt is complete with it.

        Between two layer groups the cohort stands aside like a parked one, and the next decision is open. After its
        last layer the members whose prompt goes on wait for their next chunk.
        """
        if not cohort.last_slice:
            cohort.group += 1
            cohort.inside = 0.0
            self._set_aside(cohort)
            return []
        self._retire(cohort)
        finished: list[Request] = []
        for share in cohort.shares:
            if share.request not in cohort.members:
                continue
            share.request.computed = share.stop
            if share.last:
                finished.append(share.request)
            else:
                self._wait(share.request)
        return finished

    def on_failure(self, cohort: Cohort, *, alone: bool = True) -> list[Request]:
        """The forward pass raised. Returns the members to fail; mates of a failed cohort are retried alone, once.

        `alone`: the pass computed nothing but this cohort; else decodes that it carried are under suspicion too.
        """
        self._retire(cohort)
        if len(cohort.shares) == 1 and alone:
            return list(cohort.members)
        for request in cohort.members:
            request.alone = True
            self._wait(request)
        return []

    def on_park_requested(self) -> None:
        """The owner has asked the running cohort to pull over for a reason of its own: a decode step is due."""
        if self.running is not None:
            self._park(self.running)

    def on_abort(self, request: Request) -> None:
        """Forget a request, wherever it is. Unknown ones are no error: the signal may be late."""
        self.waiting.discard(request)
        for cohort in (*self.parked, self.running):
            if cohort is not None and request in cohort.members:
                head = cohort.head
                cohort.members.remove(request)
                cohort.later = 0.0 if cohort.abandoned else self._later(cohort)  # its head may be another now
                if cohort is not self.running:
                    self.parked.on_left(cohort, head)

    # The decision

    def decide(self, now: float) -> Decision:
        """What to do now: FlowPrefill's Algorithm 2."""
        # 1. Clear away what nobody waits for any more.
        refuse = tuple(self.waiting.take_refused(now))
        close = tuple(self.parked.take_abandoned())
        running = self.running

        # 2. A park under way ends with a reply; until then there is nothing to decide.
        if running is not None and running.phase == Phase.PARKING:
            return Decision(refuse, close)
        if running is not None and running.abandoned:
            return Decision(refuse, close, park=self._park(running))

        # 3. The highest-ranked of the waiting, the parked and the running; without blocks a newcomer cannot begin.
        best = self._best(now)
        if best is None or best is running:
            return Decision(refuse, close)

        # 4. Something else runs: ask it to pull over if the newcomer is strictly more urgent.
        if running is not None:
            if self._may_park(running) and self._rank(best, now) < self._rank(running, now):
                return Decision(refuse, close, park=self._park(running))
            return Decision(refuse, close)

        # 5. The device is free: resume, or form a new cohort around the head.
        if isinstance(best, Cohort):
            self.parked.remove(best)
            return Decision(refuse, close, resume=self._run(best))
        return Decision(refuse, close, start=self._run(self._form(best.request, now)))

    def _best(self, now: float) -> Candidate | Cohort | None:
        begun = [cohort for cohort in (self.running, self.parked.first(now)) if cohort is not None]
        # What has begun is not overtaken, where nothing may be preempted: not even between chunks or layer groups.
        # And at the bound of what may be set aside nothing more is.
        admitted = self.waiting.first(now, admitted_only=True)
        uninterrupted = self.system.preempt == Preempt.NEVER and (begun or admitted)
        full = self.parked.held_bytes > self._park_limit_bytes
        first = admitted if full or uninterrupted else self.waiting.first(now)
        best = self._first([*begun, first], now)
        if isinstance(best, Candidate) and blocks_needed(best.request, self._blocks.block_size) > self._blocks.free:
            # KV is full: only those who hold their blocks already may go (Algorithm 2).
            best = self._first([*begun, admitted], now)
        return best

    def _first(self, contenders: Sequence[Candidate | Cohort | None], now: float) -> Candidate | Cohort | None:
        present = [contender for contender in contenders if contender is not None]
        return min(present, key=lambda c: (self._rank(c, now), _head(c).id), default=None)

    def _rank(self, contender: Candidate | Cohort, now: float) -> Rank:
        if isinstance(contender, Cohort):
            contender = contender.candidate
        return self.system.order.rank(contender, now)

    def _later(self, cohort: Cohort) -> float:
        """Predicted seconds of the head's passes after this one."""
        share = next(share for share in cohort.shares if share.request is cohort.head)
        return self._predict_all(cohort.head, share.stop)

    def _may_park(self, cohort: Cohort) -> bool:
        held = self.parked.held_bytes + cohort.held_bytes
        return self.system.preempt.inside_a_forward and held <= self._park_limit_bytes

    # Transitions

    def _wait(self, request: Request) -> None:
        request.state = State.WAITING
        size = Size(self.system.plan.take(request), blocks_needed(request, self._blocks.block_size))
        self.waiting.add(Candidate(request, self._predict_all(request, request.computed)), size)

    def _predict_all(self, request: Request, computed: int) -> float:
        return sum(self._predict([extent]) for extent in later_extents(self.system.plan, request, computed))

    def _form(self, head: Request, now: float) -> Cohort:
        plan = self.system.plan
        shares = [next_share(plan, head)]
        if not head.alone:
            forming = Forming(self._blocks.free, self._blocks.block_size, self.decode_rows)
            ranked = self.waiting.ranked(now, forming.room, admitted_first=self.system.preempt == Preempt.NEVER)
            others = (c.request for c in ranked if c.request is not head and not c.request.alone)
            shares = list(self.system.batch.form(shares[0], others, plan, self._predict, now, forming))
        members = [share.request for share in shares]
        for request in members:
            self.waiting.discard(request)
        tokens = sum(share.tokens for share in shares)
        cohort = Cohort(
            next(self._ids),
            tuple(shares),
            members,
            plan.groups(tokens, self._num_layers),
            self._predict([share.extent for share in shares]),
            held_bytes=tokens * self._bytes_per_token,
        )
        cohort.later = self._later(cohort)
        return cohort

    def _run(self, cohort: Cohort) -> Cohort:
        cohort.phase = Phase.RUNNING
        for request in cohort.members:
            request.state = State.RUNNING
        self.running = cohort
        return cohort

    def _park(self, cohort: Cohort) -> Cohort:
        cohort.phase = Phase.PARKING
        return cohort

    def _set_aside(self, cohort: Cohort) -> None:
        self._retire(cohort)
        cohort.phase = Phase.PARKED
        for request in cohort.members:
            request.state = State.PARKED
        self.parked.add(cohort)

    def _retire(self, cohort: Cohort) -> None:
        assert cohort is self.running
        self.running = None


def _head(contender: Candidate | Cohort) -> Request:
    return contender.head if isinstance(contender, Cohort) else contender.request
