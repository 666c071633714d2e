"""The requests that wait for a prefill, or for their next chunk, in priority order."""

from __future__ import annotations

from collections.abc import Iterator

from scheduling.order import Candidate, Order
from scheduling.request import Request


class Waiting:
    """A plain dictionary that is ranked anew at every look: right for every order, and the measure of cleverer ones."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._candidates: dict[int, Candidate] = {}  # by request id

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._candidates

    def __iter__(self) -> Iterator[Request]:
        return (candidate.request for candidate in self._candidates.values())

    def add(self, candidate: Candidate) -> None:
        self._candidates[candidate.request.id] = candidate

    def discard(self, request: Request) -> None:
        self._candidates.pop(request.id, None)

    def first(self, now: float, *, admitted_only: bool = False) -> Candidate | None:
        """The highest-ranked candidate; of those that hold their blocks already, if `admitted_only`."""
        return next((c for c in self.ranked(now) if c.request.admitted or not admitted_only), None)

    def ranked(self, now: float) -> Iterator[Candidate]:
        """All candidates, highest rank first."""
        return iter(
            sorted(self._candidates.values(), key=lambda c: (self._order.rank(c, now), c.request.id)),
        )

    def take_refused(self, now: float) -> list[Request]:
        """Remove and return those that have not begun and that the order turns away at `now`."""
        refused = [
            c.request for c in self._candidates.values() if not c.request.admitted and self._order.refuses(c, now)
        ]
        for request in refused:
            self.discard(request)
        return refused
