"""The queue that stays sorted answers as the one that sorts at every look, and does so without looking at everybody."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_helpers import Device, Job
from test_scheduling_properties import devices, jobs, rivals, seconds, systems

from scheduling import parked, scheduler
from scheduling.order import DEDF, EDF, FCFS, SEDF, SJF, Candidate, Late, Order, Rank
from scheduling.presets import System
from scheduling.ranked import Place, RankedList, Room, Size
from scheduling.request import SLO, Request
from scheduling.waiting import ResortingWaiting, SortedWaiting, Waiting, waiting_for

many = settings(max_examples=300, deadline=None)

late = st.sampled_from(Late)
orders = st.one_of(
    st.sampled_from([FCFS(), SJF(), EDF()]),
    st.builds(DEDF, late=late, patience=st.sampled_from([1.5, 4.0])),
    st.builds(SEDF, late=late, patience=st.sampled_from([1.5, 4.0])),
)
sizes = st.builds(Size, st.integers(1, 9), st.integers(0, 3))
rooms = st.builds(Room, st.integers(0, 9), st.integers(0, 3))


@dataclass(frozen=True, slots=True)
class Comes:
    """A request, or its next chunk, begins to wait."""

    number: int
    arrival: float
    ttft: float | None
    remaining: float
    size: Size


@dataclass(frozen=True, slots=True)
class Leaves:
    number: int


@dataclass(frozen=True, slots=True)
class Look:
    """At everything the scheduler looks at, `later` seconds after the look before."""

    later: float
    room: Room


numbers = st.integers(0, 12)
steps = st.one_of(
    st.builds(Comes, numbers, seconds(2), st.one_of(st.none(), seconds(3)), seconds(2), sizes),
    st.builds(Leaves, numbers),
    st.builds(Look, st.integers(0, 8).map(lambda n: n / 16), rooms),
)


def fits(candidate: Candidate, room: Room, sizes: dict[int, Size]) -> bool:
    size = sizes[candidate.request.id]
    return size.tokens <= room.tokens and size.blocks <= room.blocks


@many
@given(order=orders, story=st.lists(steps, max_size=40))
def test_the_sorted_queue_answers_as_the_resorting_one(order: Order, story: list[Comes | Leaves | Look]) -> None:
    """Times are binary fractions, so looks fall exactly on the moments at which ranks change."""
    queues: list[Waiting] = [SortedWaiting(order), ResortingWaiting(order)]  # type: ignore[arg-type]
    requests: dict[int, Request] = {}
    sizes: dict[int, Size] = {}
    now = 0.0
    for step in story:
        match step:
            case Comes(number, arrival, ttft, remaining, size) if number not in requests:
                request = Request(number, (), slo=SLO(ttft), arrival=arrival, admitted=size.blocks == 0)
                requests[number], sizes[number] = request, size
                for queue in queues:
                    queue.add(Candidate(request, remaining), size)
            case Leaves(number):
                gone = requests.pop(number, None) or Request(number, ())
                for queue in queues:
                    queue.discard(gone)
            case Look(later, room):
                now += later
                firsts = [[queue.first(now), queue.first(now, admitted_only=True)] for queue in queues]
                assert firsts[0] == firsts[1]
                for first in (False, True):
                    ranked = [list(queue.ranked(now, admitted_first=first)) for queue in queues]
                    assert ranked[0] == ranked[1]
                    small = [list(queue.ranked(now, room, admitted_first=first)) for queue in queues]
                    assert small[0] == [c for c in small[1] if fits(c, room, sizes)]
                refused = [queue.take_refused(now) for queue in queues]
                assert sorted(r.id for r in refused[0]) == sorted(r.id for r in refused[1])
                for request in refused[0]:
                    del requests[request.id]
        assert len(queues[0]) == len(queues[1]) == len(requests)
        assert list(queues[0]) == list(queues[1]) == list(requests.values())
        assert all(request in queue for queue in queues for request in requests.values())


@settings(max_examples=200, deadline=None)
@given(system=systems, jobs=st.one_of(jobs, rivals), device=devices)
def test_every_decision_is_that_of_the_resorting_queue(
    system: System, jobs: list[Job], device: partial[Device]
) -> None:
    """The whole scheduler on random traces: who starts when and with whom, who parks, who ends how. The re-sorting
    queue also shows the batch policy every misfit, so that this is Algorithm 1 without a short cut as well."""

    def play() -> tuple[object, ...]:
        played = device(system, jobs)
        played.run()
        starts = [(time, [(s.request.id, s.start, s.stop) for s in cohort.shares]) for time, cohort in played.starts]
        return starts, [cohort.id for cohort in played.parks], [request.state for request in played.requests]

    sorted_at_all_times = play()
    with (
        mock.patch.object(scheduler, "waiting_for", ResortingWaiting),
        mock.patch.object(parked, "waiting_for", ResortingWaiting),
    ):
        assert play() == sorted_at_all_times


@many
@given(
    order=orders,
    request=st.builds(lambda a, t: Request(0, (), slo=SLO(t), arrival=a), seconds(2), st.one_of(st.none(), seconds(3))),
    remaining=seconds(2),
    now=seconds(8),
)
def test_between_the_changes_that_an_order_foresees_nothing_changes(
    order: SEDF, request: Request, remaining: float, now: float
) -> None:
    candidate = Candidate(request, remaining)

    def answers(now: float) -> tuple[Rank, bool]:
        return order.rank(candidate, now), order.refuses(candidate, now)

    change = order.next_change(candidate, now)
    assert change > now
    until = min(change, now + 100.0)
    assert all(answers(now + part / 8 * (until - now)) == answers(now) for part in range(8))
    if change < inf:
        assert answers(change) != answers(now)


# What it costs


class Counting(SEDF):
    """S-EDF that counts how often it is asked."""

    asked: ClassVar[Counter[str]] = Counter()

    def rank(self, candidate: Candidate, now: float) -> Rank:
        self.asked["rank"] += 1
        return SEDF.rank(self, candidate, now)


def test_a_look_at_ten_thousand_ranks_only_those_whose_rank_has_changed() -> None:
    queue = SortedWaiting(Counting())
    for i in range(10_000):
        queue.add(Candidate(Request(i, (), slo=SLO(ttft=1.0 + i), arrival=0.0), 0.5), Size(1, 1))
    assert queue.first(0.0).request.id == 0  # type: ignore[union-attr]
    Counting.asked.clear()
    assert queue.first(0.25).request.id == 0  # type: ignore[union-attr]
    assert not Counting.asked
    assert queue.first(9.75).request.id == 10  # type: ignore[union-attr]
    assert Counting.asked["rank"] == 10, "0 to 9 have become late"
    queue.add(Candidate(Request(10_000, (), slo=SLO(ttft=0.5), arrival=9.75), 0.25), Size(1, 1))
    assert queue.first(9.75).request.id == 10_000  # type: ignore[union-attr]
    assert Counting.asked["rank"] == 11


def test_requests_that_left_long_before_their_deadline_leave_nothing_behind() -> None:
    queue = SortedWaiting(SEDF())
    for i in range(10_000):
        request = Request(i, (), slo=SLO(ttft=1e6), arrival=float(i))
        queue.add(Candidate(request, 1.0), Size(1, 1))
        assert queue.first(float(i)) is not None
        queue.discard(request)
    assert len(queue) == 0 and len(queue._changes) <= 65


# Which queue for which order


class ByLabel:
    """An order with nothing but a rank."""

    def rank(self, candidate: Candidate, now: float) -> Rank:
        return 0, float(len(candidate.request.label))

    def refuses(self, candidate: Candidate, now: float) -> bool:
        return False


def test_an_order_that_foresees_nothing_is_sorted_at_every_look() -> None:
    queue = waiting_for(ByLabel())
    assert isinstance(queue, ResortingWaiting)
    for i, label in enumerate(("long label", "short")):
        queue.add(Candidate(Request(i, (), label=label), 1.0), Size(1, 1))
    assert [c.request.id for c in queue.ranked(0.0)] == [1, 0]


@pytest.mark.parametrize("order", [FCFS(), SJF(), EDF(), DEDF(), SEDF()])
def test_every_order_of_ours_stays_sorted(order: Order) -> None:
    assert isinstance(waiting_for(order), SortedWaiting)


class Stuck(FCFS):
    def next_change(self, candidate: Candidate, now: float) -> float:
        return now


def test_an_order_that_foresees_a_change_in_the_past_is_told_so() -> None:
    queue = SortedWaiting(Stuck())
    queue.add(Candidate(Request(0, ()), 1.0), Size(1, 1))
    with pytest.raises(ValueError, match=r"at 2\.0, the next change of a rank was said to be at 2\.0"):
        queue.first(2.0)


# The list beneath


@many
@given(
    bucket=st.integers(1, 4),
    changes=st.lists(st.tuples(st.booleans(), st.integers(0, 30), sizes), max_size=60),
    shrinking=st.lists(rooms, min_size=1, max_size=5),
)
def test_a_ranked_list_is_a_sorted_list(
    bucket: int, changes: list[tuple[bool, int, Size]], shrinking: list[Room]
) -> None:
    ranked, plain = RankedList(bucket), dict[int, Place]()
    for adds, number, size in changes:
        key = ((0, float(number)), number)
        if adds and number not in plain:
            plain[number] = Place(Candidate(Request(number, ()), 0.0), size)
            ranked.add(key, plain[number])
        elif not adds and number in plain:
            del plain[number]
            ranked.remove(key)
        assert len(ranked) == len(plain)
        assert ranked.first() is (plain[min(plain)] if plain else None)
        in_order = [plain[number] for number in sorted(plain)]
        assert list(ranked.within(Room())) == in_order
        for room in shrinking:
            small = [p for p in in_order if p.size.tokens <= room.tokens and p.size.blocks <= room.blocks]
            assert list(ranked.within(room)) == small


def test_a_walk_passes_over_what_became_too_large_on_the_way() -> None:
    ranked = RankedList(2)
    for number, tokens in enumerate((5, 1, 5, 5, 1, 5)):
        ranked.add(((0, 0.0), number), Place(Candidate(Request(number, ()), 0.0), Size(tokens, 1)))
    room = Room(tokens=5)
    walk = ranked.within(room)
    assert next(walk).candidate.request.id == 0
    room.tokens = 1
    assert [place.candidate.request.id for place in walk] == [1, 4]


class CountingRoom(Room):
    """Counts how often somebody asks how many tokens it has room for: once a bucket, and once a place in it."""

    asked = 0

    @property
    def tokens(self) -> float:
        self.asked += 1
        return 10

    @tokens.setter
    def tokens(self, tokens: float) -> None:
        pass


def test_a_walk_looks_at_no_place_of_a_bucket_in_which_all_are_too_large() -> None:
    ranked, last = RankedList(), 9_999
    for number in range(10_000):
        ranked.add(((0, 0.0), number), Place(Candidate(Request(number, ()), 0.0), Size(11 - (number == last), 1)))
    room = CountingRoom()
    assert [place.candidate.request.id for place in ranked.within(room)] == [last]
    assert room.asked <= 10_000 / 64 + 2 * 64
    ranked.remove(((0, 0.0), last))
    room.asked = 0
    assert not list(ranked.within(room))
    assert room.asked <= 10_000 / 64 + 1, "the bucket knows that its only small one has gone"
