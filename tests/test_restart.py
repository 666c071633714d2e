"""Preempt.RESTART in the engine: the work is dropped, the request is not; nobody holds anything twice or for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
from conftest import poison_freed_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.executor import Drive
from engine.fake import FakeModel
from engine.lab import Lab
from engine.timeline import TERMINAL, Kind
from scheduling.batch import SLOAware
from scheduling.presets import preset
from scheduling.request import SLO, Sampling, State

RELAXED, URGENT = SLO(ttft=100.0), SLO(ttft=1.0)
OPERATOR = 0.0001 + 0.0001 * 1000  # seconds of one operator over 1,000 tokens
OPERATORS = 20  # of the fake model's forward pass


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab("restart") as lab:
        poison_freed_blocks(lab)
        yield lab
        lab.run()
        lab.check()
        assert lab.engine.idle


def drives(lab: Lab) -> list[list[Kind]]:
    """What happened to each drive of the prefill instance, in order of their starts."""
    events: dict[int, list[Kind]] = {}
    for event in lab.events:
        if event.instance == "prefill-0" and event.drive is not None:
            events.setdefault(event.drive, []).append(event.kind)
    return list(events.values())


def driven(lab: Lab) -> Drive:
    """The drive that runs now."""
    prefills = lab.engine.prefill[0].prefills
    assert prefills.scheduler.running is not None
    drive = prefills.passage(prefills.scheduler.running).drive
    assert drive is not None
    return drive


def test_a_restarted_prefill_is_computed_again_from_its_first_token(lab: Lab) -> None:
    long = lab.submit(tokens=1000, slo=RELAXED, sampling=Sampling(max_tokens=3))
    lab.step_until("started")
    lab.run(5.5 * OPERATOR)
    short = lab.submit(tokens=10, slo=URGENT, sampling=Sampling(max_tokens=3))
    parked = lab.step_until("parked")
    assert parked.data["boundary"] == 6, "within one operator"
    assert (long.state, long.computed) == (State.WAITING, 0)
    lab.run()
    kept, again = [Kind.STARTED, Kind.COMPLETED], [Kind.STARTED, Kind.PARK_REQUESTED, Kind.PARKED, Kind.CLOSED]
    assert drives(lab) == [again, kept, kept]
    first = {e.request: e.time for e in lab.events if e.kind == Kind.FIRST_TOKEN and e.request}
    assert first[short] == pytest.approx(parked.time + OPERATORS * (0.0001 + 0.0001 * 10))
    assert first[long] == pytest.approx(first[short] + OPERATORS * OPERATOR), "all of it once more"
    assert lab.outputs(long) == [501, 502, 503] and lab.outputs(short) == [11, 12, 13]


def test_blocks_are_held_once_and_leases_end_with_the_drive(lab: Lab) -> None:
    quota = lab.engine.prefill[0].quota
    long = lab.submit(tokens=1000, slo=RELAXED)
    lab.step_until("started")
    held = quota.used
    for expected in (1, 2):  # restarted twice
        lab.run(1.5 * OPERATOR)
        lab.submit(tokens=1, slo=URGENT, sampling=Sampling(max_tokens=1))
        lab.step_until("closed")
        assert quota.used == held + 1, "the table stays with the request, beside the newcomer's"
        lab.step_until("started")
        assert sum(e.kind == Kind.CLOSED for e in lab.events) == expected
        assert quota.used == held
    lab.engine.abort(long.id)
    assert quota.used == held, "leased to the drive that runs"
    lab.step_until("closed")
    assert quota.used == 0


@pytest.mark.parametrize("moment", ["park_requested", "parked", "closed", "started"])
def test_abort_finds_a_restarted_request_at_every_moment(lab: Lab, moment: str) -> None:
    long = lab.submit(tokens=1000, slo=RELAXED)
    lab.step_until("started")
    lab.run(1.5 * OPERATOR)
    short = lab.submit(tokens=10, slo=URGENT)
    lab.step_until(moment)
    assert lab.engine.abort(long.id)
    lab.run()
    assert [e.kind for e in lab.events if e.request is long and e.kind in TERMINAL] == [Kind.ABORTED]
    assert short.state == State.FINISHED and len(lab.outputs(short)) == 16
    assert lab.engine.prefill[0].quota.used == 0
    assert drives(lab)[0][-1] == Kind.CLOSED and len(drives(lab)) == 2


def test_what_a_closed_drive_kept_is_gone(lab: Lab) -> None:
    lab.submit(tokens=1000, slo=RELAXED)
    lab.step_until("started")
    activations = weakref.ref(driven(lab).coroutine)
    lab.run(1.5 * OPERATOR)
    lab.submit(tokens=10, slo=URGENT)
    lab.step_until("closed")
    lab.run(0.0)
    gc.collect()
    assert activations() is None


def test_mates_start_over_too_and_one_that_fails_takes_nobody_along() -> None:
    """A cohort of three restarts; then its bad member raises, and the others are computed without it."""
    system = replace(preset("restart"), batch=SLOAware(4096))
    with Lab(system, model=FakeModel(fail_on=777)) as lab:
        poison_freed_blocks(lab)
        mates = [lab.submit([5] * 300 + last, slo=RELAXED) for last in ([10], [777], [20])]
        started = lab.step_until("started")
        assert started.data["requests"] == tuple(mate.id for mate in mates)
        lab.run(0.0)
        urgent = lab.submit(tokens=10, slo=URGENT)
        lab.run()
        assert [mate.state for mate in mates] == [State.FINISHED, State.FAILED, State.FINISHED]
        assert lab.outputs(urgent)[0] == 11
        assert [lab.outputs(mate)[:2] for mate in mates] == [[11, 12], [], [21, 22]]
        lab.check()
        assert lab.engine.idle


arrivals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 400), st.sampled_from([0.2, 0.5, 2.0, None]), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(arrivals=arrivals, num_blocks=st.integers(60, 200), batched=st.booleans())
def test_random_traces_end_with_the_right_tokens_and_whole_pools(
    arrivals: list[tuple[int, int, float | None, bool]], num_blocks: int, batched: bool
) -> None:
    """Whatever restarts how often, in whichever company, with however few blocks."""
    system = preset("restart")
    if batched:
        system = replace(system, batch=SLOAware(500))
    with Lab(system, config=EngineConfig(num_blocks=num_blocks)) as lab:
        poison_freed_blocks(lab)
        requests = []

        def submit(tokens: int, ttft: float | None) -> None:
            requests.append(lab.submit(tokens=tokens, slo=SLO(ttft), sampling=Sampling(max_tokens=2)))

        for tick, tokens, ttft, leaves in arrivals:
            lab.loop.call_at(tick / 50, submit, tokens, ttft)
            if leaves:
                lab.loop.call_at(tick / 50 + 0.1, lambda: requests and lab.engine.abort(requests[-1].id))
        lab.run()
        lab.check()
        assert lab.engine.idle and len(requests) == len(arrivals)
        for request in requests:
            ends = [e.kind for e in lab.events if e.request is request and e.kind in TERMINAL]
            assert len(ends) == 1
            if request.state == State.FINISHED:
                last = request.prompt[-1]
                assert lab.outputs(request) == [last + 1, last + 2]
            else:
                assert request.state == State.ABORTED
