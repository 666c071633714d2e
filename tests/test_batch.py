"""Batch policies: Algorithm 1 against its plainest form, passes filled with chunks, and thousands that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_helpers import BLOCK, PREDICTOR, Blocks, Device, Job
from test_scheduling_properties import crowds, devices, orders, seconds, slo_aware, tokens

from scheduling.batch import Batch, FillBudget, FillChunks, Forming, SLOAware, blocks_needed
from scheduling.order import EDF, FCFS, SEDF, Candidate, Order
from scheduling.plan import Chunked, Plan, Share, Whole, later_extents, next_share
from scheduling.preempt import Preempt
from scheduling.presets import System, preset
from scheduling.ranked import Size
from scheduling.request import SLO, Request
from scheduling.scheduler import Scheduler
from scheduling.waiting import SortedWaiting

many = settings(max_examples=300, deadline=None)


def plain_algorithm_1(
    policy: SLOAware, head: Share, others: Sequence[Request], plan: Plan, now: float, free_blocks: int
) -> list[Share]:
    """The paper's loop with the variations of the authors' code: every candidate is looked at, and every prediction is
    made from the whole batch."""
    batch, blocks = [head], free_blocks - blocks_needed(head.request, BLOCK)
    if policy.long_head_alone and head.request.remaining > policy.budget:
        return batch
    later = sum(PREDICTOR([extent]) for extent in later_extents(plan, head.request, head.stop))
    remaining = head.request.deadline - now - later - policy.margin * (head.request.slo.ttft or 0)
    for request in others:
        share, needed = next_share(plan, request), blocks_needed(request, BLOCK)
        if sum(s.tokens for s in batch) + share.tokens > policy.budget or needed > blocks:
            if policy.on_misfit == "stop":
                break
        elif PREDICTOR([s.extent for s in (*batch, share)]) > remaining:
            if policy.on_late == "stop":
                break
        else:
            batch.append(share)
            blocks -= needed
    return batch


@dataclass(frozen=True, slots=True)
class Stands:
    """A request that waits: `computed` of its tokens are in the cache, and then it holds its blocks."""

    tokens: int
    computed: int
    ttft: float | None

    def request(self, number: int) -> Request:
        computed = min(self.computed, self.tokens - 1)
        return Request(number, range(self.tokens), slo=SLO(self.ttft), computed=computed, admitted=computed > 0)


waiting = st.lists(
    st.builds(Stands, tokens, st.one_of(st.just(0), st.just(0), st.integers(0, 60)), st.one_of(seconds(2), st.none())),
    min_size=1,
    max_size=40,
)
plans = st.one_of(st.just(Whole()), st.builds(Chunked, st.integers(1, 40), above=st.sampled_from([0, 30])))


@many
@given(policy=slo_aware, order=orders, plan=plans, waiting=waiting, now=seconds(1.5), free=st.integers(16, 80))
def test_algorithm_1_is_its_plain_form(
    policy: SLOAware, order: Order, plan: Plan, waiting: list[Stands], now: float, free: int
) -> None:
    """Whom the queue passes over, the plain form has looked at and skipped."""
    queue = SortedWaiting(order)  # type: ignore[arg-type]
    for number, each in enumerate(waiting):
        request = each.request(number)
        remaining = sum(PREDICTOR([extent]) for extent in later_extents(plan, request, request.computed))
        queue.add(Candidate(request, remaining), Size(plan.take(request), blocks_needed(request, BLOCK)))
    head, *others = [candidate.request for candidate in queue.ranked(now)]
    own = next_share(plan, head)
    forming = Forming(free, BLOCK)
    shown = (c.request for c in queue.ranked(now, forming.room) if c.request is not head)
    formed = policy.form(own, shown, plan, PREDICTOR, now, forming)
    assert formed == plain_algorithm_1(policy, own, others, plan, now, free)


def form(policy: Batch, lengths: list[int], time_left: float) -> list[int]:
    """Tokens of the batch that a head of `lengths[0]` forms when the others stand in line behind it."""
    queue = SortedWaiting(FCFS())
    requests = [Request(i, range(n), slo=SLO(ttft=time_left), arrival=0.0) for i, n in enumerate(lengths)]
    for request in requests[1:]:
        queue.add(Candidate(request, 1.0), Size(len(request.prompt), 1))
    forming = Forming(1000, BLOCK)
    shown = (candidate.request for candidate in queue.ranked(0.0, forming.room))
    head = next_share(Whole(), requests[0])
    return [share.tokens for share in policy.form(head, shown, Whole(), PREDICTOR, 0.0, forming)]


def test_what_just_fits_the_time_left_is_not_passed_over() -> None:
    """Beside the head there is time for 20 tokens, and none for 21; the second look knows that from the first."""
    time = PREDICTOR([(0, 10), (0, 20)])
    assert form(SLOAware(64), [10, 21, 20, 1], time) == [10, 20]
    assert form(SLOAware(64), [10, 21, 19, 1], time) == [10, 19, 1]
    assert form(SLOAware(64, on_late="stop"), [10, 21, 20, 1], time) == [10]


def test_stopping_at_a_misfit_means_at_every_misfit() -> None:
    """Also at one that stands behind a late one, and would have been late itself."""
    time = PREDICTOR([(0, 10), (0, 20)])
    assert form(SLOAware(64, on_misfit="stop"), [10, 21, 60, 5], time) == [10]
    assert form(SLOAware(64, on_misfit="stop"), [10, 21, 50, 5], time) == [10, 5]
    assert form(SLOAware(64, on_misfit="skip"), [10, 21, 60, 5], time) == [10, 5]


# Thousands that do not fit


@dataclass(frozen=True, slots=True)
class Looks(Whole):
    """Counts how many shares are made: one for each request that a policy looks at."""

    at: list[int] = field(default_factory=list)

    def take(self, request: Request) -> int:
        self.at.append(request.id)
        return request.remaining


@pytest.mark.parametrize(
    ("head", "others", "free_blocks", "budget", "why"),
    [
        ((100, 60.0), (4000, 90.0), 10**6, 4096, "the budget"),
        ((100, 3.3), (300, 90.0), 10**6, 4096, "the time left"),
        ((100, 60.0), (300, 90.0), 64, 4096, "the KV blocks"),
        ((5000, 9000.0), (1, 9900.0), 10**6, 4096, "a budget that the head exceeds"),
    ],
)
def test_ten_thousand_misfits_are_not_looked_at(
    head: tuple[int, float], others: tuple[int, float], free_blocks: int, budget: int, why: str
) -> None:
    plan = Looks()
    system = System(SEDF(), SLOAware(budget), plan, Preempt.OPERATOR)
    scheduler = Scheduler(system, PREDICTOR, Blocks(free_blocks), 2)
    for number, (length, ttft) in enumerate([head, *[others] * 10_000]):
        scheduler.on_arrival(Request(number, range(length), slo=SLO(ttft)))
    scheduler.waiting.first(0.0)
    plan.at.clear()
    started = scheduler.decide(0.0).start
    assert started is not None and [share.request.id for share in started.shares] == [0], why
    assert len(plan.at) <= 4


def test_the_one_that_fits_is_found_behind_ten_thousand_that_do_not() -> None:
    plan = Looks()
    scheduler = Scheduler(System(SEDF(), SLOAware(512), plan, Preempt.OPERATOR), PREDICTOR, Blocks(10**6), 2)
    lengths = [100] + [500] * 10_000 + [50]
    for number, length in enumerate(lengths):
        scheduler.on_arrival(Request(number, range(length), slo=SLO(ttft=60.0 + number)))
    scheduler.waiting.first(0.0)
    plan.at.clear()
    started = scheduler.decide(0.0).start
    assert started is not None and [share.request.id for share in started.shares] == [0, 10_001]
    assert len(plan.at) <= 5


# Passes filled with chunks


def shares(device: Device) -> list[list[tuple[int, int, int]]]:
    return [[(s.request.id, s.start, s.stop) for s in cohort.shares] for _, cohort in device.starts]


def test_the_last_chunk_of_one_prompt_is_computed_beside_the_first_of_the_next() -> None:
    system = System(FCFS(), FillChunks(8), Chunked(8), Preempt.SLICE)
    device = Device(system, [Job(0.0, 19), Job(0.0, 13), Job(0.0, 2)])
    device.run()
    assert shares(device) == [
        [(0, 0, 8)],
        [(0, 8, 16)],
        [(0, 16, 19), (1, 0, 5)],
        [(1, 5, 13)],
        [(2, 0, 2)],
    ]


def test_chunks_smaller_than_the_budget_share_a_pass() -> None:
    system = System(FCFS(), FillChunks(8), Chunked(3), Preempt.SLICE)
    device = Device(system, [Job(0.0, 7), Job(0.0, 5), Job(0.0, 5)])
    device.run()
    assert shares(device)[:2] == [[(0, 0, 3), (1, 0, 3), (2, 0, 2)], [(0, 3, 6), (1, 3, 5), (2, 2, 5)]]


@pytest.mark.parametrize(
    ("preempt", "order", "second_pass"),
    [
        (Preempt.SLICE, FCFS(), [(0, 8, 16)]),
        (Preempt.SLICE, EDF(), [(1, 0, 4), (0, 8, 12)]),  # the urgent one, and what then fits of the other
        (Preempt.NEVER, EDF(), [(0, 8, 16)]),  # running first: what has begun goes before what has not
    ],
)
def test_who_comes_first_between_two_chunks_is_a_knob(
    preempt: Preempt, order: Order, second_pass: list[tuple[int, int, int]]
) -> None:
    system = System(order, FillChunks(8), Chunked(8), preempt)
    device = Device(system, [Job(0.0, 20, ttft=50.0), Job(1 / 32, 4, ttft=5.0)])
    device.run()
    assert shares(device)[1] == second_pass


def test_running_first_shares_what_is_left_in_priority_order() -> None:
    """Two have begun (a chunk is smaller than the budget); then the most urgent newcomer comes before the other."""
    system = System(EDF(), FillChunks(8), Chunked(4), Preempt.NEVER)
    late_comers = [Job(1 / 32, 2, ttft=9.0), Job(1 / 32, 2, ttft=5.0)]
    device = Device(system, [Job(0.0, 6, ttft=50.0), Job(0.0, 7, ttft=60.0), *late_comers])
    device.run()
    assert shares(device)[:2] == [[(0, 0, 4), (1, 0, 4)], [(0, 4, 6), (1, 4, 7), (3, 0, 2), (2, 0, 1)]]


chunks = st.tuples(st.integers(1, 32), st.integers(0, 32)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@many
@given(chunk=chunks, jobs=crowds, device=devices, order=orders)
def test_passes_are_filled_and_never_over_full(
    chunk: tuple[int, int], jobs: list[Job], device: partial[Device], order: Order
) -> None:
    size, budget = chunk
    played = device(System(order, FillChunks(budget), Chunked(size), Preempt.SLICE), jobs, num_blocks=1000)
    played.run()
    for _, cohort in played.starts:
        *full, last = cohort.shares
        assert cohort.tokens <= budget
        assert all(share.tokens == size or share.last for share in full), "only the last one is cut"
        assert last.tokens == size or last.last or cohort.tokens == budget


@many
@given(chunk=chunks, jobs=crowds, device=devices, order=orders)
def test_running_first_bounds_how_many_are_under_way(
    chunk: tuple[int, int], jobs: list[Job], device: partial[Device], order: Order
) -> None:
    """Where nothing overtakes what has begun, at most ceil(budget / chunk) prompts have begun and not finished."""
    size, budget = chunk
    played = device(System(order, FillChunks(budget), Chunked(size), Preempt.NEVER), jobs)
    started: set[Request] = set()
    decide = played.scheduler.decide

    def watched(now: float) -> object:
        partial_prefills = [r for r in played.scheduler.waiting if r.computed and not r.alone]
        assert len(partial_prefills) <= ceil(budget / size)
        started.update(partial_prefills)
        return decide(now)

    played.scheduler.decide = watched  # type: ignore[method-assign,assignment]
    played.run()


def test_a_head_gets_on_however_full_the_pass_is() -> None:
    """The rows of decodes may have filled it already."""
    head = Request(0, range(100))
    forming = Forming(1000, BLOCK, decode_rows=512)
    formed = FillChunks(512).form(next_share(Chunked(512), head), [], Chunked(512), PREDICTOR, 0.0, forming)
    assert [(share.start, share.stop) for share in formed] == [(0, 1)]


def test_what_the_head_and_the_decodes_leave_is_shared_and_no_more() -> None:
    """Nobody joins a head that has got its one row though the pass was full."""
    plan = Chunked(512)

    def formed(decodes: int, length: int, budget: int = 512, decodes_count: bool = True) -> list[int]:
        forming = Forming(1000, BLOCK, decode_rows=decodes)
        others = [Request(1, range(100)), Request(2, range(600))]
        batch = FillChunks(budget, decodes_count)
        head = next_share(plan, Request(0, range(length)))
        return [share.tokens for share in batch.form(head, others, plan, PREDICTOR, 0.0, forming)]

    assert formed(512, 4) == formed(600, 4) == [1]
    assert formed(500, 4) == [4, 8]
    assert formed(500, 12) == [12]
    assert formed(400, 4) == [4, 100, 8]
    assert formed(600, 4, decodes_count=False) == [4, 100, 408]


@pytest.mark.parametrize(
    ("computed", "alone", "taken"),
    [
        (0, True, [1000]),  # 2,500 tokens left are more than 2,048, though the chunk would leave room
        (451, True, [1000]),  # 2,049
        (452, True, [1000, 30]),  # 2,048
        (2000, True, [500, 30]),  # its last chunk
        (0, False, [1000, 30]),
    ],
)
def test_a_long_head_takes_nobody_along(computed: int, alone: bool, taken: list[int]) -> None:
    """FlowPrefill's released code: what counts is what is left of the prompt, not of this chunk."""
    batch, plan = SLOAware(2048, long_head_alone=alone), Chunked(1000)
    head = Request(0, range(2500), computed=computed)
    formed = batch.form(next_share(plan, head), [Request(1, range(30))], plan, PREDICTOR, 0.0, Forming(1000, BLOCK))
    assert [share.tokens for share in formed] == taken


def test_without_blocks_for_the_next_in_line_nobody_behind_it_joins() -> None:
    """Else a long prompt would be overtaken for as long as short ones come."""
    system = System(FCFS(), FillChunks(64), Chunked(64), Preempt.SLICE)
    device = Device(system, [Job(0.0, 8), Job(0.0, 40), Job(0.0, 4)], num_blocks=10)
    device.run()
    assert shares(device) == [[(0, 0, 8)], [(1, 0, 40)], [(2, 0, 4)]]


# The presets' long prompts


@pytest.mark.parametrize(
    ("system", "length", "passes"),
    [
        ("distserve", 40_000, [40_000]),
        ("distserve-cp2k", 5_000, [2048, 2048, 904]),
        ("distserve-cp8k", 40_000, [8192] * 4 + [7232]),
        ("restart", 40_000, [40_000]),
        ("flowprefill", 32_768, [32_768]),
        ("flowprefill", 32_769, [8192] * 4 + [1]),
        ("flowprefill-layer", 40_000, [40_000]),
        ("flowprefill-release", 20_000, [8192, 8192, 3616]),
    ],
)
def test_how_the_presets_cut_a_long_prompt(system: str, length: int, passes: list[int]) -> None:
    device = Device(preset(system), [Job(0.0, length, ttft=1e6)], num_blocks=20_000)
    device.run()
    assert [cohort.tokens for _, cohort in device.starts] == passes


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FillBudget(0), "token budget must be at least 1, got 0"),
        (lambda: FillChunks(-1), "token budget must be at least 1, got -1"),
        (lambda: SLOAware(0), "token budget must be at least 1, got 0"),
        (lambda: SLOAware(margin=1.0), "margin must be at least 0 and below 1 of the TTFT target, got 1.0"),
        (lambda: SLOAware(on_misfit="wait"), "on_misfit must be 'skip' or 'stop', got 'wait'"),  # type: ignore[arg-type]
        (lambda: SLOAware(on_late="drop"), "on_late must be 'skip' or 'stop', got 'drop'"),  # type: ignore[arg-type]
        (lambda: Chunked(0), "chunk size must be at least 1 token, got 0"),
        (lambda: Chunked(1, above=-1), "chunked.above must be 0 tokens or more, got -1"),
    ],
)
def test_a_policy_that_cannot_be_says_why(make: type[Batch], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_best_effort_head_has_all_the_time_there_is() -> None:
    forming = Forming(1000, BLOCK)
    head, mate = Request(0, range(4)), Request(1, range(60))
    assert head.deadline == inf
    formed = SLOAware(64).form(next_share(Whole(), head), [mate], Whole(), PREDICTOR, 0.0, forming)
    assert [share.request.id for share in formed] == [0, 1]
