"""What holds for every system and any trace: hypothesis plays random ones on a virtual device."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import inf

from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduling_helpers import BLOCK, BOUNDARIES, PREDICTOR, Contender, Device, Job

from scheduling.batch import Alone, Batch, FillBudget, FillChunks, SLOAware, blocks_needed
from scheduling.cohort import Cohort
from scheduling.layered import Layered
from scheduling.order import DEDF, EDF, FCFS, SEDF, SJF, Candidate, Late, Order
from scheduling.plan import Chunked, Plan, Whole, later_extents
from scheduling.preempt import Preempt
from scheduling.presets import PRESETS, System
from scheduling.request import SLO, Request, State

LONGEST = 64  # tokens

many = settings(max_examples=300, deadline=None)


def seconds(limit: float) -> st.SearchStrategy[float]:
    return st.integers(1, int(limit * 16)).map(lambda n: n / 16)


tokens = st.integers(1, LONGEST)
targets = st.one_of(st.none(), seconds(8))
jobs = st.lists(
    st.builds(
        Job,
        arrival=seconds(8),
        tokens=tokens,
        ttft=targets,
        abort_at=st.one_of(st.none(), st.none(), seconds(12)),
        bad=st.integers(0, 4).map(lambda n: n == 0),
    ),
    min_size=1,
    max_size=10,
)
# Few deadlines, most of them too early for some: ties, and requests that turn late while they wait or run.
rivals = st.lists(
    st.builds(
        lambda arrival, deadline, tokens: Job(arrival, tokens, deadline - arrival),
        seconds(2),
        st.integers(5, 8).map(lambda n: n / 2),
        tokens,
    ),
    min_size=2,
    max_size=10,
)
late = st.sampled_from(Late)
orders = st.one_of(st.sampled_from([FCFS(), SJF(), EDF()]), st.builds(DEDF, late=late), st.builds(SEDF, late=late))
slo_aware = st.builds(
    SLOAware,
    budget=st.integers(1, 2 * LONGEST),
    margin=st.sampled_from([0.0, 0.125]),
    on_misfit=st.sampled_from(["skip", "stop"]),
    on_late=st.sampled_from(["skip", "stop"]),
    long_head_alone=st.booleans(),
)
fill_budget = st.builds(FillBudget, st.integers(1, 2 * LONGEST))
batches = st.one_of(st.just(Alone()), fill_budget, slo_aware)
plans = st.one_of(
    st.just(Whole()),
    st.builds(Chunked, st.integers(1, LONGEST), above=st.integers(0, LONGEST)),
    st.builds(Layered, st.integers(1, LONGEST), chunk=st.one_of(st.none(), tokens)),
)
levels = st.sampled_from(Preempt)
resuming = st.sampled_from([level for level in Preempt if level != Preempt.RESTART])
filled_passes = st.builds(
    lambda size, more: (FillChunks(size + more), Chunked(size)), st.integers(1, LONGEST), st.integers(0, LONGEST)
)


def systems_of(orders: st.SearchStrategy[Order], batches: st.SearchStrategy[Batch]) -> st.SearchStrategy[System]:
    """Whatever is possible of batch, plan and preempt."""
    return st.one_of(
        st.builds(System, orders, batches, plans, resuming),
        st.builds(System, orders, batches, st.just(Whole()), levels),
    )


systems = st.one_of(
    st.sampled_from(list(PRESETS.values())),
    systems_of(orders, batches),
    st.builds(lambda order, filled, level: System(order, filled[0], filled[1], level), orders, filled_passes, resuming),
)
inside_a_forward = st.sampled_from([level for level in Preempt if level.inside_a_forward])
devices = st.builds(
    partial,
    st.just(Device),
    speed=st.sampled_from([0.5, 1.0, 2.0]),
    num_blocks=st.integers(LONGEST // 4, 3 * LONGEST // 4),
    handover=st.sampled_from([0.0, 0.5, 4.0]),
    together=st.booleans(),
    park_limit_bytes=st.integers(0, 4 * LONGEST),
)


@many
@given(system=systems, jobs=st.one_of(jobs, rivals), device=devices)
def test_everyone_ends_and_every_token_is_computed_once(
    system: System, jobs: list[Job], device: partial[Device]
) -> None:
    """Whatever the answers, the blocks, the aborts and the failures. `Device` checks each decision and the books."""
    played = device(system, jobs)
    played.run()
    for request in played.requests:
        shares = played.computed[request]
        assert [share.start for share in shares] == [0, *(share.stop for share in shares)][: len(shares)]
        if request.state == State.FINISHED:
            assert sum(share.tokens for share in shares) == len(request.prompt)
            assert request not in played.bad
        elif request.state == State.FAILED:
            assert request in played.bad, "taken along by a mate's failure"
        else:
            assert request.state in (State.ABORTED, State.REFUSED)
        assert played.failures[request] <= 1 + (request in played.bad), "mates are retried once, and alone"
    event(f"parks: {min(3, len(played.parks))}")


@many
@given(system=systems, jobs=st.one_of(jobs, rivals), device=devices)
def test_no_livelock(system: System, jobs: list[Job], device: partial[Device]) -> None:
    """A park needs a cause: an arrival, a completion, an abort, freed blocks. Its own reply is none, so that nothing
    can be parked and resumed for ever."""
    played = device(system, jobs)
    played.run()
    assert len(played.parks) <= played.causes


# Orders

slow_requests = st.builds(
    lambda arrival, ttft, remaining: (Request(0, (), slo=SLO(ttft), arrival=arrival), remaining),
    seconds(4),
    seconds(4),
    seconds(4),
)


@many
@given(one=slow_requests, other=slow_requests, now=seconds(8))
def test_s_edf_is_the_published_formula(
    one: tuple[Request, float], other: tuple[Request, float], now: float
) -> None:
    """Priority = sgn(slack) / deadline, slack = deadline - (now + predicted), highest first; no slack counts as -1."""

    def priority(request: Request, predicted: float) -> Fraction:
        deadline = Fraction(request.arrival) + Fraction(request.slo.ttft or 0)
        slack = deadline - (Fraction(now) + Fraction(predicted))
        return (1 if slack > 0 else -1) / deadline

    a, b = SEDF().rank(Candidate(*one), now), SEDF().rank(Candidate(*other), now)
    assert (a < b) == (priority(*one) > priority(*other))
    assert (a == b) == (priority(*one) == priority(*other))


late_orders = st.sampled_from([DEDF, SEDF])


@many
@given(order=late_orders, one=slow_requests, other=slow_requests, now=seconds(8))
def test_what_becomes_of_late_requests_is_a_choice(
    order: type[DEDF], one: tuple[Request, float], other: tuple[Request, float], now: float
) -> None:
    a, b = Candidate(*one), Candidate(*other)
    a_late, b_late = (order().late_from(c) <= now for c in (a, b))
    published, earliest, aged = (
        [order(late=late, patience=2.0).rank(c, now) for c in (a, b)]
        for late in (Late.PUBLISHED, Late.EARLIEST, Late.AGED)
    )
    sooner = a.request.deadline < b.request.deadline
    if not a_late:  # nothing about late requests matters to those in time
        assert published[0] == earliest[0] == aged[0]
        assert not b_late or (published[0] < published[1] and earliest[0] < earliest[1])
    if a_late and b_late and a.request.deadline != b.request.deadline:
        assert (earliest[0] < earliest[1]) == sooner
        assert (published[0] < published[1]) != sooner
    if now - a.request.arrival >= 2 * (a.request.slo.ttft or 0) and not b_late:
        assert aged[0] < aged[1], "old enough, it goes before everyone"
    assert order(late=Late.REFUSED).refuses(a, now) == a_late
    assert not any(order(late=late).refuses(a, now) for late in (Late.PUBLISHED, Late.EARLIEST, Late.AGED))


# Decisions


def published_choice(device: Device, contenders: list[Contender], running: Cohort | None) -> Contender | None:
    """Algorithm 2 once more, from the paper's text: the highest priority; if it is new and finds no blocks, the highest
    among those who hold theirs. Among equals the running one goes on, else the first to come begins."""

    def key(contender: Contender) -> tuple[Fraction, float, bool, int]:
        if isinstance(contender, Cohort):
            request = contender.head
            computed = next(share.stop for share in contender.shares if share.request is request)
            left = Fraction(PREDICTOR(contender.extents)) * (1 - Fraction(device.done(contender)))
        else:
            request, computed, left = contender, contender.computed, Fraction(0)
        if request.slo.ttft is None:  # best effort: behind the feasible, before the late; by arrival
            priority, arrival = Fraction(0), request.arrival
        else:
            arrival = 0.0
            later = later_extents(device.scheduler.system.plan, request, computed)
            left += sum(Fraction(PREDICTOR([extent])) for extent in later)
            slack = Fraction(request.deadline) - Fraction(device.now) - left
            priority = (1 if slack > 0 else -1) / Fraction(request.deadline)
        return -priority, arrival, contender is not running, request.id

    begun = [c for c in contenders if isinstance(c, Cohort) or c.admitted]
    if device.scheduler.system.preempt == Preempt.NEVER and begun:
        contenders = begun  # not even between its chunks or layer groups is anything overtaken
    first = min(contenders, key=key, default=None)
    if isinstance(first, Request) and blocks_needed(first, BLOCK) > device.blocks.free:
        return min(begun, key=key, default=None)
    return first


@many
@given(system=systems_of(st.just(SEDF()), batches), jobs=st.one_of(jobs, rivals), device=devices)
def test_s_edf_decides_as_published(system: System, jobs: list[Job], device: partial[Device]) -> None:
    played = device(system, jobs, park_limit_bytes=inf)
    played.second_opinion = partial(published_choice, played)
    played.run()
    for expected, running, decision in played.opinions:
        if running is None:
            assert (decision.resume or (decision.start and decision.start.shares[0].request)) is expected
        else:
            assert (decision.park is running) == (
                expected is not running and system.preempt.inside_a_forward
            )


@many
@given(
    system=systems_of(orders, st.just(Alone())),
    same=st.builds(Job, seconds(1), tokens, targets),
    others=st.integers(1, 5),
    device=devices,
)
def test_equal_requests_never_displace_each_other(
    system: System, same: Job, others: int, device: partial[Device]
) -> None:
    """And are served in the order in which they came, even when all of them are late."""
    played = device(system, [same] * (1 + others))
    played.run()
    assert not played.parks
    assert [request.id for request in played.finished_at] == sorted(request.id for request in played.finished_at)


@many
@given(order=st.sampled_from([EDF(), DEDF(), SEDF()]), preempt=inside_a_forward, at=seconds(1.5), length=tokens)
def test_an_urgent_arrival_starts_within_one_boundary(
    order: Order, preempt: Preempt, at: float, length: int
) -> None:
    """One boundary of the preemption level, and none has to be waited for once the long one is done."""
    long, urgent = Job(0.0, LONGEST, ttft=100.0), Job(at, length, ttft=8.0)
    played = Device(System(order, Alone(), Whole(), preempt), [long, urgent])
    played.run()
    start = next(time for time, cohort in played.starts if cohort.shares[0].request is played.requests[1])
    operators = {Preempt.LAYER: 4, Preempt.HALF_LAYER: 2, Preempt.OPERATOR: 1, Preempt.RESTART: 1}[preempt]
    assert start - at <= operators * PREDICTOR([(0, LONGEST)]) / len(BOUNDARIES)
    lost = start if preempt == Preempt.RESTART and played.parks else 0.0
    assert played.finished_at[played.requests[0]] == lost + PREDICTOR([(0, LONGEST)]) + PREDICTOR([(0, length)])


# Batches


def test_who_is_retried_is_company_for_nobody() -> None:
    """A cohort of two raises while a more urgent request waits: all three run by themselves from then on."""
    good, bad, urgent = Job(0.0, 8, ttft=6.0), Job(0.0, 8, ttft=5.0, bad=True), Job(1 / 16, 8, ttft=2.0)
    played = Device(System(SEDF(), SLOAware(LONGEST), Whole(), Preempt.SLICE), [good, bad, urgent])
    played.run()
    assert [[share.request.id for share in cohort.shares] for _, cohort in played.starts] == [[1, 0], [2], [1], [0]]
    assert [request.state for request in played.requests] == [State.FINISHED, State.FAILED, State.FINISHED]


crowds = st.lists(st.builds(Job, seconds(1), tokens, seconds(4)), min_size=2, max_size=10)
chunked = st.builds(Chunked, st.integers(1, LONGEST // 2))


@many
@given(order=orders, batch=slo_aware, plan=st.one_of(st.just(Whole()), chunked), jobs=crowds)
def test_batching_never_makes_the_head_late(order: Order, batch: SLOAware, plan: Plan, jobs: list[Job]) -> None:
    """Who takes others along still makes its deadline, with the chunks to come, as far as the predictor is right."""
    played = Device(System(order, batch, plan, Preempt.OPERATOR), jobs)
    played.run()
    for time, cohort in played.starts:
        own, *mates = cohort.shares
        if mates:
            later = sum(PREDICTOR([extent]) for extent in later_extents(plan, own.request, own.stop))
            left = own.request.deadline - batch.margin * (own.request.slo.ttft or 0) - time
            assert PREDICTOR(cohort.extents) + later <= left


@many
@given(order=orders, batch=st.one_of(fill_budget, slo_aware), plan=plans, jobs=crowds)
def test_a_budget_is_kept_by_all_but_a_single_long_prompt(
    order: Order, batch: FillBudget | SLOAware, plan: Plan, jobs: list[Job]
) -> None:
    played = Device(System(order, batch, plan, Preempt.NEVER), jobs)
    played.run()
    for _, cohort in played.starts:
        assert cohort.tokens <= batch.budget or len(cohort.shares) == 1


@many
@given(batch=fill_budget, jobs=crowds)
def test_distserve_serves_strictly_in_order_of_arrival(batch: FillBudget, jobs: list[Job]) -> None:
    played = Device(replace(PRESETS["distserve"], batch=batch), jobs)
    played.run()
    served = [share.request.arrival for _, cohort in played.starts for share in cohort.shares]
    assert served == sorted(served)
