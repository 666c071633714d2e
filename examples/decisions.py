"""Watch a scheduler decide: who stood for election at each decision, what was decided, and why.

The scheduler is not changed: a subclass of it takes its place, decides as it does, and notes what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.engine import Engine
from examples.reasons import Contender, Reason, priority
from scheduling.cohort import Cohort, Phase
from scheduling.order import Candidate
from scheduling.request import Request
from scheduling.scheduler import Decision, Scheduler


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision. `action`: start, resume, park or nothing; of `members`, the head first."""

    instance: str
    time: float
    causes: tuple[str, ...]  # what has happened since the last one
    contenders: tuple[Contender, ...]  # highest rank first
    action: str
    members: tuple[Request, ...]
    why: str


class Watched(Scheduler):
    """A scheduler that hands a Choice to `note` after each decision. `name(request)` is what requests are called."""

    name: Callable[[Request], str]
    note: Callable[[Choice], None]
    instance: str
    causes: list[str]

    @classmethod
    def over(
        cls, scheduler: Scheduler, instance: str, name: Callable[[Request], str], note: Callable[[Choice], None]
    ) -> Watched:
        """One that goes on from where `scheduler` is; that one is not to be used any more."""
        watched = cls.__new__(cls)
        watched.__dict__.update(scheduler.__dict__, instance=instance, name=name, note=note, causes=[])
        return watched

    # Events, noted on their way

    def on_arrival(self, request: Request) -> None:
        self.causes.append(f"{self.name(request)} arrives")
        super().on_arrival(request)

    def on_parked(self, cohort: Cohort, inside: float) -> None:
        if not cohort.abandoned:
            self.causes.append(f"{self._names(cohort.members)} has pulled over, {inside:.0%} through")
        super().on_parked(cohort, inside)

    def on_completion(self, cohort: Cohort) -> list[Request]:
        members = list(cohort.members)
        finished = super().on_completion(cohort)
        going_on = [request for request in members if request not in finished]
        if finished:
            self.causes.append(f"{self._names(finished)} completed")
        if going_on:
            self.causes.append(f"a slice of {self._names(going_on)} completed")
        return finished

    def on_failure(self, cohort: Cohort, *, alone: bool = True) -> list[Request]:
        self.causes.append(f"{self._names(cohort.members)} failed")
        return super().on_failure(cohort, alone=alone)

    def on_park_requested(self) -> None:
        self.causes.append("a decode step is due")
        super().on_park_requested()

    def on_abort(self, request: Request) -> None:
        self.causes.append(f"{self.name(request)} leaves")
        super().on_abort(request)

    def decide(self, now: float) -> Decision:
        contenders = self._contenders(now)
        parking = self.running is not None and self.running.phase == Phase.PARKING
        decision = super().decide(now)
        cohort = decision.start or decision.resume or decision.park
        action = next((name for name in ("start", "resume", "park") if getattr(decision, name) is not None), "nothing")
        if contenders and (self.causes or cohort is not None):
            why = Reason(self, self._predict, self.name, contenders, now).of(action, cohort, parking)
            members = tuple(cohort.members) if cohort is not None else ()
            self.note(Choice(self.instance, now, tuple(self.causes), tuple(contenders), action, members, why))
        self.causes.clear()
        return decision

    def _names(self, requests: Sequence[Request]) -> str:
        return " and ".join(self.name(request) for request in requests)

    def _contenders(self, now: float) -> list[Contender]:
        """All that could be computed next, highest rank first; of a cohort its head."""
        found = [self._contender(candidate, "waiting", now) for candidate in self.waiting.ranked(now)]
        for cohort in (*self.parked, self.running):
            if cohort is not None and not cohort.abandoned:
                state = {Phase.PARKING: "pulling over"}.get(cohort.phase, cohort.phase.value)
                candidate = Candidate(cohort.head, cohort.remaining + cohort.later)
                found.append(self._contender(candidate, state, now, tuple(member.id for member in cohort.members)))
        return sorted(found, key=lambda contender: (contender.rank, contender.request.id))

    def _contender(self, candidate: Candidate, state: str, now: float, cohort: tuple[int, ...] = ()) -> Contender:
        request, order = candidate.request, self.system.order
        return Contender(
            request=request,
            state=state,
            tokens=request.remaining,
            remaining=candidate.remaining,
            slack=request.deadline - now - candidate.remaining,
            priority=priority(order, candidate, now),
            rank=order.rank(candidate, now),
            cohort=cohort,
        )


class Decisions:
    """All choices of an engine's run, of all its instances: `simulate(..., on_start=decisions.watch)`."""

    def __init__(self, name: Callable[[Request], str]) -> None:
        self.choices: list[Choice] = []
        self._name = name

    def watch(self, engine: Engine) -> None:
        """Put a `Watched` scheduler in the place of each prefilling instance's."""
        for instance in engine.prefill:
            prefills = instance.prefills
            prefills.scheduler = Watched.over(prefills.scheduler, prefills.name, self._name, self.choices.append)
