"""The simulated executor against execution operator by operator: same times, same parks, same ends."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.course import Course, Leg, Steps
from engine.engine import Engine
from engine.executor import Executor, Forwards
from engine.fake import OPERATORS, FakeModel
from engine.metrics import RequestRows, Row
from engine.simulated import SimulatedExecutor
from engine.stepping import SteppingExecutor
from engine.timeline import Event, Kind
from engine.virtual import VirtualLoop
from models.costs import Volume
from scheduling.predictor import Predictor
from scheduling.preempt import Preempt
from scheduling.presets import PRESETS, preset
from scheduling.request import SLO, Sampling

LAYERS = 3
REQUESTS = 40


def cost(rows: int) -> float:
    """Seconds of an operator; no sum of some equals another, so that nothing happens at the same moment by chance."""
    return 0.0004 + 0.0001 * float(rows**0.97)


class FlatTiming:
    """Every operator takes `cost(rows)` seconds, and nothing else takes any."""

    def before(self, volume: Volume) -> float:
        return 0.0

    def legs(self, first: int, last: int, *volumes: Volume) -> list[Leg]:
        seconds = [cost(sum(volume.rows for volume in volumes))] * len(OPERATORS)
        return [Leg(last - first, OPERATORS, tuple(accumulate(seconds)))] if last > first else []

    def after(self, volume: Volume) -> float:
        return 0.0

    def hand_over(self, tokens: int) -> float:
        return 0.0

    def slowdown(self, volume: Volume) -> float:
        return 1.0


def play(system: str, seed: int, *, simulated: bool) -> tuple[list[Row], list[Event]]:
    """Random requests, two of which are aborted: their rows by id, and all events of prefills."""
    random, loop = Random(seed), VirtualLoop()

    def make_executor(name: str, threads: int, forwards: Forwards) -> Executor:
        if simulated:
            return SimulatedExecutor(loop, FlatTiming())
        return SteppingExecutor(loop, forwards, lambda operator, rows: cost(rows))

    operators = LAYERS * len(OPERATORS)
    predictor = Predictor(per_step=0.0004 * operators, per_token=0.0001 * operators)
    config = EngineConfig(preset(system), predictor, num_blocks=400, max_batch=6)
    engine = Engine(FakeModel(num_layers=LAYERS), config, clock=loop, make_executor=make_executor)
    rows = RequestRows()
    prefills: list[Event] = []
    failures: list[Event] = []
    engine.timeline.add(rows)
    engine.timeline.add(lambda event: failures.append(event) if event.kind is Kind.DRIVE_FAILED else None)
    engine.timeline.add(lambda event: prefills.append(event) if event.instance == "prefill-0" else None)
    loop.run_until_complete(engine.start())
    for _ in range(REQUESTS):
        prompt = [1 + i % 500 for i in range(random.choice((11, 20, 90, 500)))]
        sampling = Sampling(max_tokens=random.randint(1, 40), ignore_eos=True)
        slo = SLO(ttft=random.choice((0.2, 1.0, 5.0)), tbt=0.1)
        loop.call_at(random.uniform(0, 4), partial(engine.submit, prompt, sampling=sampling, slo=slo))
    loop.call_at(2.0, engine.abort, 5)
    loop.call_at(3.0, engine.abort, 9)
    loop.run_until_complete(asyncio.sleep(1000))
    assert engine.idle and not failures
    for device in engine.devices:
        device.pool.check()
    loop.run_until_complete(engine.stop())
    loop.close()
    return sorted(rows.rows, key=lambda row: row.id), prefills


@pytest.mark.parametrize("system", PRESETS)
def test_it_gives_the_times_of_execution_operator_by_operator(system: str) -> None:
    for seed in range(2):
        stepped, stepped_prefills = play(system, seed, simulated=False)
        simulated, simulated_prefills = play(system, seed, simulated=True)
        assert [row.id for row in stepped] == [row.id for row in simulated] == list(range(REQUESTS))
        for one, other in zip(stepped, simulated, strict=True):
            assert one.finish == other.finish
            for name in ("first_token", "ended"):
                assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-6), (one.id, name)
            if one.finish == "finished":  # of an aborted one the convoy does not tell how far it had come
                assert one.output_tokens == other.output_tokens
                for name in ("tbt_mean", "tbt_p99", "tbt_max"):
                    assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-6), (one.id, name)
        assert [(e.kind, e.drive, e.data) for e in stepped_prefills] == [
            (e.kind, e.drive, e.data) for e in simulated_prefills
        ]
        for stepped_event, simulated_event in zip(stepped_prefills, simulated_prefills, strict=True):
            assert simulated_event.time == pytest.approx(stepped_event.time, abs=1e-6)


def test_the_traces_above_do_park_and_resume() -> None:
    kinds = [event.kind for event in play("flowprefill", 0, simulated=True)[1]]
    assert kinds.count(Kind.PARKED) >= 5 and kinds.count(Kind.RESUMED) >= 5


SECONDS = st.integers(1, 40).map(lambda n: n / 8)  # exact in binary, so that sums are
LEGS = st.lists(st.tuples(st.integers(1, 4), st.lists(SECONDS, min_size=5, max_size=5)), max_size=3)


@given(LEGS, SECONDS, SECONDS, st.integers(0, 8 * 400))
def test_a_course_agrees_with_a_walk_over_its_operators(
    legs: list[tuple[int, list[float]]], before: float, after: float, eighths: int
) -> None:
    course = Course(before, tuple(Leg(n, OPERATORS, tuple(accumulate(s))) for n, s in legs), after)
    ends, names = [], []
    clock = before
    for layers, seconds in legs:
        for _ in range(layers):
            for name, each in zip(OPERATORS, seconds, strict=True):
                clock += each
                ends.append(clock)
                names.append(name)
    elapsed = eighths / 8
    assert course.seconds == clock + after and course.boundaries == len(ends)
    assert course.passed(elapsed) == sum(end <= elapsed for end in ends)
    assert [course.find(i + 1) for i in range(len(ends))] == list(zip(ends, names, strict=True))
    with pytest.raises(ValueError, match=f"has {len(ends)} boundaries"):
        course.find(len(ends) + 1)
    passed = course.passed(elapsed)
    for level in Preempt:
        stops = [i + 1 for i, name in enumerate(names) if i + 1 > passed and level.stops_at(name)]
        assert course.next_stop(passed, level) == (stops[0] if stops else None)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 50), st.integers(0, 8 * 200))
def test_steps_agree_with_a_walk_over_them(moves: float, step: float, growth: float, count: int, eighths: int) -> None:
    steps, ends, clock = Steps(moves, step, growth, count), [], moves
    for number in range(count):
        clock += step + growth * number
        ends.append(clock)
    assert [steps.end_of(number) for number in range(1, count + 1)] == ends and steps.seconds == ends[-1]
    elapsed = eighths / 8
    under_way = sum(end <= elapsed for end in ends) + 1
    assert steps.under_way(elapsed) == min(under_way, count)
