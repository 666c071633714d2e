"""Cases A2, A3 and A13: batches and chunks that broke other schedulers, on virtual time, at every preempt level."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_helpers import (
    ONE_TOKEN,
    at_every_level,
    first_token,
    laboratory,
    of_prefill,
    operator,
    where_prompts_may_be_cut,
)
from scheduling_helpers import PREDICTOR, Blocks

from engine.lab import Lab
from engine.metrics import percentile
from engine.output import LiveRequest
from engine.timeline import Kind
from scheduling.batch import FillBudget, FillChunks, SLOAware
from scheduling.change import change
from scheduling.order import EDF, FCFS, SEDF, Order
from scheduling.plan import Chunked, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System, preset
from scheduling.request import SLO, Request, State
from scheduling.scheduler import Scheduler

# A2: the same mixed trace under FCFS, chunked and EDF


def p95_of_short_ones(system: System, seed: int) -> float:
    random, time = Random(seed), 0.0
    with laboratory(system, layers=1, context=20_000, num_blocks=1000, block_size=256) as lab:
        for _ in range(120):
            time += random.expovariate(0.4)
            long = random.random() < 0.15
            tokens = random.randint(4000, 16_000) if long else random.randint(50, 900)
            slo = SLO(ttft=45.0 if long else 2.0)
            lab.submit_at(time, tokens=tokens, slo=slo, sampling=ONE_TOKEN, label="long" if long else "short")
        lab.run()
        firsts = [(e.time, e.request) for e in lab.events if e.kind == Kind.FIRST_TOKEN and e.request]
        assert len(firsts) == 120
        return percentile([time - request.arrival for time, request in firsts if request.label == "short"], 95)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a2_short_requests_fare_better_with_chunks_and_better_still_with_preemption(seed: int) -> None:
    fcfs, cp2k, running_first, edf_between_chunks, edf = (
        p95_of_short_ones(system, seed)
        for system in (
            preset("distserve"),
            preset("distserve-cp2k"),
            change(preset("distserve-cp2k"), "order=edf", "preempt=never"),
            change(preset("distserve-cp2k"), "order=edf"),
            change(preset("flowprefill"), "order=edf"),
        )
    )
    assert fcfs > running_first > edf_between_chunks > edf
    assert cp2k == pytest.approx(fcfs, rel=0.1), "chunks alone, in order of arrival, help nobody"


# A3: a 130k prompt at a chunk budget of 512, others waiting


def begun(lab: Lab) -> list[Request]:
    """Prompts of which some tokens have been computed, and not all."""
    scheduler = lab.engine.prefill[0].prefills.scheduler
    cohorts = [*scheduler.parked, *([scheduler.running] if scheduler.running else [])]
    everyone = {*scheduler.waiting, *(request for cohort in cohorts for request in cohort.members)}
    return [request for request in everyone if 0 < request.computed < len(request.prompt)]


@pytest.mark.parametrize("order", [FCFS(), EDF()], ids=str)
@where_prompts_may_be_cut
def test_a3_partial_prefills_coexist_where_the_order_says_so(level: Preempt, order: Order) -> None:
    """A budget of 512 in chunks of 512 bounds them to ceil(512 / 512) = 1 where nothing that has begun is overtaken;
    elsewhere they are as many as overtook each other, which the KV pool bounds. All of them are finished."""
    overtakes = order == EDF() and level != Preempt.NEVER
    system = System(order, FillChunks(512), Chunked(512), level)
    with laboratory(system, layers=1, context=200_000, num_blocks=1200, block_size=256) as lab:
        requests = [lab.submit(tokens=130_000, slo=SLO(ttft=90_000.0), sampling=ONE_TOKEN)]
        seen = 0
        for tokens in (4000, 3000, 2000, 1000):  # each shorter than the one before, and more urgent
            lab.run(3 * 5 * operator(512))
            requests.append(lab.submit(tokens=tokens, slo=SLO(ttft=float(tokens)), sampling=ONE_TOKEN))
            seen = max(seen, len(begun(lab)))
        lab.run(10.5 * operator(512))  # one pass may have been under way; then the last one gets its first chunk
        seen = max(seen, len(begun(lab)))
        lab.run()
        assert all(request.state == State.FINISHED for request in requests)
        assert seen == (5 if overtakes else 1)
        firsts = [first_token(lab, request) for request in requests]
        assert firsts == sorted(firsts, reverse=overtakes) or level == Preempt.NEVER


def test_a3_no_more_begin_than_the_pool_holds_and_all_of_those_finish() -> None:
    """Each newcomer would overtake. The pool holds the long prompt and one of 3,000; the next waits for blocks."""
    system = System(EDF(), FillChunks(512), Chunked(512), Preempt.SLICE)
    with laboratory(system, layers=1, context=20_000, num_blocks=2 * (625 + 188 + 100)) as lab:
        requests = [lab.submit(tokens=10_000, slo=SLO(ttft=9000.0), sampling=ONE_TOKEN)]
        for i in range(4):
            lab.run(5 * operator(512))
            requests.append(lab.submit(tokens=3000, slo=SLO(ttft=100.0 - i), sampling=ONE_TOKEN))
            assert len(begun(lab)) <= 2
        lab.run()
        assert all(request.state == State.FINISHED for request in requests)


# A13: extra prefills packed into a saturated batch


crowds = st.lists(
    st.tuples(st.integers(0, 16).map(lambda n: n / 64), st.integers(1, 400), st.integers(1, 64).map(lambda n: n / 32)),
    min_size=4,
    max_size=16,
)


@at_every_level
@settings(max_examples=40, deadline=None)
@given(crowd=crowds, margin=st.sampled_from([0.0, 0.125]), budget=st.sampled_from([512, 4096]))
def test_a13_batching_never_makes_the_head_late(
    level: Preempt, crowd: list[tuple[float, int, float]], margin: float, budget: int
) -> None:
    """All arrive within a quarter of a second. Whoever takes others along would have its first token in time, and has
    it in time unless somebody more urgent displaces the batch on its way."""
    system = System(SEDF(), SLOAware(budget, margin), Whole(), level)
    with laboratory(system) as lab:
        requests: list[LiveRequest] = []

        def submit(tokens: int, ttft: float) -> None:
            requests.append(lab.submit(tokens=tokens, slo=SLO(ttft), sampling=ONE_TOKEN))

        for time, tokens, ttft in crowd:
            lab.loop.call_at(time, submit, tokens, ttft)
        lab.run()
        stood = {e.drive for e in lab.events if e.kind == Kind.PARKED and of_prefill(e)}
        by_id = {request.id: request for request in requests}
        for event in lab.events:
            if event.kind != Kind.STARTED or not of_prefill(event) or len(event.data["requests"]) == 1:
                continue
            head = by_id[event.data["requests"][0]]
            reserve = margin * (head.slo.ttft or 0.0)
            assert event.data["tokens"] <= budget
            assert event.time + 10 * operator(event.data["tokens"]) <= head.deadline - reserve
            if event.drive not in stood:
                assert first_token(lab, head) <= head.deadline - reserve


# Found on the way


def test_when_the_head_leaves_its_cohort_is_ranked_by_the_next_heads_chunks() -> None:
    """A (one chunk left) and B (eight) run together; A leaves. What B still needs after this pass makes it late, so a
    feasible newcomer passes, although its deadline is later."""
    system = System(SEDF(), FillBudget(16), Chunked(8), Preempt.OPERATOR)
    scheduler = Scheduler(system, PREDICTOR, Blocks(1000), 2)
    chunks = [PREDICTOR([(8 * i, 8)]) for i in range(8)]
    a = Request(0, range(8), slo=SLO(ttft=1.5))
    b = Request(1, range(64), slo=SLO(ttft=sum(chunks) - 0.125), arrival=0.0)
    scheduler.on_arrival(a)
    scheduler.on_arrival(b)
    cohort = scheduler.decide(0.0).start
    assert cohort is not None and cohort.members == [a, b]
    scheduler.on_abort(a)
    scheduler.on_progress(0.5)
    scheduler.on_arrival(Request(2, range(8), slo=SLO(ttft=9.0)))
    assert scheduler.decide(0.0).park is cohort
