"""Prefills and decodes on one device: who runs when, and that nothing is lost when blocks run short."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from conftest import poison_freed_blocks
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.executor import Drive
from engine.fake import FakeModel
from engine.lab import Lab
from engine.output import LiveRequest
from engine.timeline import TERMINAL, Event, Kind
from engine.work import Work
from scheduling.batch import Alone, FillBudget, FillChunks, SLOAware
from scheduling.layered import Layered
from scheduling.order import EDF, FCFS, SEDF, Late
from scheduling.placement import Exclusive, Interleave, Piggyback, RequestLevel
from scheduling.plan import Chunked, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.request import SLO, Sampling, State

SYSTEMS = {
    "piggyback-whole": System(FCFS(), FillBudget(4096), Whole(), Preempt.NEVER, Piggyback()),
    "piggyback-chunked": System(FCFS(), Alone(), Chunked(64), Preempt.SLICE, Piggyback()),
    "layered": System(FCFS(), FillBudget(256), Layered(64), Preempt.SLICE, Piggyback()),
    "layered-chunked": System(FCFS(), FillBudget(256), Layered(64, chunk=150), Preempt.SLICE, Piggyback()),
    "layered-s-edf": System(SEDF(), SLOAware(256), Layered(64), Preempt.SLICE, Piggyback()),
    "exclusive": System(FCFS(), FillBudget(4096), Whole(), Preempt.NEVER, Exclusive()),
    "exclusive-parks": System(SEDF(), SLOAware(256), Whole(), Preempt.OPERATOR, Exclusive(decode_between=True)),
    "interleave": System(SEDF(), SLOAware(4096), Whole(), Preempt.OPERATOR, Interleave(quantum=0.02)),
    "request-level": System(FCFS(), FillBudget(4096), Whole(), Preempt.NEVER, RequestLevel()),
}


def of_groups(count: int) -> System:
    return replace(SYSTEMS["layered"], plan=Layered(fixed_groups=count))


def starts(lab: Lab) -> list[Event]:
    return [event for event in lab.events if event.kind == Kind.STARTED]


def token_times(lab: Lab, request: LiveRequest) -> list[float]:
    kinds = (Kind.FIRST_TOKEN, Kind.TOKEN)
    return [event.time for event in lab.events if event.request is request and event.kind in kinds]


def largest_gap(lab: Lab, request: LiveRequest) -> float:
    times = token_times(lab, request)
    return max(b - a for a, b in pairwise(times))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_way_of_sharing_a_device_gives_the_same_tokens(name: str) -> None:
    with Lab(SYSTEMS[name]) as lab:
        poison_freed_blocks(lab)
        requests = []
        for i in range(12):
            sampling = Sampling(max_tokens=1 + 3 * i, n=1 + i % 3)
            requests.append(
                lab.submit(tokens=1 + 41 * i, slo=SLO(ttft=0.4 + 0.1 * (i % 4), tbt=0.05), sampling=sampling)
            )
            lab.run(0.05)
        lab.run()
        lab.check()
        assert lab.engine.idle and lab.engine.instances[0].quota.used == 0
        for i, request in enumerate(requests):
            first = request.prompt[-1] + 1
            assert [c.tokens for c in request.choices] == [list(range(first, first + 1 + 3 * i))] * (1 + i % 3)


def test_piggybacked_decodes_go_on_while_a_prompt_is_chunked() -> None:
    with Lab(SYSTEMS["piggyback-chunked"]) as lab:
        decoding = lab.submit(tokens=4, sampling=Sampling(max_tokens=30))
        lab.step_until("decoding")
        lab.submit(tokens=1000)
        lab.run()
        both = [event.data for event in starts(lab) if event.data["phase"] == "both"]
        assert len(both) == 16 and all(data["tokens"] <= 64 + 1 and data["decodes"] == 1 for data in both)
        iteration = 20 * (0.0001 + 0.0001 * 65)
        assert largest_gap(lab, decoding) <= iteration + 1e-9


def test_a_whole_piggybacked_prompt_stalls_the_decodes() -> None:
    """What chunks and layer groups are for: Orca's decodes wait for the whole prompt."""
    with Lab(SYSTEMS["piggyback-whole"]) as lab:
        decoding = lab.submit(tokens=4, sampling=Sampling(max_tokens=30))
        lab.step_until("decoding")
        lab.submit(tokens=1000)
        lab.run()
        assert largest_gap(lab, decoding) >= 20 * 0.0001 * 1000


@pytest.mark.parametrize("layers", [4, 5, 7])
@pytest.mark.parametrize("tokens", [1, 64, 65, 200, 1000])
def test_a_layered_prefill_visits_each_layer_once_and_decodes_never_stall(layers: int, tokens: int) -> None:
    model = FakeModel(num_layers=layers)
    with Lab(SYSTEMS["layered"], model=model) as lab:
        decoding = lab.submit(tokens=4, sampling=Sampling(max_tokens=40))
        lab.step_until("decoding")
        prompt = [500 + i % 400 for i in range(tokens)]
        lab.submit(prompt, sampling=Sampling(max_tokens=1))
        lab.run()
        visited = [
            layer
            for rows, first, last in model.calls
            if rows[: len(prompt)] == prompt  # the prefill's rows come first in a pass that carries both
            for layer in range(first, last)
        ]
        assert visited == list(range(layers))
        groups = [event.data["layers"] for event in starts(lab) if event.data["phase"] == "both"]
        assert len(groups) == min(layers, max(1, -(-tokens // 64)))
        assert groups[0][0] == 0 and groups[-1][1] == layers
        assert all(a[1] == b[0] for a, b in pairwise(groups))
        # Every decode row crosses all layers in every iteration.
        decode_rows = [call for call in model.calls if 4 < call[0][-1] < 500]
        assert sum(last - first for _, first, last in decode_rows) == 39 * layers
        # And waits for one iteration at most: the prefill in one group of layers, itself in all.
        slowest = max(last - first for first, last in groups)
        assert slowest == -(-layers // len(groups))
        iteration = 5 * (slowest * (0.0001 + 0.0001 * (tokens + 1)) + (layers - slowest) * 0.0002)
        assert largest_gap(lab, decoding) <= iteration + 1e-9


@pytest.mark.parametrize("count", [1, 3, 4])
def test_as_many_groups_as_are_asked_for(count: int) -> None:
    """Up to one for each layer."""
    with Lab(of_groups(count), model=FakeModel(num_layers=4)) as lab:
        request = lab.submit(tokens=10, sampling=Sampling(max_tokens=1))
        lab.run()
        assert lab.outputs(request) == [11]
        groups = [event.data["layers"] for event in starts(lab)]
        assert len(groups) == count and (groups[0][0], groups[-1][1]) == (0, 4)


def test_layered_chunks_cross_the_groups_one_after_the_other() -> None:
    model = FakeModel(num_layers=4)
    with Lab(SYSTEMS["layered-chunked"], model=model) as lab:
        request = lab.submit(tokens=400, sampling=Sampling(max_tokens=3))
        lab.run()
        passes = [(len(rows), first, last) for rows, first, last in model.calls if len(rows) > 1]
        # 150, 150 and 100 tokens, in ceil(n / 64) groups each.
        groups_of_3, groups_of_2 = [(0, 2), (2, 3), (3, 4)], [(0, 2), (2, 4)]
        assert passes == [(150, *g) for g in groups_of_3 * 2] + [(100, *g) for g in groups_of_2]
        assert lab.outputs(request) == [401, 402, 403]


def test_layered_cohorts_are_served_in_turn_and_s_edf_lets_an_urgent_one_pass_between_groups() -> None:
    def first_token(name: str) -> tuple[float, float]:
        with Lab(SYSTEMS[name]) as lab:
            long = lab.submit(tokens=2000, slo=SLO(ttft=60.0))
            lab.step_until("started")
            lab.run(0.1)
            urgent = lab.submit(tokens=30, slo=SLO(ttft=2.5), sampling=Sampling(max_tokens=1))
            lab.run()
            return token_times(lab, long)[0], token_times(lab, urgent)[0]

    long, urgent = first_token("layered")
    assert urgent > long  # Layered Prefill's own head-of-line blocking
    long_edf, urgent_edf = first_token("layered-s-edf")
    assert urgent_edf < 0.5 * urgent and urgent_edf < long_edf
    assert long_edf - long < 0.1  # and it costs the long one only what the short one takes


def test_exclusive_prefills_go_first_and_may_leave_a_step_between() -> None:
    def phases(name: str) -> list[str]:
        with Lab(SYSTEMS[name]) as lab:
            lab.submit(tokens=4, slo=SLO(ttft=50.0), sampling=Sampling(max_tokens=10))
            lab.step_until("token")
            for _ in range(3):
                lab.submit(tokens=3000, slo=SLO(ttft=50.0))
            lab.run()
            return [event.data["phase"] for event in starts(lab)]

    assert "".join(phase[0] for phase in phases("exclusive")).startswith("pddppp")
    assert "".join(phase[0] for phase in phases("exclusive-parks")).startswith("pddpdpdpd")


@pytest.mark.parametrize(("tbt", "quantum"), [(0.05, 0.02), (0.2, 0.02), (0.03, 0.1)])
def test_interleaved_prefills_pull_over_when_a_decode_step_is_due(tbt: float, quantum: float) -> None:
    system = replace(SYSTEMS["interleave"], placement=Interleave(quantum=quantum))
    with Lab(system) as lab:
        decoding = lab.submit(tokens=4, slo=SLO(ttft=9.0, tbt=tbt), sampling=Sampling(max_tokens=60))
        lab.step_until("token")
        long = lab.submit(tokens=100, slo=SLO(ttft=60.0))
        lab.run()
        operator, step = 0.0001 + 0.0001 * 100, 20 * 0.0002
        # Each gap is within the target, or as long as the prefill's quantum, a boundary and the step take.
        assert largest_gap(lab, decoding) <= max(tbt, quantum + operator + step) + 1e-9
        parks = [event for event in lab.events if event.kind == Kind.PARKED]
        assert parks
        assert token_times(lab, long)


def test_a_prefill_gets_its_quantum_however_hopeless_the_decodes_target_is() -> None:
    with Lab(replace(SYSTEMS["interleave"], placement=Interleave(quantum=0.05))) as lab:
        lab.submit(tokens=4, slo=SLO(ttft=9.0, tbt=0.001), sampling=Sampling(max_tokens=60))
        lab.step_until("token")
        long = lab.submit(tokens=100, slo=SLO(ttft=60.0))  # 20 operators, 0.2 s in all
        lab.step_until("park_requested")
        lab.run()
        steps = [event.time for event in starts(lab) if event.data["phase"] == "decode"]
        parks = [event.time for event in lab.events if event.kind == Kind.PARKED]
        done = token_times(lab, long)[0]
        operator = 0.0001 + 0.0001 * 100
        assert 2 <= len(parks) <= 4 and all(b - a >= 0.05 for a, b in pairwise(parks))
        assert len([time for time in steps if parks[0] <= time < done]) == len(parks)  # one at each park
        assert max(b - a for a, b in pairwise(steps)) <= 0.05 + operator + 2 * 20 * 0.0002 + 1e-9


@pytest.mark.parametrize(("count", "rows"), [(True, 61), (False, 64)])
def test_decodes_count_against_the_budget_of_a_pass_if_told_to(count: bool, rows: int) -> None:
    """Sarathi-Serve's stall-free batching: the budget bounds the iteration, and so the gap between tokens."""
    system = replace(SYSTEMS["piggyback-chunked"], batch=FillChunks(64, decodes_count=count))
    with Lab(system) as lab:
        lab.submit(tokens=4, sampling=Sampling(max_tokens=60, n=3))
        lab.step_until("token")
        lab.submit(tokens=500)
        lab.run()
        both = [event.data for event in starts(lab) if event.data["phase"] == "both" and event.data["decodes"] == 3]
        assert {data["rows"] for data in both[:-1]} == {(rows,)}


def test_a_step_that_would_make_the_prefill_late_yields_if_told_to() -> None:
    def met(yields: str) -> tuple[bool, bool]:
        placement = Interleave(quantum=0.001, yields=yields)  # type: ignore[arg-type]
        with Lab(replace(SYSTEMS["interleave"], placement=placement), model=FakeModel(num_layers=40)) as lab:
            decoding = lab.submit(tokens=4, slo=SLO(ttft=9.0, tbt=0.1), sampling=Sampling(max_tokens=20))
            lab.step_until("token")
            tight = lab.submit(tokens=10, slo=SLO(ttft=0.28))  # needs 0.22 s; a decode step takes 0.04 s
            lab.run()
            return token_times(lab, tight)[0] <= tight.deadline, largest_gap(lab, decoding) <= 0.102

    assert met("ttft") == (False, True)
    assert met("tbt") == (True, False)


def test_static_batches_run_to_their_end_before_the_next_begins() -> None:
    with Lab(SYSTEMS["request-level"]) as lab:
        lab.submit(tokens=10, sampling=Sampling(max_tokens=20))
        lab.submit(tokens=10, sampling=Sampling(max_tokens=5))
        lab.step_until("token")
        lab.submit(tokens=10)
        lab.run()
        assert "".join(event.data["phase"][0] for event in starts(lab))[: 1 + 19 + 1] == "p" + "d" * 19 + "p"


@pytest.mark.parametrize("name", SYSTEMS)
def test_arrivals_that_never_stop_do_not_starve_decodes_for_ever(name: str) -> None:
    """Case A9. Whole prompts and exclusive prefills may stall decodes, by design; all others bound the gap."""
    with Lab(SYSTEMS[name]) as lab:
        decoding = lab.submit(tokens=4, slo=SLO(ttft=9.0, tbt=0.1), sampling=Sampling(max_tokens=30))
        for i in range(60):
            lab.submit_at(0.05 * i, tokens=64, slo=SLO(ttft=9.0, tbt=0.1), sampling=Sampling(max_tokens=2))
        lab.run()
        assert decoding.state == State.FINISHED
        bound = {"piggyback-whole": 9.0, "exclusive": 9.0}.get(name, 0.6)
        assert largest_gap(lab, decoding) <= bound


def test_when_blocks_run_short_the_latest_request_is_computed_again() -> None:
    with Lab(SYSTEMS["piggyback-chunked"], config=EngineConfig(num_blocks=10)) as lab:
        poison_freed_blocks(lab)
        old = lab.submit(tokens=60, sampling=Sampling(max_tokens=60))
        lab.run(0.01)
        new = lab.submit(tokens=60, sampling=Sampling(max_tokens=60))
        lab.run()
        recomputed = [event.request for event in lab.events if event.kind == Kind.RECOMPUTED]
        assert recomputed and set(recomputed) == {new}
        assert lab.outputs(old) == lab.outputs(new) == list(range(61, 121))
        assert len(token_times(lab, new)) == 60  # every token was delivered once
        assert token_times(lab, old)[-1] < token_times(lab, new)[-1]


def test_of_several_the_latest_gives_its_blocks_up_and_is_computed_again_in_turn() -> None:
    """The older ones go on as if nobody else were there; nothing is sampled twice."""
    with Lab(SYSTEMS["piggyback-chunked"], config=EngineConfig(num_blocks=14)) as lab:
        poison_freed_blocks(lab)
        executor = lab.engine.instances[0].executor
        prepare, drawn = executor.prepare, []

        def watched(drive: int, work: Work, preempt: Preempt) -> Drive:
            drawn.extend(len(part.draws) for part in work.prefill if part.draws)
            return prepare(drive, work, preempt)

        executor.prepare = watched  # type: ignore[method-assign]
        requests = []
        for _ in range(3):
            requests.append(lab.submit(tokens=60, sampling=Sampling(max_tokens=60)))
            lab.run(0.01)
        lab.run()
        recomputed = [event.request for event in lab.events if event.kind == Kind.RECOMPUTED]
        assert recomputed[0] is requests[2] and requests[0] not in recomputed
        assert [request.recomputes for request in requests] == [recomputed.count(request) for request in requests]
        assert drawn == [1, 1, 1]
        assert [lab.outputs(request) for request in requests] == [list(range(61, 121))] * 3
        ends = [token_times(lab, request)[-1] for request in requests]
        assert ends == sorted(ends)
        lab.check()


def test_an_older_request_behind_a_full_batch_of_a_younger_one_is_not_held_up_by_it() -> None:
    """The batch has room for the three choices of the youngest, which find no blocks; the two older ones stand behind
    them, since they were computed again. They go first, at the youngest's expense."""
    for seed in range(40):
        random = Random(seed)
        with Lab(SYSTEMS["interleave"], config=EngineConfig(num_blocks=26, max_batch=3)) as lab:
            requests = []
            for i in range(6):
                sampling = Sampling(max_tokens=random.randint(20, 60), n=random.choice([1, 3]))
                requests.append(lab.submit(tokens=random.randint(1, 200), sampling=sampling))
                lab.run(0.1 * (i % 2))
            lab.run()
            assert [request.state for request in requests] == [State.FINISHED] * 6, seed
            lab.check()


@pytest.mark.parametrize("name", SYSTEMS)
def test_forks_that_find_no_blocks_wait_for_the_older_request_to_go_on(name: str) -> None:
    """The prompt fits beside the older request, its three choices do not: computed again at once, before any decode, it
    would never end."""
    with Lab(SYSTEMS[name], config=EngineConfig(num_blocks=26)) as lab:
        old = lab.submit(tokens=193, sampling=Sampling(max_tokens=36))  # 13 blocks, 15 in the end
        lab.step_until("token")
        forks = lab.submit(tokens=150, sampling=Sampling(max_tokens=30, n=3))  # 10 blocks, 16 in the end
        lab.run(30.0)
        assert old.state == forks.state == State.FINISHED
        assert [choice.tokens for choice in forks.choices] == [list(range(151, 181))] * 3
        assert lab.engine.idle
        lab.check()


@pytest.mark.parametrize("name", ["layered-s-edf", "exclusive-parks", "interleave"])
def test_forks_that_find_no_blocks_let_the_prefill_that_holds_them_go_on(name: str) -> None:
    """However urgent they are: the long prefill has been set aside for them, with its blocks."""
    with Lab(replace(SYSTEMS[name], order=EDF()), config=EngineConfig(num_blocks=26)) as lab:
        long = lab.submit(tokens=240, slo=SLO(ttft=60.0), sampling=Sampling(max_tokens=5))  # 15 blocks
        lab.run(0.1)
        forks = lab.submit(tokens=150, slo=SLO(ttft=3.0), sampling=Sampling(max_tokens=20, n=3))  # 10, and 2 for forks
        lab.run(30.0)
        assert long.state == forks.state == State.FINISHED
        assert forks.recomputes == 1  # not before there is room for all of it
        assert [choice.tokens for choice in forks.choices] == [list(range(151, 171))] * 3
        lab.check()


@pytest.mark.parametrize("preempt", [Preempt.NEVER, Preempt.LAYER])
def test_a_prefill_that_nobody_waits_for_any_more_stops_at_the_next_gate(preempt: Preempt) -> None:
    """Case B5, below the system's own level."""
    with Lab(replace(SYSTEMS["exclusive"], preempt=preempt)) as lab:
        long = lab.submit(tokens=1000)
        lab.run(0.25)  # in the third of twenty operators
        lab.engine.abort(long.id)
        assert lab.step_until("parked").data["boundary"] == 3
        lab.run()
        assert lab.engine.idle


def test_a_prefill_that_is_tried_alone_holds_a_copy_back_and_does_not_lose_it() -> None:
    """A request of two choices has just been prefilled, and its fork is about to copy the block that it shares. But the
    next pass is for one who may not have company, as its cohort has failed."""
    with Lab(SYSTEMS["piggyback-whole"], model=FakeModel(fail_on=666)) as lab:
        poison_freed_blocks(lab)
        two = lab.submit(tokens=20, sampling=Sampling(max_tokens=30, n=2))
        bad = lab.submit([1, 666])
        good = lab.submit(tokens=30, sampling=Sampling(max_tokens=30))
        lab.run()
        assert bad.state == State.FAILED
        assert [choice.tokens for choice in two.choices] == [list(range(21, 51))] * 2
        assert lab.outputs(good) == list(range(31, 61))
        failed = [event for event in lab.events if event.kind == Kind.DRIVE_FAILED]
        assert len(failed) == 2  # the cohort, and the bad one alone: nobody else noticed anything
        lab.check()


def test_a_bad_request_in_a_hybrid_pass_fails_alone() -> None:
    with Lab(SYSTEMS["piggyback-chunked"], model=FakeModel(fail_on=666)) as lab:
        good = [lab.submit([10 + i], sampling=Sampling(max_tokens=30)) for i in range(3)]
        lab.step_until("token")
        bad = lab.submit([1, 2, 666])
        dies_later = lab.submit([660], sampling=Sampling(max_tokens=30))
        lab.run()
        lab.check()
        assert (bad.state, dies_later.state) == (State.FAILED, State.FAILED)
        assert [lab.outputs(request) for request in good] == [list(range(11 + i, 41 + i)) for i in range(3)]
        assert lab.engine.idle


@pytest.mark.parametrize("name", ["piggyback-whole", "piggyback-chunked", "layered"])
def test_one_prefill_and_one_decode_in_a_pass_that_fails_are_tried_apart(name: str) -> None:
    """Each is the only one of its kind, and only one of them is at fault."""

    def tried(lab: Lab) -> list[str]:
        failed = next(event for event in lab.events if event.kind == Kind.DRIVE_FAILED)
        return [event.data["phase"] for event in lab.events[lab.events.index(failed) :] if event.kind == Kind.STARTED]

    with Lab(SYSTEMS[name], model=FakeModel(fail_on=666)) as lab:
        good = lab.submit([10], sampling=Sampling(max_tokens=30))
        lab.step_until("token")
        bad = lab.submit([1, 666])
        lab.run()
        assert (good.state, bad.state) == (State.FINISHED, State.FAILED)
        assert lab.outputs(good) == list(range(11, 41))
        assert tried(lab)[:2] == ["decode", "prefill"]
    with Lab(SYSTEMS[name], model=FakeModel(fail_on=666)) as lab:
        bad = lab.submit([663], sampling=Sampling(max_tokens=30))
        lab.step_until("token")
        good = lab.submit([1, 2], sampling=Sampling(max_tokens=5))
        lab.run()
        assert (bad.state, good.state) == (State.FAILED, State.FINISHED)
        assert lab.outputs(bad) == [664, 665, 666] and lab.outputs(good) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ["piggyback-whole", "piggyback-chunked", "layered"])
def test_suspects_that_leave_before_they_are_tried_do_not_hold_the_others_up(name: str) -> None:
    """The pass fails in the very moment in which the client of its only decode goes away."""
    with Lab(SYSTEMS[name], model=FakeModel(fail_on=666)) as lab:
        gone = lab.submit(tokens=5, sampling=Sampling(max_tokens=30))
        lab.step_until("token")
        bad, good = lab.submit([1, 666, 3]), lab.submit([5, 6], sampling=Sampling(max_tokens=2))

        def leave(event: Event) -> None:
            if event.kind == Kind.STARTED and event.data["phase"] == "both":
                lab.loop.call_soon(lab.engine.abort, gone.id)

        lab.engine.timeline.add(leave)
        lab.run()
        assert [request.state for request in (gone, bad, good)] == [State.ABORTED, State.FAILED, State.FINISHED]
        lab.check()
        assert lab.engine.idle


def test_a_park_is_asked_for_once_whoever_comes_meanwhile() -> None:
    """What is measured as blocking is the time since then."""
    with Lab(SYSTEMS["interleave"]) as lab:
        lab.submit(tokens=4, slo=SLO(ttft=9.0, tbt=0.05), sampling=Sampling(max_tokens=5))
        lab.step_until("token")
        lab.submit(tokens=1000, slo=SLO(ttft=60.0))
        lab.step_until("park_requested")
        for _ in range(3):
            lab.submit(tokens=1, slo=SLO(ttft=90.0))
            lab.run(0.001)
        lab.step_until("parked")
        assert [event.kind for event in lab.events].count(Kind.PARK_REQUESTED) == 1


def test_a_prefill_that_may_go_on_though_a_step_is_due_is_not_asked_all_the_time() -> None:
    placement = Interleave(quantum=0.001, yields="tbt")
    with Lab(replace(SYSTEMS["interleave"], placement=placement), model=FakeModel(num_layers=40)) as lab:
        lab.submit(tokens=4, slo=SLO(ttft=9.0, tbt=0.1), sampling=Sampling(max_tokens=20))
        lab.step_until("token")
        instance, looks = lab.engine.instances[0], []
        act = instance.act
        instance.act = lambda now: (looks.append(now), act(now))[1]  # type: ignore[method-assign]
        lab.submit(tokens=10, slo=SLO(ttft=0.28))  # its 200 operators take 0.22 s, a step takes 0.04 s
        lab.step_until("first_token")
        assert len(looks) <= 10


def test_where_a_prefill_pulls_over_a_decode_step_comes_before_the_urgent_one() -> None:
    with Lab(SYSTEMS["exclusive-parks"]) as lab:
        lab.submit(tokens=4, slo=SLO(ttft=9.0), sampling=Sampling(max_tokens=50))
        lab.step_until("token")
        long = lab.submit(tokens=2000, slo=SLO(ttft=90.0))
        lab.run(0.5)
        urgent = lab.submit(tokens=10, slo=SLO(ttft=2.0))
        parked = lab.step_until("parked")
        lab.run()
        after = [event for event in lab.events if event.kind in (Kind.STARTED, Kind.RESUMED)]
        after = [event for event in after if event.time >= parked.time]
        assert [event.data.get("phase", "resumed") for event in after[:4]] == ["decode", "prefill", "decode", "resumed"]
        assert after[1].data["requests"] == (urgent.id,) and long.state == State.FINISHED


@pytest.mark.parametrize("name", ["layered-s-edf", "exclusive-parks", "interleave"])
def test_who_was_answered_in_time_is_not_refused_for_being_late_when_computed_again(name: str) -> None:
    system = replace(SYSTEMS[name], order=SEDF(late=Late.REFUSED))
    with Lab(system, config=EngineConfig(num_blocks=10)) as lab:
        requests = []
        for _ in range(2):
            slo = SLO(ttft=0.4, tbt=0.05)
            requests.append(lab.submit(tokens=60, slo=slo, sampling=Sampling(max_tokens=60)))
            lab.run(0.01)
        lab.run()
        recomputed = [event for event in lab.events if event.kind == Kind.RECOMPUTED]
        assert recomputed and any(event.request.deadline < lab.now for event in recomputed if event.request)
        assert [lab.outputs(request) for request in requests] == [list(range(61, 121))] * 2


@given(
    st.lists(
        st.tuples(
            st.integers(1, 300),  # prompt tokens
            st.floats(0, 2),  # arrival
            st.sampled_from([0.1, 1.0, None]),  # TTFT target
            st.integers(1, 40),  # output tokens
            st.integers(1, 3),  # choices
            st.one_of(st.none(), st.floats(0, 3)),  # when it is aborted
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(sorted(SYSTEMS)),
    st.sampled_from([26, 48, 500]),
)
def test_after_any_storm_the_pool_is_whole(storm: list[tuple], name: str, blocks: int) -> None:
    """In pools that are too small for all requests at once, so that some are computed again."""
    with Lab(SYSTEMS[name], config=EngineConfig(num_blocks=blocks)) as lab:
        poison_freed_blocks(lab)
        requests: list[LiveRequest] = []

        def submit(tokens: int, ttft: float | None, out: int, n: int) -> None:
            if tokens + n * (out + 16) < blocks * 16:
                slo = SLO(ttft=ttft, tbt=0.05)
                requests.append(lab.submit(tokens=tokens, slo=slo, sampling=Sampling(max_tokens=out, n=n)))

        for number, (tokens, arrival, ttft, out, n, aborted) in enumerate(storm):
            lab.loop.call_at(arrival, submit, tokens, ttft, out, n)
            if aborted is not None:
                lab.loop.call_at(aborted, lab.engine.abort, number)
        lab.run()
        lab.check()
        assert not [e for e in lab.events if e.kind == Kind.DRIVE_FAILED]  # a retry would hide what the model noticed
        assert lab.engine.idle and lab.engine.instances[0].quota.used == 0
        for request in requests:
            assert len([e for e in lab.events if e.request is request and e.kind in TERMINAL]) == 1
            if request.state == State.FINISHED:
                first = request.prompt[-1] + 1
                wanted = list(range(first, first + request.sampling.max_tokens))
                assert [choice.tokens for choice in request.choices] == [wanted] * request.sampling.n


@pytest.mark.parametrize(
    ("placement", "preempt", "message"),
    [
        (Piggyback(), Preempt.OPERATOR, "preempt operator is impossible with piggybacked decodes"),
        (Piggyback(), Preempt.LAYER, "preempt layer is impossible with piggybacked decodes"),
        (Interleave(), Preempt.SLICE, "preempt slice is impossible with interleaved decodes"),
        (RequestLevel(), Preempt.OPERATOR, "preempt operator is impossible with request-level batches"),
    ],
)
def test_impossible_systems_are_refused_by_name(placement, preempt: Preempt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        System(FCFS(), Alone(), Whole(), preempt, placement)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: Layered(0), "layered.work must be at least 1 token, got 0"),
        (lambda: Layered(chunk=0), "layered.chunk must be at least 1 token, got 0"),
        (lambda: Layered(-1), "layered.work must be at least 1 token, got -1"),
        (lambda: Layered(chunk=-1), "layered.chunk must be at least 1 token, got -1"),
        (lambda: Layered(fixed_groups=0), "layered.fixed_groups must be at least 1, got 0"),
        (lambda: Layered(fixed_groups=-1), "layered.fixed_groups must be at least 1, got -1"),
        (lambda: Chunked(0), "chunk size must be at least 1 token, got 0"),
        (lambda: Chunked(-1), "chunk size must be at least 1 token, got -1"),
        (lambda: Layered(fixed_groups=9).groups(10, 8), "9 layer groups are more than the model's 8 layers"),
        (lambda: Lab(of_groups(5)), "5 layer groups are more than the model's 4 layers"),  # not at the first request
        (lambda: Interleave(quantum=0), "interleave.quantum must be above 0 seconds"),
        (lambda: Interleave(yields="both"), "interleave.yields must be 'ttft' or 'tbt'"),  # type: ignore[arg-type]
        (lambda: EngineConfig(system=SYSTEMS["layered"], decode_instances=2), "decode_instances has no meaning"),
        (lambda: Lab(SYSTEMS["layered"], decode_model=FakeModel()), "has no second device for decodes"),
    ],
)
def test_bad_settings_are_refused_by_name(bad, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad()


def test_equal_arrivals_do_not_block_each_other_when_blocks_run_short() -> None:
    """Two of the same moment fill the pool to its last block: the later by number gives way."""
    with Lab(SYSTEMS["piggyback-chunked"], config=EngineConfig(num_blocks=26)) as lab:
        requests = [lab.submit(tokens=244, sampling=Sampling(max_tokens=19))]
        requests.append(lab.submit(tokens=131, sampling=Sampling(max_tokens=17, n=2)))
        lab.run()
        assert [request.state for request in requests] == [State.FINISHED] * 2
        assert [event.request for event in lab.events if event.kind == Kind.RECOMPUTED] == [requests[1]]
