"""The cohorts that have pulled over, in priority order."""

from __future__ import annotations

from collections.abc import Iterator

from scheduling.cohort import Cohort
from scheduling.order import Order
from scheduling.ranked import Size
from scheduling.request import Request
from scheduling.waiting import waiting_for

_ADMITTED = Size(0, 0)


class Parked:
    """What a parked cohort still needs stands still, as it does for a waiting request; it queues like one, by its head.

    `held_bytes` is what all of them keep alive. Iterates in the order in which they were parked.
    """

    def __init__(self, order: Order) -> None:
        self.held_bytes = 0
        self._cohorts: dict[int, Cohort] = {}  # by cohort id
        self._led_by: dict[int, Cohort] = {}  # by the head's request id
        self._heads = waiting_for(order)
        self._abandoned: list[Cohort] = []

    def __len__(self) -> int:
        return len(self._cohorts)

    def __iter__(self) -> Iterator[Cohort]:
        return iter(self._cohorts.values())

    def add(self, cohort: Cohort) -> None:
        self._cohorts[cohort.id] = cohort
        self.held_bytes += cohort.held_bytes
        self._queue(cohort)

    def remove(self, cohort: Cohort) -> None:
        del self._cohorts[cohort.id]
        self.held_bytes -= cohort.held_bytes
        if not cohort.abandoned:
            del self._led_by[cohort.head.id]
            self._heads.discard(cohort.head)

    def first(self, now: float) -> Cohort | None:
        """The one whose head ranks highest."""
        candidate = self._heads.first(now)
        return None if candidate is None else self._led_by[candidate.request.id]

    def on_left(self, cohort: Cohort, head: Request) -> None:
        """A member has left the cohort, which `head` has led so far."""
        self._led_by.pop(head.id)
        self._heads.discard(head)
        self._queue(cohort)

    def take_abandoned(self) -> list[Cohort]:
        """Remove and return those that everybody has left."""
        abandoned, self._abandoned = self._abandoned, []
        for cohort in abandoned:
            self.remove(cohort)
        return abandoned

    def _queue(self, cohort: Cohort) -> None:
        if cohort.abandoned:
            self._abandoned.append(cohort)
        else:
            self._led_by[cohort.head.id] = cohort
            self._heads.add(cohort.candidate, _ADMITTED)
