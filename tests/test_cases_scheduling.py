"""Cases A1, A5, A6 and A7: preemption that broke other schedulers, on virtual time, at every preempt level."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_helpers import (
    ONE_TOKEN,
    at_every_level,
    first_token,
    flowprefill,
    inside_a_forward,
    laboratory,
    of_prefill,
    operator,
    parks,
    started,
    where_prompts_may_be_cut,
)
from scheduling_helpers import PREDICTOR, Blocks

from engine.engine import Engine
from engine.fake import OPERATORS
from engine.output import LiveRequest
from engine.timeline import Kind
from scheduling.batch import Alone, Batch, FillBudget, SLOAware
from scheduling.order import EDF, FCFS, SEDF, SJF, Late, Order
from scheduling.plan import Chunked, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.request import SLO, Request, Sampling, State
from scheduling.scheduler import Decision, Scheduler

# A1: a 128k prefill runs, and a short urgent request arrives


@pytest.mark.parametrize("during", [0, 4, 7, 9])
@at_every_level
def test_a1_an_urgent_request_starts_within_one_boundary_of_a_128k_prefill(level: Preempt, during: int) -> None:
    """`during`: which of its ten operators is half done. The level says behind which of them the newcomer starts."""
    tokens = 128 * 1024
    with laboratory(flowprefill(level), context=200_000, num_blocks=1400, block_size=256) as lab:
        lab.submit(tokens=tokens, slo=SLO(ttft=10_000.0), sampling=ONE_TOKEN)
        lab.step_until("started")
        lab.run((during + 0.5) * operator(tokens))
        short = lab.submit(tokens=16, slo=SLO(ttft=500.0), sampling=ONE_TOKEN)
        lab.run()
        names = OPERATORS * 2
        boundary = next((i for i in range(during, 10) if level.stops_at(names[i])), 9)  # behind the last it is done
        assert started(lab, short) == (boundary + 1) * operator(tokens)
        waited = (started(lab, short) - short.arrival) / operator(tokens)
        most = {Preempt.LAYER: 5, Preempt.HALF_LAYER: 3, Preempt.OPERATOR: 1, Preempt.RESTART: 1}
        assert waited <= most.get(level, 10)


@where_prompts_may_be_cut
def test_a1_between_chunks_an_urgent_request_waits_for_one_chunk_at_most(level: Preempt) -> None:
    """Chunks of 8,192 tokens bound the wait where nothing else does, unless what has begun may not be overtaken."""
    tokens, chunk = 128 * 1024, 8192
    with laboratory(flowprefill(level, chunk=chunk), context=200_000, num_blocks=1400, block_size=256) as lab:
        lab.submit(tokens=tokens, slo=SLO(ttft=10_000.0), sampling=ONE_TOKEN)
        lab.step_until("started")
        lab.run(33.5 * operator(chunk))  # in the fourth chunk, its fourth operator
        short = lab.submit(tokens=16, slo=SLO(ttft=500.0), sampling=ONE_TOKEN)
        lab.run()
        operators = {Preempt.NEVER: 160, Preempt.SLICE: 40, Preempt.LAYER: 35, Preempt.HALF_LAYER: 35}
        assert started(lab, short) == operators.get(level, 34) * operator(chunk)


# A5: all slots full, a strictly higher-priority request waits


@at_every_level
def test_a5_a_strictly_more_urgent_request_displaces_once_and_only_where_it_may(level: Preempt) -> None:
    with laboratory(flowprefill(level)) as lab:
        low = lab.submit(tokens=2000, slo=SLO(ttft=900.0), sampling=ONE_TOKEN)
        lab.step_until("started")
        lab.run(1.5 * operator(2000))
        high = lab.submit(tokens=1000, slo=SLO(ttft=90.0), sampling=ONE_TOKEN)
        lab.run()
        assert parks(lab) == level.inside_a_forward
        assert (first_token(lab, high) < first_token(lab, low)) == level.inside_a_forward


@pytest.mark.parametrize("order", [FCFS(), EDF(), SEDF(), SEDF(Late.EARLIEST), SEDF(Late.AGED)], ids=str)
@at_every_level
def test_a5_equal_requests_never_swap(level: Preempt, order: Order) -> None:
    """Five with one deadline, be it kept or missed, arrive one after another while the first of them runs."""
    for deadline in (1000.0, 2.0):
        with laboratory(flowprefill(level, order)) as lab:
            requests = []
            for _ in range(5):
                slo = SLO(ttft=deadline - lab.now)
                requests.append(lab.submit(tokens=1000, slo=slo, sampling=ONE_TOKEN))
                lab.run(0.125)
            assert len({request.deadline for request in requests}) == 1
            lab.run()
            assert parks(lab) == 0
            firsts = [first_token(lab, request) for request in requests]
            assert firsts == sorted(firsts)


@inside_a_forward
def test_a5_one_that_becomes_an_equal_while_it_runs_is_not_displaced(level: Preempt) -> None:
    """A (long) and B (short) share a deadline. B starts when only A is late; on a device that is slower than predicted
    it becomes late too. A came first, and still waits."""
    scheduler = Scheduler(flowprefill(level), PREDICTOR, Blocks(1000), 2)
    for number, tokens, deadline in ((0, 64, 2.0), (1, 8, 2.0)):
        scheduler.on_arrival(Request(number, range(tokens), slo=SLO(ttft=deadline)))
    b = scheduler.decide(0.5).start
    assert b is not None and b.head.id == 1
    scheduler.on_arrival(Request(2, range(8), slo=SLO(ttft=1.0)))
    assert scheduler.decide(1.9375) == Decision()


@inside_a_forward
def test_a5_without_blocks_for_it_even_the_most_urgent_waits_and_goes_next(level: Preempt) -> None:
    """What slots are to others, blocks are here. Who holds some is not made to give them up (FlowPrefill's Algorithm
    2), so displacing a prefill would gain nothing: it would have to run again before the newcomer could."""
    with laboratory(flowprefill(level), num_blocks=2 * 140) as lab:  # 140 blocks: 2,240 tokens
        low = lab.submit(tokens=2000, slo=SLO(ttft=900.0), sampling=ONE_TOKEN)
        middle = lab.submit(tokens=1500, slo=SLO(ttft=950.0), sampling=ONE_TOKEN)
        lab.step_until("started")
        lab.run(1.5 * operator(2000))
        high = lab.submit(tokens=1000, slo=SLO(ttft=90.0), sampling=ONE_TOKEN)
        lab.run()
        assert parks(lab) == 0
        assert first_token(lab, low) == started(lab, high) < started(lab, middle)


# A6: preempting what was scheduled in the same step


def check_places(engine: Engine) -> None:
    """Every live request is in one place, what is scheduled is a part of what runs, and the books say so too."""
    instance = engine.prefill[0]
    scheduler, quota = instance.prefills.scheduler, instance.quota
    running = scheduler.running.members if scheduler.running else []
    places = [*scheduler.waiting, *running, *(r for cohort in scheduler.parked for r in cohort.members)]
    assert len(set(places)) == len(places)
    assert {r.id for r in places if r.state == State.RUNNING} == {r.id for r in running}
    assert quota.used == sum(-(-len(r.prompt) // quota.block_size) for r in places if r.admitted)
    assert all(r.computed == 0 for r in places), "no prompt here is cut: nothing is half computed"


@at_every_level
def test_a6_what_was_scheduled_in_the_same_moment_unwinds(level: Preempt) -> None:
    """Each pair arrives in the moment in which the pair before has been started, and has passed no boundary yet."""
    with laboratory(flowprefill(level, alone=False)) as lab:
        requests = []
        for depth in range(4):
            for tokens in (300, 200):
                slo = SLO(ttft=900.0 / 2**depth - lab.now)
                requests.append(lab.submit(tokens=tokens, slo=slo, sampling=ONE_TOKEN))
            lab.run(0.0)
            check_places(lab.engine)
            if depth > 0 and level.inside_a_forward:
                parked = lab.step_until("parked")
                assert parked.data["boundary"] <= 5, "the first one at which the level stops"
                check_places(lab.engine)
        assert parks(lab) == (3 if level.inside_a_forward else 0)
        while not lab.engine.idle:
            lab.run(operator(100))
            check_places(lab.engine)
        assert all(request.state == State.FINISHED for request in requests)
        passes = [e.data["tokens"] for e in lab.events if e.kind == Kind.STARTED and of_prefill(e)]
        assert max(passes) <= 4096 and sum(passes) >= 4 * 500


# A7: endless preemption


@at_every_level
def test_a7_a_preempted_request_goes_on_as_soon_as_nothing_more_urgent_is_there(level: Preempt) -> None:
    """Each displaces the one before; they finish in the order of their deadlines, and no work is done twice, but where
    to be displaced means to start over."""
    with laboratory(flowprefill(level, EDF())) as lab:
        requests = []
        for deadline in (900.0, 800.0, 700.0, 600.0):
            requests.append(lab.submit(tokens=1000, slo=SLO(ttft=deadline), sampling=ONE_TOKEN))
            lab.step_until("started") if deadline == 900.0 or level.inside_a_forward else None
            lab.run(0.5 * operator(1000))
        lab.run()
        firsts = [first_token(lab, request) for request in requests]
        computed_once = 4 * 10 * operator(1000)
        if level.inside_a_forward:
            assert firsts == sorted(firsts, reverse=True)
            assert parks(lab) == 3
            lost = {Preempt.RESTART: 3 * operator(1000)}
            assert max(firsts) == computed_once + lost.get(level, 0.0)
        else:
            assert firsts == [firsts[0], *sorted(firsts[1:], reverse=True)], "the first one was not interrupted"
            assert max(firsts) == computed_once


@pytest.mark.parametrize("leaves", [0, 1])
@inside_a_forward
def test_a7_who_is_left_of_a_preempted_cohort_goes_on(level: Preempt, leaves: int) -> None:
    """Two are parked together, and its head or its other member leaves meanwhile."""
    with laboratory(flowprefill(level, alone=False)) as lab:
        mates = [lab.submit(tokens=500, slo=SLO(ttft=900.0 + i), sampling=ONE_TOKEN) for i in range(2)]
        lab.run(0.5 * operator(1000))
        urgent = lab.submit(tokens=1000, slo=SLO(ttft=90.0), sampling=ONE_TOKEN)
        lab.step_until("parked")
        lab.engine.abort(mates[leaves].id)
        lab.run()
        stays = mates[1 - leaves]
        assert (urgent.state, stays.state) == (State.FINISHED, State.FINISHED)
        assert first_token(lab, urgent) <= first_token(lab, stays)  # or together, where both have to start


@inside_a_forward
def test_a7_among_equals_the_preempted_one_goes_on_first(level: Preempt) -> None:
    with laboratory(flowprefill(level)) as lab:
        preempted = lab.submit(tokens=1000, slo=SLO(ttft=900.0), sampling=ONE_TOKEN)
        equal = lab.submit(tokens=1000, slo=SLO(ttft=900.0), sampling=ONE_TOKEN)
        lab.run(0.5 * operator(1000))
        urgent = lab.submit(tokens=1000, slo=SLO(ttft=90.0), sampling=ONE_TOKEN)
        lab.run()
        assert first_token(lab, urgent) < first_token(lab, preempted) < first_token(lab, equal)


@pytest.mark.parametrize("late", [Late.PUBLISHED, Late.AGED])
@inside_a_forward
def test_a7_a_late_request_starves_under_a_stream_unless_it_ages(level: Preempt, late: Late) -> None:
    """Short ones arrive faster than they can be served, for 100 seconds: as published the late one waits for them all,
    aged it is first of all from two targets on."""
    with laboratory(flowprefill(level, SEDF(late, patience=2.0))) as lab:
        hopeless = lab.submit(tokens=1000, slo=SLO(ttft=0.5), sampling=ONE_TOKEN)
        for i in range(1000):
            lab.submit_at(i / 10, tokens=90, slo=SLO(ttft=1000.0), sampling=ONE_TOKEN)
        lab.run()
        if late == Late.AGED:
            bound = 2 * 0.5 + 10 * operator(90) + 10 * operator(1000)
            assert first_token(lab, hopeless) <= bound
        else:
            assert first_token(lab, hopeless) > 100.0


traces = st.lists(
    st.tuples(
        st.integers(0, 64).map(lambda n: n / 32),
        st.integers(1, 500),
        st.one_of(st.none(), st.sampled_from([0.25, 0.5, 1.0, 4.0])),
        st.integers(0, 9).map(lambda n: n == 0),
    ),
    min_size=1,
    max_size=14,
)
orders = st.sampled_from([FCFS(), SJF(), EDF(), SEDF(), SEDF(Late.AGED), SEDF(Late.EARLIEST)])
batches = st.sampled_from([Alone(), FillBudget(600), SLOAware(600)])


@at_every_level
@settings(max_examples=40, deadline=None)
@given(trace=traces, order=orders, batch=batches, chunked=st.booleans(), num_blocks=st.integers(70, 300))
def test_a7_over_random_traces_everyone_finishes(
    level: Preempt,
    trace: list[tuple[float, int, float | None, bool]],
    order: Order,
    batch: Batch,
    chunked: bool,
    num_blocks: int,
) -> None:
    """With the right tokens, though some leave; and parks are no more than arrivals, ends, freed blocks can cause."""
    plan = Chunked(64) if chunked and level != Preempt.RESTART else Whole()
    with laboratory(System(order, batch, plan, level), num_blocks=num_blocks) as lab:
        requests: list[LiveRequest] = []

        def submit(tokens: int, ttft: float | None, leaves: bool) -> None:
            requests.append(lab.submit(tokens=tokens, slo=SLO(ttft), sampling=Sampling(max_tokens=2)))
            if leaves:
                lab.loop.call_later(0.125, lab.engine.abort, requests[-1].id)

        for time, tokens, ttft, leaves in trace:
            lab.loop.call_at(time, submit, tokens, ttft, leaves)
        lab.run()
        assert len(requests) == len(trace)
        for request in requests:
            if request.state == State.FINISHED:
                last = request.prompt[-1]
                assert lab.outputs(request) == [last + 1, last + 2]
            else:
                assert request.state == State.ABORTED
        ends = (Kind.FINISHED, Kind.ABORTED, Kind.DECODING)  # a hand-over frees blocks of the prefill side
        causes = [e for e in lab.events if e.kind in (Kind.ARRIVED, Kind.COMPLETED, *ends)]
        assert parks(lab) <= len(causes)
