"""This machine in simulation: the profile becomes the times it was made of, and neighbours slow each other down."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.course import Leg
from engine.engine import Engine
from engine.executor import Finished, Parked, Reply, park
from engine.machine import MachineProfile, MeasuredTiming, Pace, PassSample, Slowdown, StepSample, ThisMachine
from engine.measure import load_or_measure, measure_passes
from engine.measure import measure as measure_machine
from engine.measure_serving import measure_pace, measure_slowdowns, measure_steps
from engine.metrics import RequestRows
from engine.simulated import SimulatedExecutor
from engine.simulation import Arrival, simulate
from engine.timeline import Kind
from engine.timing import pass_seconds
from engine.virtual import VirtualLoop
from engine.work import Part, Repeated, Work
from models.costs import Volume
from models.load import load_model
from models.toy import toy_config
from scheduling.predictor import Predictor
from scheduling.preempt import Preempt
from scheduling.presets import preset

OPERATORS = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
LAYERS = toy_config().num_layers


def truth(*parts: tuple[int, int]) -> PassSample:
    """A machine on which rows take 10 us in each projection, and pairs 20 ns in attention."""
    volume = sum((Volume.of(context, tokens, drawn=1) for context, tokens in parts), Volume())
    projection = 50e-6 + 10e-6 * volume.rows
    attention = 30e-6 * volume.sequences + 20e-9 * volume.pairs
    return PassSample(parts, 1e-3, (projection, attention, projection, projection, projection), 2e-3)


PROFILE = MachineProfile(
    provenance={},
    operators=OPERATORS,
    passes=(*(truth((0, n)) for n in (16, 64, 256, 1024)), truth((512, 64)), truth(*((0, 16),) * 4)),
    steps=(
        *(StepSample(n, 100, 0.010 + 0.002 * n + 1e-6 * 100 * n) for n in (1, 2, 4, 8)),
        StepSample(4, 1100, 0.010 + 0.008 + 1e-6 * 4400),
    ),
    prefill_slowdowns=(Slowdown(16, 3.0), Slowdown(116, 2.0), Slowdown(1016, 1.1)),
    decode_slowdowns=(Slowdown(1, 2.0), Slowdown(5, 1.2)),
)


@pytest.mark.parametrize("parts", [((0, 16),), ((0, 500),), ((0, 3000),), ((700, 256),), ((0, 128), (0, 30))])
def test_prefills_take_what_was_measured_and_what_lies_between(parts: tuple[tuple[int, int], ...]) -> None:
    timing, expected = MeasuredTiming(PROFILE, LAYERS), truth(*parts)
    volume = expected.volume
    assert timing.before(volume) == pytest.approx(1e-3) and timing.after(volume) == pytest.approx(2e-3)
    (leg,) = timing.legs(1, 3, volume)
    assert leg.operators == OPERATORS and leg.layers == 2
    ends = [sum(expected.operators[: i + 1]) for i in range(len(OPERATORS))]
    assert list(leg.ends) == pytest.approx(ends, rel=1e-3)
    assert timing.hand_over(1000) == 0.0


@pytest.mark.parametrize(("sequences", "context"), [(1, 100), (3, 100), (8, 2000), (16, 50)])
def test_decode_steps_take_what_was_measured_with_all_that_is_between_them(sequences: int, context: int) -> None:
    timing = MeasuredTiming(PROFILE, LAYERS)
    keys = sequences * context
    volume = Volume(sequences, keys, keys, sequences, sequences)
    expected = 0.010 + 0.002 * sequences + 1e-6 * keys
    assert pass_seconds(timing, LAYERS, volume) == pytest.approx(expected, rel=1e-6)


def test_a_pass_of_both_reads_the_projections_once() -> None:
    timing = MeasuredTiming(PROFILE, LAYERS)
    prefill, decode = Volume.of(0, 200, drawn=1), Volume(8, 8000, 8000, 8, 8)
    (leg,) = timing.legs(0, LAYERS, prefill, decode)
    assert leg.ends[0] == pytest.approx(50e-6 + 10e-6 * 208)
    attention = leg.ends[1] - leg.ends[0]
    step = 0.010 + 0.002 * 8 + 1e-6 * 8000
    of_decodes = (step - 1e-3 - 2e-3) / LAYERS - 4 * (50e-6 + 10e-6 * 16)  # 16 rows: the fewest that were measured
    assert attention == pytest.approx(30e-6 + 20e-9 * 200 * 201 / 2 + of_decodes)


def test_decodes_beside_a_prefill_cost_at_least_their_keys() -> None:
    steps = (StepSample(1, 100, 1e-4 + 1e-6 * 100), StepSample(4, 100, 1e-4 + 4e-4), StepSample(4, 1100, 1e-4 + 4.4e-3))
    timing = MeasuredTiming(replace(PROFILE, steps=steps), LAYERS)
    prefill, decode = Volume.of(0, 200, drawn=1), Volume(4, 8000, 8000, 4, 4)
    (leg,) = timing.legs(0, LAYERS, prefill, decode)
    attention = leg.ends[1] - leg.ends[0]
    assert attention == pytest.approx(30e-6 + 20e-9 * 200 * 201 / 2 + 1e-6 * 8000 / LAYERS)


@pytest.mark.parametrize(
    ("volume", "times"),
    [
        (Volume.of(0, 8), 3.0),
        (Volume.of(500, 66), 2.5),
        (Volume.of(0, 4000), 1.1),
        (Volume(3, 300, 300, 3, 3), 1.6),
        (Volume(9, 900, 900, 9, 9), 1.2),
    ],
)
def test_slowdowns_lie_between_what_was_measured(volume: Volume, times: float) -> None:
    assert MeasuredTiming(PROFILE, LAYERS).slowdown(volume) == pytest.approx(times)


class SecondTiming:
    """Every operator takes a second, and twice as long beside others; decode steps four times."""

    def before(self, volume: Volume) -> float:
        return 0.0

    def legs(self, first: int, last: int, *volumes: Volume) -> list[Leg]:
        return [Leg(last - first, ("attention",), (1.0,))]

    def after(self, volume: Volume) -> float:
        return 0.0

    def hand_over(self, tokens: int) -> float:
        return 0.0

    def slowdown(self, volume: Volume) -> float:
        return 4.0 if volume.rows == 2 else 2.0


def test_neighbours_slow_each_other_down_while_both_are_busy() -> None:
    loop = VirtualLoop()
    prefill, decode = SimulatedExecutor(loop, SecondTiming()), SimulatedExecutor(loop, SecondTiming())
    prefill.neighbours, decode.neighbours = [decode], [prefill]
    replies: list[Reply] = []
    prefill.on_reply = decode.on_reply = replies.append
    long = prefill.prepare(1, Work(10, (Part([1], 0, ()),), last=10), Preempt.OPERATOR)
    short = decode.prepare(2, Work(2, (Part([1, 1], 0, ()),), last=2), Preempt.NEVER)
    loop.call_at(0.0, prefill.start, long)  # ten seconds of work, alone until 3
    loop.call_at(3.0, decode.start, short)  # two seconds of work, never alone: until 11
    loop.call_at(5.5, lambda: replies.append(Parked(0, long.done)))  # a look at it: 3 + 2.5 / 2 = 4.25 of 10 seconds
    loop.run_until_complete(asyncio.sleep(100))
    assert [(type(reply), reply.drive, reply.time) for reply in replies] == [
        (Parked, 0, 0.4),
        (Finished, 2, 11.0),  # until then the long one has done 3 + 8 / 2 = 7 seconds of its work
        (Finished, 1, 14.0),
    ]
    loop.close()


def test_steps_end_together_with_a_change_of_pace() -> None:
    loop = VirtualLoop()
    prefill, decode = SimulatedExecutor(loop, SecondTiming()), SimulatedExecutor(loop, SecondTiming())
    prefill.neighbours, decode.neighbours = [decode], [prefill]
    replies: list[Reply] = []
    decode.on_reply = replies.append
    steps = Work(1, repeated=Repeated(Volume(1, 5, 5, 1, 1), 10))
    loop.call_at(0.0, decode.start, decode.prepare(1, steps, Preempt.SLICE))
    other = prefill.prepare(2, Work(10, (Part([1], 0, ()),), last=10), Preempt.OPERATOR)
    loop.call_at(2.5, prefill.start, other)
    loop.call_at(2.6, park, other)  # parks at the boundary after its first second, which takes two
    loop.run_until_complete(asyncio.sleep(100))
    (reply,) = replies
    assert isinstance(reply, Finished) and reply.value.stretch == (1.0, 3.5, 3)  # the third took half a second longer
    loop.close()


def test_the_engine_of_this_machine_runs_in_simulation() -> None:
    config = EngineConfig(kv_bytes=1 << 20, predictor=Predictor(3e-3, 4e-5 * LAYERS))
    site = ThisMachine(toy_config(), PROFILE, config)
    arrivals = [Arrival(0.05 * i, 40 + 100 * (i % 7), 5 + i % 30) for i in range(50)]
    rows = simulate(preset("flowprefill"), arrivals, site).rows
    assert [row.finish for row in rows] == ["finished"] * 50
    apart = simulate(preset("flowprefill"), arrivals, ThisMachine(toy_config(), _undisturbed(), config)).rows
    assert sum(row.ttft or 0 for row in apart) < sum(row.ttft or 0 for row in rows)
    with pytest.raises(ValueError, match="needs num_blocks or kv_bytes"):
        ThisMachine(toy_config(), PROFILE, EngineConfig())


@pytest.mark.parametrize("name", ["sarathi", "layered", "layby-colocated", "flowprefill-colocated", "static"])
def test_a_co_located_instance_is_simulated_with_no_neighbour(name: str) -> None:
    profile = replace(PROFILE, prefill_slowdowns=(), decode_slowdowns=())
    config = EngineConfig(system=preset(name), kv_bytes=1 << 24)
    assert MeasuredTiming(profile, LAYERS).slowdown(Volume.of(0, 8)) == 1.0
    arrivals = [Arrival(0.05 * i, 40 + 100 * (i % 7), 5 + i % 30) for i in range(50)]
    rows = simulate(preset(name), arrivals, ThisMachine(toy_config(), profile, config)).rows
    assert [row.finish for row in rows] == [Kind.FINISHED] * 50
    with pytest.raises(ValueError, match="several co-located instances"):
        ThisMachine(toy_config(), profile, replace(config, prefill_instances=2))


def _undisturbed() -> MachineProfile:
    none = (Slowdown(1, 1.0),)
    return replace(PROFILE, prefill_slowdowns=none, decode_slowdowns=none)


def test_measuring_gives_times_for_every_shape_step_and_slowdown() -> None:
    model = load_model("toy")
    config = EngineConfig(num_blocks=512, block_size=16)

    async def measure() -> tuple[list[PassSample], StepSample, tuple[list[Slowdown], list[Slowdown]]]:
        passes = await measure_passes(model, 1, (((0, 8),), ((0, 32),), ((16, 8),), ((0, 8),) * 2, ((0, 9999),)))
        slowdowns = await measure_slowdowns(model, config, (8, 32), (1, 2))
        return passes, await measure_steps(model, config, 2, 8), slowdowns

    passes, step, (prefills, steps) = asyncio.run(measure())
    assert [sample.parts for sample in passes] == [((0, 8),), ((0, 32),), ((16, 8),), ((0, 8),) * 2]  # 9,999 do not fit
    for sample in passes:
        assert len(sample.operators) == len(OPERATORS) and min(*sample.operators, sample.after) > 0
    assert step.sequences == 2 and step.seconds > 0
    assert [each.rows for each in prefills] == [8, 32] and [each.rows for each in steps] == [1, 2]
    assert all(each.times >= 1 for each in (*prefills, *steps))


def test_co_located_steps_are_measured_on_all_cores_and_slow_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.measure.PASSES", tuple(((0, n),) for n in (8, 32)))
    monkeypatch.setattr("engine.measure.STEPS", ((1, 8), (2, 8), (2, 64)))
    config = EngineConfig(system=preset("sarathi"), num_blocks=512, block_size=16)
    profile = asyncio.run(measure_machine(load_model("toy"), "toy", config))
    assert [step.sequences for step in profile.steps] == [1, 2, 2] and min(s.seconds for s in profile.steps) > 0
    assert profile.prefill_slowdowns == profile.decode_slowdowns == ()
    assert profile.provenance["decode_threads"] == "0"


def test_at_another_pace_all_prefills_and_all_steps_take_so_much_longer() -> None:
    slow, usual = (MeasuredTiming(profile, LAYERS) for profile in (PROFILE.at_pace(Pace(1.5, 2.0)), PROFILE))
    prefill, decode = Volume.of(100, 300, drawn=1), Volume(5, 1000, 1000, 5, 5)
    assert pass_seconds(slow, LAYERS, prefill) == pytest.approx(1.5 * pass_seconds(usual, LAYERS, prefill))
    assert pass_seconds(slow, LAYERS, decode) == pytest.approx(2.0 * pass_seconds(usual, LAYERS, decode))


@pytest.mark.parametrize("name", ["distserve", "sarathi"])
def test_the_pace_is_what_serving_takes_over_what_the_profile_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile a thousand times too fast gives a pace about a thousand times as high as the true one."""
    monkeypatch.setattr("engine.measure_serving._PACE_PROMPTS", (16, 64))
    monkeypatch.setattr("engine.measure_serving._PACE_CONTEXT", 32)
    model, config = load_model("toy"), EngineConfig(system=preset(name), num_blocks=1024)
    profile = PROFILE.at_pace(Pace(1e-3, 1e-3))
    pace = asyncio.run(measure_pace(model, config, profile))
    assert min(pace.prefill, pace.decode) > 1
    found = MeasuredTiming(profile.at_pace(pace), LAYERS)
    assert 1e-5 < pass_seconds(found, LAYERS, Volume.of(0, 32, drawn=1)) < 1


def test_a_model_that_fails_is_an_error_and_not_a_profile() -> None:
    from engine.fake import FakeModel

    with pytest.raises(RuntimeError, match="failed while measuring"):
        asyncio.run(measure_passes(FakeModel(fail_on=7), 1, (((0, 8),),)))


def test_a_profile_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYBY_CACHE", str(tmp_path))
    model, config, calls = load_model("toy"), EngineConfig(kv_bytes=1 << 20), []

    async def measured(*arguments: object) -> MachineProfile:
        calls.append(arguments)
        return PROFILE

    monkeypatch.setattr("engine.measure.measure", measured)

    def load(*, fresh: bool = False) -> MachineProfile:
        return asyncio.run(load_or_measure(model, "toy", config, fresh=fresh))

    assert load() == load() == PROFILE and len(calls) == 1
    assert load(fresh=True) == PROFILE and len(calls) == 2
    (path,) = tmp_path.rglob("machine-*.json")
    path.write_text('{"provenance": {}}')  # of another time
    assert load() == PROFILE and len(calls) == 3


def test_the_live_engine_and_the_simulated_one_have_the_same_blocks() -> None:
    model = load_model("toy")
    config = EngineConfig(kv_bytes=1 << 20)
    live = Engine(model, config).devices
    simulated = ThisMachine(model.config, PROFILE, config, model.dtype).devices(config.system)
    assert [device.pool.quotas.keys() for device in live] == [device.pool.quotas.keys() for device in simulated]
    for one, other in zip(live, simulated, strict=True):
        assert [q.limit for q in one.pool.quotas.values()] == [q.limit for q in other.pool.quotas.values()]
        assert one.held_bytes_per_token == other.held_bytes_per_token


def test_rows_are_those_of_the_live_engine() -> None:
    """The same kinds of ends and counts, whatever the times."""
    config = EngineConfig(kv_bytes=1 << 20)
    arrivals = [Arrival(0.0, 5, 4), Arrival(0.01, 9, 1), Arrival(0.02, 30, 7)]
    rows = RequestRows()
    simulate(preset("distserve"), arrivals, ThisMachine(toy_config(), PROFILE, config), rows=rows)
    assert sorted((row.prompt_tokens, row.output_tokens) for row in rows.rows) == [(5, 4), (9, 1), (30, 7)]
