"""A request's life and its ends: whatever happens there is one terminal event, and the pools are whole."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from conftest import poison_freed_blocks
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.decode import DecodeInstance
from engine.engine import Engine
from engine.errors import EngineStopped, Refused, RequestFailed
from engine.fake import FakeModel
from engine.lab import Lab
from engine.output import Choice, LiveRequest, Output
from engine.prefill import PrefillInstance, first_draws
from engine.prometheus import PrometheusMetrics
from engine.timeline import TERMINAL, Kind
from scheduling.request import SLO, Sampling, State


def ends(lab: Lab, request: LiveRequest) -> list[Kind]:
    return [e.kind for e in lab.events if e.request is request and e.kind in TERMINAL]


def outputs(lab: Lab, request: LiveRequest) -> list[Output]:
    """All that a client would have received; raises what it would have raised."""

    async def read() -> list[Output]:
        return [output async for output in lab.engine.stream(request)]

    return lab.loop.run_until_complete(read())


# Refused at once


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "the prompt is empty"),
        ([1] * 4096, Sampling(), "4096 tokens, and the context of 4096"),
        ([1, 1000], Sampling(), "token id 1000 is not in the vocabulary of 1000"),
        ([5, -1, 7], Sampling(), "token id -1 is not in the vocabulary"),
        ([1], Sampling(n=33), "n is 33; at most 32"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    lab: Lab, prompt: list[int], sampling: Sampling, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        lab.submit(prompt, sampling=sampling)
    assert [e.kind for e in lab.events] == [Kind.ARRIVED, Kind.REFUSED]
    after = lab.submit([1, 2])
    lab.run()
    assert after.state == State.FINISHED


def test_a_request_within_the_context_but_beyond_the_pool_is_refused_with_both_numbers() -> None:
    """Case A11: the context allows 300 tokens, a quota of 8 blocks holds 128."""
    with Lab(config=EngineConfig(num_blocks=16, max_model_len=300)) as lab:
        with pytest.raises(Refused, match="the prompt has 200 tokens, and the KV cache for prefill holds 128"):
            lab.submit(tokens=200)
        with pytest.raises(Refused, match=r"ask for 144 tokens of KV cache with n = 1, .* decode holds 128"):
            lab.submit(tokens=100, sampling=Sampling(max_tokens=40))
        later = lab.submit(tokens=100, sampling=Sampling(max_tokens=28))
        lab.run()
        assert later.state == State.FINISHED and len(lab.outputs(later)) == 28


def test_max_tokens_beyond_the_context_is_cut(lab: Lab) -> None:
    """Case C8."""
    request = lab.submit(tokens=4090, sampling=Sampling(max_tokens=500))
    lab.run()
    assert len(lab.outputs(request)) == 6
    assert outputs(lab, request)[-1].finish == "length"


# Ends of every kind


def test_eos_ends_a_choice_unless_ignored() -> None:
    with Lab(model=FakeModel(eos=13)) as lab:
        stops = lab.submit([10], sampling=Sampling(max_tokens=9))
        ignores = lab.submit([10], sampling=Sampling(max_tokens=9, ignore_eos=True))
        lab.run()
        assert lab.outputs(stops) == [11, 12, 13]
        assert outputs(lab, stops)[-1].finish == "stop"
        assert lab.outputs(ignores) == list(range(11, 20))


def test_a_first_token_that_is_the_last_needs_no_decode(lab: Lab) -> None:
    request = lab.submit(tokens=5, sampling=Sampling(max_tokens=1))
    lab.run()
    assert lab.outputs(request) == [6]
    assert not [e for e in lab.events if e.kind == Kind.DECODING]


def test_aborting_what_has_finished_does_nothing(lab: Lab) -> None:
    """Case B2: no abort after a normal end, and aborting twice is harmless."""
    request = lab.submit(tokens=5)
    other = lab.submit(tokens=50)
    lab.run(0.0001)
    assert lab.engine.abort(other.id) and not lab.engine.abort(other.id)
    lab.run()
    assert not lab.engine.abort(request.id)
    assert not lab.engine.abort(12345)
    assert ends(lab, request) == [Kind.FINISHED] and ends(lab, other) == [Kind.ABORTED]


@pytest.mark.parametrize("at", ["arrived", "started", "parked", "first_token", "handover_wait", "decoding", "token"])
def test_abort_finds_a_request_in_every_state(at: str) -> None:
    """Cases B3 and B7: both sides are free afterwards."""
    with Lab(config=EngineConfig(num_blocks=240, prefill_share=0.6)) as lab:
        poison_freed_blocks(lab)
        slow = Sampling(max_tokens=100)
        blocker = None
        if at == "handover_wait":
            blocker = lab.submit(tokens=1000, sampling=Sampling(max_tokens=520))  # leaves decode no room
            lab.step_until("decoding")
        victim = lab.submit(tokens=1000, slo=SLO(ttft=80.0), sampling=slow)
        if at == "parked":
            lab.step_until("started")
            lab.run(0.15)
            lab.submit(tokens=5, slo=SLO(ttft=0.5))
        if at != "arrived":
            lab.step_until(at)
        assert lab.engine.abort(victim.id)
        lab.check()
        if blocker is not None:
            assert lab.engine.abort(blocker.id)
        lab.run()
        assert ends(lab, victim) == [Kind.ABORTED]
        assert lab.engine.idle
        assert all(instance.quota.used == 0 for instance in (*lab.engine.prefill, *lab.engine.decode))


def test_a_prefill_that_all_leave_while_it_is_asked_to_park_stops_at_the_next_gate() -> None:
    """Case B5 below the system's own level: an abandoned pass does not go on to the end of its layer."""
    with Lab("flowprefill-layer") as lab:
        long = lab.submit(tokens=1000, slo=SLO(ttft=90.0))
        lab.step_until("started")
        lab.run(0.25)  # in the third of five operators
        lab.submit(tokens=5, slo=SLO(ttft=5.0))
        lab.step_until("park_requested")
        lab.engine.abort(long.id)
        assert lab.step_until("parked").data["boundary"] == 3
        lab.run()
        assert lab.engine.idle


def test_a_late_signal_about_a_request_that_is_gone_is_ignored_and_counted(lab: Lab) -> None:
    """Case B8: and what is counted is told, under /metrics."""
    request = lab.submit(tokens=5)
    lab.engine.abort(request.id)  # its arrival is still in the inbox
    lab.run()
    metrics = PrometheusMetrics().render(lab.engine)
    assert 'layby_late_signals_total{instance="prefill-0"} 1\n' in metrics
    assert ends(lab, request) == [Kind.ABORTED]


def test_a_small_decode_pool_holds_the_prefills_back_and_nobody_hangs() -> None:
    """Case B9: decode has room for one request at a time; ten users, each served completely."""
    with Lab(config=EngineConfig(num_blocks=40, prefill_share=0.8)) as lab:
        poison_freed_blocks(lab)
        requests = [lab.submit(tokens=100, sampling=Sampling(max_tokens=28)) for _ in range(10)]
        lab.step_until("handover_wait")
        lab.run()
        assert [request.state for request in requests] == [State.FINISHED] * 10
        assert all(len(lab.outputs(request)) == 28 for request in requests)
        running: set[int] = set()
        for event in lab.events:
            if event.kind == Kind.DECODING and event.request:
                running.add(event.request.id)
            elif event.kind == Kind.FINISHED and event.request:
                running.discard(event.request.id)
            assert len(running) <= 1


def test_stopping_one_choice_ends_it_and_no_other(lab: Lab) -> None:
    request = lab.submit(tokens=5, sampling=Sampling(max_tokens=20, n=2))
    lab.step_until("token")
    lab.engine.stop_choice(request, 1)
    lab.run()
    assert len(request.choices[0].tokens) == 20
    assert len(request.choices[1].tokens) < 20 and request.choices[1].finish == "stop"
    assert ends(lab, request) == [Kind.FINISHED]


def test_stopping_the_last_choice_finishes_the_request(lab: Lab) -> None:
    request = lab.submit(tokens=5, sampling=Sampling(max_tokens=20))
    lab.step_until("token")
    lab.engine.stop_choice(request, 0)
    lab.engine.stop_choice(request, 0)
    assert ends(lab, request) == [Kind.FINISHED]


# Failures


def test_one_bad_request_does_not_take_its_cohort_with_it() -> None:
    with Lab(model=FakeModel(fail_on=666)) as lab:
        poison_freed_blocks(lab)
        good = [lab.submit([10 + i, 20 + i], slo=SLO(ttft=9.0), sampling=Sampling(max_tokens=3)) for i in range(3)]
        bad = lab.submit([1, 666, 2], slo=SLO(ttft=9.0))
        lab.run()
        lab.check()
        assert [lab.outputs(request) for request in good] == [[21 + i, 22 + i, 23 + i] for i in range(3)]
        assert ends(lab, bad) == [Kind.FAILED]
        with pytest.raises(RequestFailed, match="asked to fail on token 666"):
            outputs(lab, bad)
        assert len([e for e in lab.events if e.kind == Kind.DRIVE_FAILED]) == 2  # with its mates, then alone
        after = lab.submit([5])
        lab.run()
        assert after.state == State.FINISHED and lab.engine.idle


def test_one_bad_decode_does_not_take_its_batch_with_it() -> None:
    with Lab(model=FakeModel(fail_on=666)) as lab:
        poison_freed_blocks(lab)
        good = [lab.submit([10 + i], sampling=Sampling(max_tokens=12, n=2)) for i in range(3)]
        bad = lab.submit([660], sampling=Sampling(max_tokens=12))
        lab.run()
        lab.check()
        assert ends(lab, bad) == [Kind.FAILED] and lab.outputs(bad) == [661, 662, 663, 664, 665, 666]
        for i, request in enumerate(good):
            assert [choice.tokens for choice in request.choices] == [list(range(11 + i, 23 + i))] * 2
        assert lab.engine.idle


# Several choices, several devices


def test_choices_share_the_prompt_and_copy_its_last_block_on_write(lab: Lab) -> None:
    request = lab.submit(tokens=40, sampling=Sampling(max_tokens=10, n=4))
    lab.step_until("decoding")
    # 40 + 10 tokens are 4 blocks; the first two are shared, and each fork has two of its own.
    assert lab.engine.decode[0].quota.used == 4 + 3 * 2
    lab.run()
    assert [choice.tokens for choice in request.choices] == [list(range(41, 51))] * 4


def test_sampled_choices_differ_and_are_repeatable() -> None:
    def run(seed: int) -> list[list[int]]:
        with Lab() as lab:
            sampling = Sampling(max_tokens=8, n=3, temperature=5.0, seed=seed)
            request = lab.submit(tokens=20, sampling=sampling)
            lab.submit(tokens=7)
            lab.run()
            return [choice.tokens for choice in request.choices]

    first = run(1)
    assert first == run(1) and first != run(2)
    assert len({tuple(tokens) for tokens in first}) == 3


@pytest.mark.parametrize("instances", [(1, 1), (2, 2)])
def test_hand_over_to_another_device_copies_the_prompt(instances: tuple[int, int]) -> None:
    """Both devices are this CPU; pools, caches and quotas are separate. The counting model checks what it reads."""
    config = EngineConfig(num_blocks=64, prefill_instances=instances[0], decode_instances=instances[1])
    with Lab(decode_model=FakeModel(), config=config) as lab:
        poison_freed_blocks(lab)
        requests = [lab.submit(tokens=30 + i, sampling=Sampling(max_tokens=5, n=1 + i % 3)) for i in range(9)]
        lab.step_until("token")
        lab.engine.abort(requests[4].id)
        lab.run()
        lab.check()
        for i, request in enumerate(requests):
            if i != 4:
                assert [choice.tokens for choice in request.choices] == [list(range(31 + i, 36 + i))] * (1 + i % 3)
        assert lab.engine.idle
        assert all(instance.quota.used == 0 for instance in (*lab.engine.prefill, *lab.engine.decode))


# The engine's own ends


def test_late_requests_can_be_refused_by_choice() -> None:
    from dataclasses import replace

    from scheduling.order import SEDF, Late
    from scheduling.presets import preset

    with Lab(replace(preset("flowprefill"), order=SEDF(Late.REFUSED))) as lab:
        lab.submit(tokens=2000, slo=SLO(ttft=20.0))
        lab.step_until("started")
        hopeless = lab.submit(tokens=1000, slo=SLO(ttft=0.1))
        lab.run()
        assert ends(lab, hopeless) == [Kind.REFUSED]
        with pytest.raises(Refused, match="TTFT target can no longer be met"):
            outputs(lab, hopeless)


def test_stop_drains_then_aborts_and_takes_nothing_more() -> None:
    lab = Lab()
    quick, slow = lab.submit(tokens=5), lab.submit(tokens=500, sampling=Sampling(max_tokens=3000))
    lab.loop.run_until_complete(lab.engine.stop(drain_seconds=1.5))
    assert (quick.state, slow.state) == (State.FINISHED, State.ABORTED)
    with pytest.raises(EngineStopped):
        lab.submit(tokens=5)
    lab.check()
    lab.loop.close()


def test_a_crash_of_the_engines_own_code_leaves_nobody_waiting() -> None:
    lab = Lab()
    lab.loop.set_exception_handler(lambda loop, context: None)

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a bug")

    lab.engine.prefill[0].prefills.scheduler.decide = broken  # type: ignore[method-assign]
    request = lab.submit(tokens=5)
    with pytest.raises(RequestFailed, match="prefill-0 has crashed: ZeroDivisionError"):
        outputs(lab, request)
    assert not lab.engine.accepting
    with pytest.raises(EngineStopped, match="crashed"):
        lab.submit(tokens=5)
    lab.loop.run_until_complete(lab.engine.stop())
    lab.loop.close()


# Storms


@given(
    st.lists(
        st.tuples(
            st.integers(1, 400),  # prompt tokens
            st.floats(0, 3),  # arrival
            st.sampled_from([0.1, 0.5, 2.0, None]),  # TTFT target
            st.integers(1, 40),  # output tokens
            st.integers(1, 3),  # choices
            st.one_of(st.none(), st.floats(0, 4)),  # when it is aborted
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(["distserve", "flowprefill-layer", "flowprefill", "flowprefill-release"]),
    st.booleans(),
)
def test_after_any_storm_the_pools_are_whole(storm: list[tuple], system: str, two_devices: bool) -> None:
    """Any mix of requests and aborts under any system, in pools that are too small for all of them at once."""
    decode_model = FakeModel() if two_devices else None
    with Lab(system, decode_model=decode_model, config=EngineConfig(num_blocks=128)) as lab:
        poison_freed_blocks(lab)
        requests: list[LiveRequest] = []

        def submit(tokens: int, ttft: float | None, out: int, n: int) -> None:
            sampling = Sampling(max_tokens=out, n=n)
            requests.append(lab.submit(tokens=tokens, slo=SLO(ttft=ttft), sampling=sampling))

        for number, (tokens, arrival, ttft, out, n, aborted) in enumerate(storm):
            lab.loop.call_at(arrival, submit, tokens, ttft, out, n)
            if aborted is not None:
                lab.loop.call_at(aborted, lab.engine.abort, number)
        lab.run()
        lab.check()
        assert not [e for e in lab.events if e.kind == Kind.DRIVE_FAILED]  # a retry would hide what the model noticed
        assert lab.engine.idle
        assert all(instance.quota.used == 0 for instance in (*lab.engine.prefill, *lab.engine.decode))
        for request in requests:
            assert len(ends(lab, request)) == 1
            if request.state == State.FINISHED:
                first = request.prompt[-1] + 1
                wanted = list(range(first, first + request.sampling.max_tokens))
                assert [choice.tokens for choice in request.choices] == [wanted] * request.sampling.n


def test_live_threads_give_what_the_lab_gives() -> None:
    """The same engine on real threads and real time: 40 requests, some of them aborted at random moments."""

    async def live() -> None:
        engine = Engine(FakeModel(), EngineConfig(num_blocks=256))
        await engine.start()

        async def client(i: int) -> None:
            await asyncio.sleep(0.002 * (i % 7))
            sampling = Sampling(max_tokens=8, n=1 + i % 2)
            request = engine.submit([1 + k % 500 for k in range(3 + 17 * i)], slo=SLO(ttft=0.2), sampling=sampling)
            if i % 5 == 0:
                await asyncio.sleep(0.001 * (i % 11))
                engine.abort(request.id)
            tokens: dict[int, list[int]] = {}
            async for output in engine.stream(request):
                if output.token is not None:
                    tokens.setdefault(output.index, []).append(output.token)
            if request.state == State.FINISHED:
                first = request.prompt[-1] + 1
                assert tokens == {index: list(range(first, first + 8)) for index in range(request.sampling.n)}
            else:
                assert request.state == State.ABORTED and i % 5 == 0

        await asyncio.wait_for(asyncio.gather(*(client(i) for i in range(40))), 60)
        await engine.stop()
        assert engine.idle
        for instance in (*engine.prefill, *engine.decode):
            instance.quota.pool.check()
            assert instance.quota.used == 0

    asyncio.run(live())


def test_an_abort_between_a_reply_and_its_handling_hurts_nobody(lab: Lab) -> None:
    """The prefill has replied, and the client leaves before the reply has been taken out of the inbox."""
    leaver, mate = lab.submit(tokens=30, slo=SLO(ttft=9.0)), lab.submit(tokens=20, slo=SLO(ttft=9.0))
    instance = lab.engine.prefill[0]
    post = instance.executor.on_reply

    def leave_first(reply: Any) -> None:
        post(reply)
        lab.engine.abort(leaver.id)

    instance.executor.on_reply = leave_first
    lab.run()
    assert ends(lab, leaver) == [Kind.ABORTED] and leaver.state == State.ABORTED
    assert mate.state == State.FINISHED and lab.engine.error is None


def test_blocks_that_a_copy_writes_to_are_not_free_before_it_is_done() -> None:
    """Two devices, one choice a step: the second prompt is copied by a step in which it takes no part, and leaves."""
    with Lab("distserve", decode_model=FakeModel(), config=EngineConfig(num_blocks=64, max_batch=1)) as lab:
        lab.submit(tokens=20, sampling=Sampling(max_tokens=9))
        leaver = lab.submit(tokens=20, sampling=Sampling(max_tokens=9))
        decode = lab.engine.decode[0]
        assert isinstance(decode, DecodeInstance)
        lab.step_until("decoding")
        while decode.decodes._stepping is None or leaver not in [c.request for c in decode.decodes._stepping.copies]:
            lab.run(0.00001)
        step, used = decode.decodes._stepping, decode.quota.used
        lab.engine.abort(leaver.id)
        assert decode.decodes._stepping is step and decode.quota.used == used
        lab.run()
        lab.check()
        assert decode.quota.used == 0


def test_blocks_of_a_running_or_parked_forward_pass_are_not_free_before_it_replies(lab: Lab) -> None:
    instance = lab.engine.prefill[0]
    leaver, mate = lab.submit(tokens=300, slo=SLO(ttft=90.0)), lab.submit(tokens=200, slo=SLO(ttft=91.0))
    lab.step_until("started")
    held = instance.quota.used
    lab.engine.abort(leaver.id)  # one of the two, while the pass runs
    assert instance.quota.used == held
    lab.submit(tokens=5, slo=SLO(ttft=0.5))
    lab.step_until("parked")
    lab.engine.abort(mate.id)  # the other, while it is parked
    assert instance.quota.used >= held
    lab.step_until("closed")
    lab.run()
    assert instance.quota.used == 0


def test_a_parked_pass_that_everybody_has_left_lets_its_activations_go(lab: Lab) -> None:
    long = lab.submit(tokens=300, slo=SLO(ttft=90.0))
    lab.step_until("started")
    instance = lab.engine.prefill[0]
    assert isinstance(instance, PrefillInstance)
    drive = next(iter(instance.prefills._passages.values())).drive
    assert drive is not None and drive.coroutine is not None
    lab.submit(tokens=5, slo=SLO(ttft=0.5))
    lab.step_until("parked")
    assert inspect.getcoroutinestate(drive.coroutine) == inspect.CORO_SUSPENDED
    lab.engine.abort(long.id)
    lab.step_until("closed")
    assert inspect.getcoroutinestate(drive.coroutine) == inspect.CORO_CLOSED


def test_a_parked_cohort_is_predicted_by_the_operators_it_has_left(lab: Lab) -> None:
    lab.submit(tokens=300, slo=SLO(ttft=90.0))
    lab.step_until("started")
    lab.run(0.25)
    lab.submit(tokens=5, slo=SLO(ttft=0.5))
    boundary = lab.step_until("parked").data["boundary"]
    instance = lab.engine.prefill[0]
    assert isinstance(instance, PrefillInstance)
    (cohort,) = instance.prefills.scheduler.parked
    assert cohort.inside == boundary / 20
    assert cohort.remaining == pytest.approx(cohort.predicted * (1 - boundary / 20))


def test_every_token_of_every_choice_has_a_draw_of_its_own() -> None:
    request = LiveRequest(0, (1, 2, 3), Sampling(n=3, temperature=1.0), seed=9)
    first = first_draws(request)
    choice = Choice(request, 1, tokens=[5], cached=3)
    assert [(draw.index, draw.position, draw.seed) for draw in first] == [(0, 3, 9), (1, 3, 9), (2, 3, 9)]
    assert (choice.next_draw.index, choice.next_draw.position) == (1, 4)


# Small print


def test_a_stopped_choice_gets_no_further_tokens_and_its_end_is_told(lab: Lab) -> None:
    request = lab.submit(tokens=5, sampling=Sampling(max_tokens=20, n=2))
    lab.step_until("token")
    lab.engine.stop_choice(request, 1)  # while the next step may be under way
    told = len(request.choices[1].tokens)
    lab.run()
    assert len(request.choices[1].tokens) == told
    assert [e.data["reason"] for e in lab.events if e.kind == Kind.FINISHED] == ["length"]


def test_an_abort_is_told_to_the_choices_that_had_not_finished(lab: Lab) -> None:
    request = lab.submit(tokens=5, sampling=Sampling(max_tokens=20, n=2))
    lab.step_until("token")
    lab.engine.stop_choice(request, 1)
    lab.engine.abort(request.id)
    assert [output.index for output in outputs(lab, request) if output.finish == "abort"] == [0]


def test_eos_as_the_last_token_allowed_is_a_stop() -> None:
    with Lab(model=FakeModel(eos=13)) as lab:
        request = lab.submit([10], sampling=Sampling(max_tokens=3))
        lab.run()
        assert outputs(lab, request)[-1].finish == "stop"


def test_a_step_takes_no_more_choices_than_max_batch() -> None:
    with Lab(config=EngineConfig(num_blocks=256, max_batch=3)) as lab:
        requests = [lab.submit(tokens=5, sampling=Sampling(max_tokens=6, n=1 + i % 2)) for i in range(6)]
        lab.run()
        sizes = [e.data["tokens"] for e in lab.events if e.kind == Kind.STARTED and e.data["phase"] == "decode"]
        assert max(sizes) == 3
        assert all(request.state == State.FINISHED for request in requests)


def test_instances_take_turns() -> None:
    with Lab(config=EngineConfig(num_blocks=256, prefill_instances=2, decode_instances=2)) as lab:
        requests = [lab.submit(tokens=5, sampling=Sampling(max_tokens=6)) for _ in range(6)]
        lab.run()
        decoded_on = [e.instance for e in lab.events if e.kind == Kind.DECODING]
        prefilled_on = [e.instance for e in lab.events if e.kind == Kind.STARTED and e.data["phase"] == "prefill"]
        assert {decoded_on.count("decode-0"), decoded_on.count("decode-1")} == {3}
        assert set(prefilled_on) == {"prefill-0", "prefill-1"}
        assert all(request.state == State.FINISHED for request in requests)


def test_the_default_slo_is_for_requests_that_bring_none() -> None:
    with Lab(config=EngineConfig(num_blocks=64, default_slo=SLO(ttft=3.0))) as lab:
        assert lab.submit(tokens=5).slo == SLO(ttft=3.0)
        assert lab.submit(tokens=5, slo=SLO()).slo == SLO()


def test_sampled_requests_without_a_seed_get_different_ones(lab: Lab) -> None:
    sampling = Sampling(max_tokens=8, temperature=5.0)
    one, other = lab.submit(tokens=5, sampling=sampling), lab.submit(tokens=5, sampling=sampling)
    lab.run()
    assert lab.outputs(one) != lab.outputs(other)


def test_the_context_is_what_the_pool_can_hold_and_n_counts_at_admission() -> None:
    """Case A15. 32 blocks, 16 a side: 256 tokens of context, though the model has 4,096."""
    with Lab(config=EngineConfig(num_blocks=32)) as lab:
        assert lab.engine.max_model_len == 256
        with pytest.raises(Refused, match=r"ask for 288 tokens of KV cache with n = 3, .* decode holds 256"):
            lab.submit(tokens=100, sampling=Sampling(max_tokens=60, n=3))
        cut = lab.submit(tokens=200, sampling=Sampling(max_tokens=10_000))  # to what the context leaves
        lab.run()
        assert len(lab.outputs(cut)) == 56


def test_a_copy_from_another_device_survives_the_failure_of_its_step() -> None:
    """The step that was to copy the newcomers' prompts fails for one of them; the others decode what was copied."""
    with Lab(
        model=FakeModel(fail_on=666), decode_model=FakeModel(fail_on=666), config=EngineConfig(num_blocks=96)
    ) as lab:
        poison_freed_blocks(lab)
        bad = lab.submit([665], sampling=Sampling(max_tokens=5))
        good = [lab.submit([100 + i] * 20, sampling=Sampling(max_tokens=5, n=2)) for i in range(3)]
        lab.run()
        lab.check()
        assert bad.state == State.FAILED
        for i, request in enumerate(good):
            assert [choice.tokens for choice in request.choices] == [list(range(101 + i, 106 + i))] * 2
        assert all(device.pool.free_blocks == device.pool.num_blocks for device in lab.engine.devices)


def test_stopping_or_idling_out_of_turn_is_harmless(lab: Lab) -> None:
    gone = lab.submit(tokens=5)
    lab.engine.abort(gone.id)
    lab.engine.stop_choice(gone, 0)  # it never had a choice
    asyncio.run(Engine(FakeModel(), EngineConfig(num_blocks=16)).stop())  # never started


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_who_ends_before_its_prompt_has_been_copied_is_not_copied(how: str) -> None:
    """Two devices; the request ends between its hand-over and the step that would copy its prompt."""
    with Lab("distserve", decode_model=FakeModel(), config=EngineConfig(num_blocks=64)) as lab:
        poison_freed_blocks(lab)
        lab.submit(tokens=20, sampling=Sampling(max_tokens=30))
        lab.step_until("token")
        leaver = lab.submit(tokens=40, sampling=Sampling(max_tokens=9))
        while lab.step_until("decoding").request is not leaver:
            pass
        instance = lab.engine.decode[0]
        assert isinstance(instance, DecodeInstance)
        if how == "abort":
            lab.engine.abort(leaver.id)
        else:
            lab.engine.stop_choice(leaver, 0)
        assert instance.decodes._copies == []
        lab.run()
        lab.check()
        assert all(device.pool.free_blocks == device.pool.num_blocks for device in lab.engine.devices)
