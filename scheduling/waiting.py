"""The requests that wait for a prefill, or for their next chunk, in priority order.

Two queues that answer alike. `ResortingWaiting` sorts at every look: it serves any order, and is the measure of the
other. `SortedWaiting` stays sorted: while a request waits, its prompt, its predicted time and its deadline stand still,
so its rank changes only at moments known beforehand (under S-EDF once, when its slack runs out). A look costs O(log n)
for each rank that has changed since the last, and nothing else.

The clock never runs backwards: `now` is at least what it was at the look before.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Protocol

from scheduling.order import Candidate, Foreseeable, Order
from scheduling.ranked import Place, RankedList, Room, Size
from scheduling.request import Request


class Waiting(Protocol):
    """What the scheduler asks of its queue."""

    def __len__(self) -> int: ...

    def __contains__(self, request: Request) -> bool: ...

    def __iter__(self) -> Iterator[Request]: ...

    def add(self, candidate: Candidate, size: Size) -> None: ...

    def discard(self, request: Request) -> None:
        """Take a request out. One that is not in is no error."""
        ...

    def first(self, now: float, *, admitted_only: bool = False) -> Candidate | None:
        """The highest-ranked candidate; of those that hold their blocks already, if `admitted_only`."""
        ...

    def ranked(self, now: float, room: Room | None = None, *, admitted_first: bool = False) -> Iterator[Candidate]:
        """Candidates, highest rank first; all that hold their blocks before all others, if `admitted_first`.

        Those that are too large for `room` may be left out. It is read on the way and may shrink, so the caller has to
        look again at what it gets.
        """
        ...

    def take_refused(self, now: float) -> list[Request]:
        """Remove and return those that have not begun and that the order turns away at `now`."""
        ...


def waiting_for(order: Order) -> Waiting:
    """The best queue that the order allows."""
    return SortedWaiting(order) if isinstance(order, Foreseeable) else ResortingWaiting(order)


class ResortingWaiting:
    """A plain dictionary that is ranked anew at every look."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._candidates: dict[int, Candidate] = {}  # by request id

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._candidates

    def __iter__(self) -> Iterator[Request]:
        return (candidate.request for candidate in self._candidates.values())

    def add(self, candidate: Candidate, size: Size) -> None:
        self._candidates[candidate.request.id] = candidate

    def discard(self, request: Request) -> None:
        self._candidates.pop(request.id, None)

    def first(self, now: float, *, admitted_only: bool = False) -> Candidate | None:
        return next((c for c in self.ranked(now) if c.request.admitted or not admitted_only), None)

    def ranked(self, now: float, room: Room | None = None, *, admitted_first: bool = False) -> Iterator[Candidate]:
        def key(candidate: Candidate) -> object:
            begun = admitted_first and candidate.request.admitted
            return not begun, self._order.rank(candidate, now), candidate.request.id

        return iter(sorted(self._candidates.values(), key=key))  # type: ignore[arg-type]

    def take_refused(self, now: float) -> list[Request]:
        refused = [c.request for c in self._candidates.values() if c.request.refusable and self._order.refuses(c, now)]
        for request in refused:
            self.discard(request)
        return refused


class SortedWaiting:
    """Sorted at all times, by an order that says when a rank will change.

    Who holds blocks and who does not stand in a list each, since the scheduler at times wants the former only.
    """

    def __init__(self, order: Foreseeable) -> None:
        self._order = order
        self._places: dict[int, Place] = {}  # by request id
        self._newcomers = RankedList()
        self._admitted = RankedList()
        self._changes: list[tuple[float, int]] = []  # a heap of (when, request id); void unless its place says the same
        self._refused: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._places

    def __iter__(self) -> Iterator[Request]:
        return (place.candidate.request for place in self._places.values())

    def add(self, candidate: Candidate, size: Size) -> None:
        place = Place(candidate, size)
        self._places[candidate.request.id] = place
        heappush(self._changes, (place.changes, candidate.request.id))  # ranked at the next look, by its clock

    def discard(self, request: Request) -> None:
        place = self._places.pop(request.id, None)
        if place is None:
            return
        if place.key is not None:
            self._list(place).remove(place.key)
        if len(self._changes) > 2 * len(self._places) + 64:  # mostly of requests that have left
            self._changes = [(p.changes, id) for id, p in self._places.items() if p.changes < inf]
            heapify(self._changes)

    def first(self, now: float, *, admitted_only: bool = False) -> Candidate | None:
        self._advance(now)
        lists = (self._admitted,) if admitted_only else (self._admitted, self._newcomers)
        firsts = [place for ranked in lists if (place := ranked.first()) is not None]
        return min(firsts, key=_key).candidate if firsts else None

    def ranked(self, now: float, room: Room | None = None, *, admitted_first: bool = False) -> Iterator[Candidate]:
        self._advance(now)
        room = room or Room()
        admitted, newcomers = self._admitted.within(room), self._newcomers.within(room)
        places = chain(admitted, newcomers) if admitted_first else merge(admitted, newcomers, key=_key)
        return (place.candidate for place in places)

    def take_refused(self, now: float) -> list[Request]:
        self._advance(now)
        places, self._refused = self._refused, []
        refused = [p.candidate.request for p in places if self._places.get(p.candidate.request.id) is p]
        for request in refused:
            self.discard(request)
        return refused

    def _advance(self, now: float) -> None:
        """Rank anew those whose rank may have changed by `now`."""
        while self._changes and self._changes[0][0] <= now:
            moment, request_id = heappop(self._changes)
            place = self._places.get(request_id)
            if place is not None and place.changes == moment:
                self._rank(place, now)

    def _rank(self, place: Place, now: float) -> None:
        candidate, ranked = place.candidate, self._list(place)
        if place.key is not None:
            ranked.remove(place.key)
        place.key = (self._order.rank(candidate, now), candidate.request.id)
        ranked.add(place.key, place)
        place.changes = self._order.next_change(candidate, now)
        if place.changes <= now:
            raise ValueError(f"{self._order}: at {now}, the next change of a rank was said to be at {place.changes}")
        if place.changes < inf:
            heappush(self._changes, (place.changes, candidate.request.id))
        if candidate.request.refusable and self._order.refuses(candidate, now):
            self._refused.append(place)

    def _list(self, place: Place) -> RankedList:
        return self._admitted if place.candidate.request.admitted else self._newcomers


_key = attrgetter("key")
