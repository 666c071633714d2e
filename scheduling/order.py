"""Whom first? FCFS, SJF, EDF, D-EDF and S-EDF, or an order of your own (examples/my_order.py).

An order ranks candidates: smaller ranks first. Ties go to the earlier request and are never worth a preemption.

FlowPrefill's priority is sgn(slack) / deadline, largest first (papers: S-EDF, section on scheduling). Read as a rank:
requests that can still make it, by deadline; then those that cannot. Requests without an SLO stand between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Protocol, runtime_checkable

from scheduling.request import Request

Rank = tuple[int, float]  # (group, value within the group), smaller first

_OVERDUE, _FEASIBLE, _BEST_EFFORT, _LATE = range(-1, 3)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could be computed next: waiting, or head of the running or of a parked cohort.

    `remaining` is the predicted time in seconds from now to its first token if it ran alone from now on.
    """

    request: Request
    remaining: float


class Late(StrEnum):
    """What becomes of a request that can no longer meet its deadline."""

    PUBLISHED = "published"  # -1/deadline: after all others, the most overdue last
    EARLIEST = "earliest"  # after all others, the most overdue first
    AGED = "aged"  # as published, but first of all once it is `patience` targets old: nobody starves
    REFUSED = "refused"  # not served at all, if it has not begun


class Order(Protocol):
    """A subclass says how to rank; where it says no more, nobody is refused."""

    def rank(self, candidate: Candidate, now: float) -> Rank: ...

    def refuses(self, candidate: Candidate, now: float) -> bool:
        """Whether a request that has not begun should be turned away at `now`."""
        return False


@runtime_checkable
class Foreseeable(Order, Protocol):
    """An order that knows beforehand when a rank will change, so that nobody has to sort the queue anew to find out.

    Every order below is one. An order without `next_change` is served by a queue that sorts at every look.
    """

    def next_change(self, candidate: Candidate, now: float) -> float:
        """The first moment after `now` from which `rank` or `refuses` may answer otherwise for a candidate that goes on
        waiting, in seconds on the engine's clock; infinite for never."""
        ...


@dataclass(frozen=True, slots=True)
class FCFS(Order):
    """First come, first served."""

    def rank(self, candidate: Candidate, now: float) -> Rank:
        return 0, candidate.request.arrival

    def next_change(self, candidate: Candidate, now: float) -> float:
        return inf


@dataclass(frozen=True, slots=True)
class SJF(Order):
    """Shortest job first, by predicted time to the first token; where running work may be parked, shortest remaining
    time first. Deadlines count for nothing, and a stream of short requests starves a long one."""

    def rank(self, candidate: Candidate, now: float) -> Rank:
        return 0, candidate.remaining

    def next_change(self, candidate: Candidate, now: float) -> float:
        return inf


@dataclass(frozen=True, slots=True)
class EDF(Order):
    """Earliest deadline first, late or not; best effort last."""

    def rank(self, candidate: Candidate, now: float) -> Rank:
        request = candidate.request
        return (_BEST_EFFORT, request.arrival) if request.slo.ttft is None else (_FEASIBLE, request.deadline)

    def next_change(self, candidate: Candidate, now: float) -> float:
        return inf


@dataclass(frozen=True, slots=True)
class DEDF(Order):
    """Deadline-aware EDF: late once the deadline has passed. The paper names it without a definition; this is ours."""

    late: Late = Late.PUBLISHED
    patience: float = 4.0  # of Late.AGED, in multiples of the request's own TTFT target

    def __post_init__(self) -> None:
        if not self.patience > 1:
            raise ValueError(f"patience must be above 1 TTFT target, got {self.patience}")

    def late_from(self, candidate: Candidate) -> float:
        """The moment from which the candidate counts as late, in seconds on the engine's clock."""
        return candidate.request.deadline

    def overdue_from(self, candidate: Candidate) -> float:
        """The moment from which a late candidate has waited long enough for Late.AGED to put it first."""
        request = candidate.request
        if self.late != Late.AGED or request.slo.ttft is None:
            return inf
        return request.arrival + self.patience * request.slo.ttft

    def rank(self, candidate: Candidate, now: float) -> Rank:
        request = candidate.request
        if request.slo.ttft is None:
            return _BEST_EFFORT, request.arrival
        if now < self.late_from(candidate):
            return _FEASIBLE, request.deadline
        if now >= self.overdue_from(candidate):
            return _OVERDUE, request.deadline
        return _LATE, request.deadline if self.late == Late.EARLIEST else -request.deadline

    def refuses(self, candidate: Candidate, now: float) -> bool:
        return self.late == Late.REFUSED and now >= self.late_from(candidate)

    def next_change(self, candidate: Candidate, now: float) -> float:
        changes = (self.late_from(candidate), self.overdue_from(candidate))
        return min((moment for moment in changes if moment > now), default=inf)


@dataclass(frozen=True, slots=True)
class SEDF(DEDF):
    """Slack-aware EDF, FlowPrefill's order: late once the predicted remaining work no longer fits (slack <= 0)."""

    def late_from(self, candidate: Candidate) -> float:
        return candidate.request.deadline - candidate.remaining
