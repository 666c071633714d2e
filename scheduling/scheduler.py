"""FlowPrefill's Algorithm 2 as a state machine: events in, one decision out.

No I/O, no clock, no torch, no asyncio: the same object runs in tests, in simulation and on a GPU. The owner (a prefill
instance) reports events, calls `decide(now)` after each, and carries the decision out. A decision is taken only on
events: arrival, completion, parked, abort, blocks freed. There is no timer and no polling.

A park starts nothing. Its reply is an event of its own and causes a fresh decision, so no stale signal can ever stop
the next cohort.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Protocol

from scheduling.batch import Forming, blocks_needed
from scheduling.cohort import Cohort, Phase
from scheduling.order import Candidate, Rank
from scheduling.plan import Share, Slice, later_parts, next_share
from scheduling.predictor import Predict
from scheduling.presets import System
from scheduling.request import Request, State


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
    token of their slices): at the bound nothing more is parked.
    """

    def __init__(
        self,
        system: System,
        predict: Predict,
        blocks: Blocks,
        *,
        park_limit_bytes: float = inf,
        bytes_per_token: int = 0,
    ) -> None:
        self.system = system
        self.waiting: dict[int, Candidate] = {}  # by request id
        self.running: Cohort | None = None
        self.parked: list[Cohort] = []
        self._predict = predict
        self._blocks = blocks
        self._park_limit_bytes = park_limit_bytes
        self._bytes_per_token = bytes_per_token
        self._ids = count()

    # Events

    def on_arrival(self, request: Request) -> None:
        self._wait(request)

    def on_progress(self, done: float) -> None:
        """Tell how far the running drive has come, as a fraction of its operators; before a decision."""
        if self.running is not None:
            self.running.done = done

    def on_parked(self, cohort: Cohort, done: float) -> None:
        assert cohort is self.running
        cohort.done = done
        cohort.phase = Phase.PARKED
        for request in cohort.members:
            request.state = State.PARKED
        self.parked.append(cohort)
        self.running = None

    def on_completion(self, cohort: Cohort) -> list[Request]:
        """The slice is computed. Returns the members whose prompt is complete; the others wait for their next chunk."""
        self._retire(cohort)
        finished: list[Request] = []
        for share in cohort.slice.shares:
            if share.request not in cohort.members:
                continue
            share.request.computed = share.stop
            if share.last:
                finished.append(share.request)
            else:
                self._wait(share.request)
        return finished

    def on_failure(self, cohort: Cohort) -> list[Request]:
        """The forward pass raised. Returns the members to fail; mates of a failed cohort are retried alone, once."""
        self._retire(cohort)
        if len(cohort.slice.shares) == 1:
            return list(cohort.members)
        for request in cohort.members:
            request.alone = True
            self._wait(request)
        return []

    def on_abort(self, request: Request) -> None:
        """Forget a request, wherever it is. Unknown ones are no error: the signal may be late."""
        self.waiting.pop(request.id, None)
        for cohort in (*self.parked, self.running):
            if cohort is not None and request in cohort.members:
                cohort.members.remove(request)

    # The decision

    def decide(self, now: float) -> Decision:
        """What to do now: FlowPrefill's Algorithm 2."""
        # 1. Clear away what nobody waits for any more.
        refuse = tuple(
            c.request for c in self.waiting.values() if self.system.order.refuses(c, now) and not c.request.computed
        )
        for request in refuse:
            del self.waiting[request.id]
        close = tuple(cohort for cohort in self.parked if cohort.abandoned)
        self.parked = [cohort for cohort in self.parked if not cohort.abandoned]
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
        contenders: list[Candidate | Cohort] = [*self.waiting.values(), *self.parked]
        if self.running is not None:
            contenders.append(self.running)
        best = self._first(contenders, now)
        if isinstance(best, Candidate) and not self._has_room(best.request):
            # KV is full: only those who hold their blocks already may go (Algorithm 2).
            best = self._first([c for c in contenders if isinstance(c, Cohort) or c.request.admitted], now)
        return best

    def _first(self, contenders: list[Candidate | Cohort], now: float) -> Candidate | Cohort | None:
        return min(contenders, key=lambda c: (self._rank(c, now), _head(c).id), default=None)

    def _rank(self, contender: Candidate | Cohort, now: float) -> Rank:
        if isinstance(contender, Cohort):
            contender = Candidate(contender.head, contender.remaining + self._later(contender))
        return self.system.order.rank(contender, now)

    def _later(self, cohort: Cohort) -> float:
        """Predicted seconds of the head's chunks after this slice."""
        share = next(share for share in cohort.slice.shares if share.request is cohort.head)
        return self._predict_all(cohort.head, share.stop)

    def _has_room(self, request: Request) -> bool:
        return blocks_needed(request, self._blocks.block_size) <= self._blocks.free

    def _may_park(self, cohort: Cohort) -> bool:
        held = sum(parked.held_bytes for parked in self.parked) + self._held_bytes(cohort)
        return self.system.preempt.inside_a_forward and held <= self._park_limit_bytes

    def _held_bytes(self, cohort: Cohort) -> int:
        return cohort.slice.tokens * self._bytes_per_token

    # Transitions

    def _wait(self, request: Request) -> None:
        request.state = State.WAITING
        self.waiting[request.id] = Candidate(request, self._predict_all(request, request.computed))

    def _predict_all(self, request: Request, computed: int) -> float:
        return sum(self._predict([part]) for part in later_parts(self.system.plan, request, computed))

    def _form(self, head: Request, now: float) -> Cohort:
        shares: list[Share] = [next_share(self.system.plan, head)]
        if not head.alone:
            others = [c for c in self.waiting.values() if c.request is not head and not c.request.alone]
            others.sort(key=lambda c: (self.system.order.rank(c, now), c.request.id))
            forming = Forming(self._blocks.free, self._blocks.block_size)
            requests = (c.request for c in others)
            shares = list(self.system.batch.form(shares[0], requests, self.system.plan, self._predict, now, forming))
        work = Slice(tuple(shares))
        members = [share.request for share in shares]
        for request in members:
            del self.waiting[request.id]
        cohort = Cohort(next(self._ids), work, members, self._predict(work.parts))
        cohort.held_bytes = self._held_bytes(cohort)
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

    def _retire(self, cohort: Cohort) -> None:
        assert cohort is self.running
        self.running = None


def _head(contender: Candidate | Cohort) -> Request:
    return contender.head if isinstance(contender, Cohort) else contender.request
