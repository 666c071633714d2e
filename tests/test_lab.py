"""The engine step by step, on the counting model and virtual time: what a learner tries first."""

from __future__ import annotations

import asyncio

import pytest

from engine.lab import Lab
from engine.timeline import TERMINAL, Kind
from engine.virtual import Stalled, VirtualLoop
from scheduling.request import SLO, Sampling, State

RELAXED, URGENT = SLO(ttft=100.0), SLO(ttft=1.0)


def kinds(lab: Lab, drive: int) -> list[Kind]:
    return [e.kind for e in lab.events if e.drive == drive and e.instance == "prefill-0"]


def test_a_long_prefill_pulls_over_for_an_urgent_request_and_goes_on_where_it_stopped(lab: Lab) -> None:
    long = lab.submit(tokens=1000, slo=RELAXED, sampling=Sampling(max_tokens=3))
    lab.step_until("started")
    lab.run(0.55)
    short = lab.submit(tokens=10, slo=URGENT, sampling=Sampling(max_tokens=3))
    arrived = lab.now
    parked = lab.step_until("parked")
    assert long.state == State.PARKED
    assert parked.time - arrived <= 0.0001 + 0.0001 * 1000  # one operator of the long prompt at most
    assert parked.data == {"boundary": 6, "operator": "qkv_proj"}
    lab.run()
    assert kinds(lab, 0) == [Kind.STARTED, Kind.PARK_REQUESTED, Kind.PARKED, Kind.RESUMED, Kind.COMPLETED]
    assert lab.outputs(short) == [11, 12, 13]
    assert lab.outputs(long) == [501, 502, 503]
    first = {e.request: e.time for e in lab.events if e.kind == Kind.FIRST_TOKEN and e.request}
    assert first[short] < first[long]
    # Nothing was computed twice: the long prompt crossed the layers once.
    assert [len(tokens) for tokens, _, _ in lab.model.calls].count(1000) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("system", "pulls_over"), [("distserve", False), ("flowprefill-layer", True)])
def test_the_preempt_level_says_where_a_prefill_stops(system: str, pulls_over: bool) -> None:
    with Lab(system) as lab:
        lab.submit(tokens=1000, slo=RELAXED)
        lab.step_until("started")
        lab.run(0.05)
        short = lab.submit(tokens=10, slo=URGENT)
        lab.run()
        parks = [e for e in lab.events if e.kind == Kind.PARKED]
        assert [e.data["operator"] for e in parks] == (["down_proj"] if pulls_over else [])
        first = next(e.time for e in lab.events if e.kind == Kind.FIRST_TOKEN and e.request is short)
        assert (first < 1.0) == pulls_over


def test_every_request_has_exactly_one_terminal_event(lab: Lab) -> None:
    requests = [lab.submit(tokens=20 + i, slo=URGENT, sampling=Sampling(max_tokens=1 + i % 4)) for i in range(12)]
    lab.run(0.01)
    lab.engine.abort(requests[3].id)
    lab.run()
    for request in requests:
        ends = [e.kind for e in lab.events if e.request is request and e.kind in TERMINAL]
        assert ends == [Kind.ABORTED if request is requests[3] else Kind.FINISHED]


def test_step_until_says_so_when_nothing_more_can_happen(lab: Lab) -> None:
    lab.submit(tokens=5)
    with pytest.raises(RuntimeError, match="no parked has come"):
        lab.step_until("parked")


def test_the_same_run_twice_gives_the_same_events() -> None:
    def run() -> list[tuple[float, str, int | None]]:
        with Lab("flowprefill") as lab:
            for i in range(20):
                slo = SLO(ttft=0.3 + 0.1 * (i % 3))
                lab.submit_at(
                    0.01 * i, tokens=50 + 37 * i % 400, slo=slo, sampling=Sampling(max_tokens=5, temperature=1)
                )
            lab.run()
            return [(e.time, e.kind, e.request.id if e.request else e.drive) for e in lab.events]

    assert run() == run()


def test_virtual_time_jumps_to_the_exact_moment_of_the_next_timer() -> None:
    loop = VirtualLoop()
    seen: list[float] = []
    for when in (0.1, 0.3, 1e6, 1 / 3):
        loop.call_at(when, lambda when=when: seen.append(loop.time() - when))

    async def wait() -> None:
        await asyncio.sleep(2e6)

    loop.run_until_complete(wait())
    assert seen == [0.0] * 4
    assert loop.now() == 2e6
    loop.close()


def test_virtual_time_has_no_threads_and_never_waits_for_ever() -> None:
    loop = VirtualLoop()
    with pytest.raises(RuntimeError, match="no threads"):
        loop.run_in_executor(None, print)
    with pytest.raises(RuntimeError, match="no threads"):
        loop.call_soon_threadsafe(print)
    with pytest.raises(Stalled, match="stands still"):
        loop.run_until_complete(loop.create_future())
    loop.close()
