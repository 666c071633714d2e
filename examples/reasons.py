"""Why a scheduler decided as it did, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from scheduling.cohort import Cohort
from scheduling.order import DEDF, EDF, FCFS, SJF, Candidate, Order, Rank
from scheduling.plan import next_share
from scheduling.predictor import Predict
from scheduling.request import Request
from scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Contender:
    """A request that could be computed next, as it stood before the decision. Times in seconds."""

    request: Request
    state: str  # waiting, running, parked, or pulling over
    tokens: int  # of its prompt, still to compute
    remaining: float  # predicted, until its first token if it ran alone
    slack: float  # until its deadline, less `remaining`
    priority: (
        float | None
    )  # FlowPrefill's sgn(slack) / deadline, as its order sees it; None: no deadlines in this order
    rank: Rank  # smaller first
    cohort: tuple[int, ...] = ()  # ids of those it shares its pass with, if it has begun


def priority(order: Order, candidate: Candidate, now: float) -> float | None:
    """FlowPrefill's figure: one over the deadline, negative for a request that this order counts as late."""
    deadline = candidate.request.deadline
    if not isinstance(order, EDF | DEDF) or deadline in (0.0, inf):
        return None
    late = isinstance(order, DEDF) and now >= order.late_from(candidate)
    return (-1 if late else 1) / deadline


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a decision is what it is, in words."""

    scheduler: Scheduler
    predict: Predict
    name: Callable[[Request], str]
    contenders: Sequence[Contender]
    now: float

    def of(self, action: str, cohort: Cohort | None, parking: bool) -> str:
        running = self.scheduler.running
        if action == "start" and cohort is not None:
            return f"start {self._members(cohort)}: {self._first(cohort.head)}{self._mates(cohort)}"
        if action == "resume" and cohort is not None:
            return f"resume {self._members(cohort)} where it stopped: {self._first(cohort.head)}"
        if action == "park" and cohort is not None:
            if cohort.abandoned:
                return "stop the running pass: nobody waits for it any more"
            first = self.contenders[0].request
            return f"ask {self._members(cohort)} to pull over: {self._before(first, cohort.head)}"
        if parking and running is not None:
            return f"wait: {self._members(running)} is pulling over, and its reply brings the next decision"
        if running is not None and self.contenders and self.contenders[0].request is running.head:
            return f"{self._members(running)} runs on: {self._first(running.head)}"
        if running is not None:
            return f"{self._members(running)} runs on: {self._not_stopped(running)}"
        return "nothing can begin: there are no blocks for it"

    def _members(self, cohort: Cohort) -> str:
        return " with ".join(
            [self.name(cohort.head), ", ".join(map(self.name, cohort.members[1:]))][: len(cohort.members)]
        )

    def _first(self, head: Request) -> str:
        """Why the head is the one."""
        others = [contender for contender in self.contenders if contender.request is not head]
        if not others:
            return "nobody else is there"
        if self.contenders[0].request is head:
            return self._before(head, others[0].request)
        return f"{self.name(self.contenders[0].request)} ranks higher, but {self._passed_over()}"

    def _passed_over(self) -> str:
        if not self.scheduler.system.preempt.inside_a_forward and self.scheduler.parked:
            return "what has begun is not overtaken (preempt=never)"
        return "it finds no blocks, or what has begun is not overtaken"

    def _not_stopped(self, running: Cohort) -> str:
        first = self.contenders[0].request
        level = self.scheduler.system.preempt
        if not level.inside_a_forward:
            return f"{self.name(first)} ranks higher, but no prefill is stopped inside (preempt={level.name.lower()})"
        return f"{self.name(first)} ranks higher, but parked prefills already keep all the memory they may"

    def _before(self, first: Request, second: Request) -> str:
        """Why `first` ranks higher than `second`."""
        a, b = self._named(first), self._named(second)
        one, two = self.name(first), self.name(second)
        order = self.scheduler.system.order
        if isinstance(order, FCFS):
            return f"{one} came before {two}"
        if isinstance(order, SJF):
            return f"{one} has less left ({a.remaining:.3f} s) than {two} ({b.remaining:.3f} s)"
        if a.priority is not None and b.priority is not None:
            if a.priority > 0 > b.priority:
                return f"{one} can still be in time (slack {a.slack:+.3f} s), {two} cannot ({b.slack:+.3f} s)"
            if first.deadline == second.deadline:
                return f"{one} and {two} are due at the same moment, and {one} came first"
            if a.priority > 0:
                return f"{one} is due before {two} ({first.deadline:.3f} s, {second.deadline:.3f} s)"
            late = f"late={order.late.value}" if isinstance(order, DEDF) else "this order"
            dues = f"{one} ({first.deadline:.3f} s) goes before {two} ({second.deadline:.3f} s)"
            return f"both are late, and with {late} {dues}"
        return f"{one} ranks before {two} ({a.rank} before {b.rank})"

    def _named(self, request: Request) -> Contender:
        return next(contender for contender in self.contenders if contender.request is request)

    def _mates(self, cohort: Cohort) -> str:
        """Who joined the head and who did not, if anybody could."""
        waiting = [c for c in self.contenders if c.state == "waiting" and c.request is not cohort.head]
        if not waiting:
            return ""
        joined = [c for c in waiting if c.request in cohort.members]
        left = [c for c in waiting if c.request not in cohort.members]
        words = ""
        if joined:
            names = ", ".join(self.name(contender.request) for contender in joined)
            words = f"; {names} joined: {cohort.tokens:,} tokens together, predicted {cohort.predicted:.3f} s"
            if cohort.head.deadline < inf:
                words += f" of the {cohort.head.deadline - self.now:.3f} s left"
        if left:
            words += f"; {self._left_out(left[0].request, cohort)}"
        return words

    def _left_out(self, request: Request, cohort: Cohort) -> str:
        share = next_share(self.scheduler.system.plan, request)
        tokens = cohort.tokens + share.tokens
        budget = getattr(self.scheduler.system.batch, "budget", None)
        name = self.name(request)
        if budget is None:
            return f"{name} waits: requests run alone"
        if tokens > budget:
            return f"{name} waits: {tokens:,} tokens are over the budget of {budget:,}"
        together = self.predict([*cohort.extents, share.extent])
        if together > cohort.head.deadline - self.now:
            return (
                f"{name} waits: together they would take {together:.3f} s, and {self.name(cohort.head)} would be late"
            )
        return f"{name} waits"
