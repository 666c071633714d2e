"""What a pass costs that carries a prefill and decodes: weights once for both, attention for each."""

from __future__ import annotations

import pytest

from engine.hardware import DEVICES
from engine.roofline import Roofline
from engine.simulated import SimulatedExecutor
from engine.virtual import VirtualLoop
from engine.work import Part, Work
from models.architectures import ARCHITECTURES
from models.costs import Volume, model_costs
from scheduling.preempt import Preempt

QWEN = model_costs(ARCHITECTURES["qwen3-30b-a3b"], tp=2)
TIMING = Roofline(QWEN, DEVICES["h100-80g-nano-vllm"])
LAYERS = QWEN.num_layers
PREFILL = Volume.of(0, 512)
DECODES = sum([Volume.of(9000, 1, 1)] * 15, Volume.of(9000, 1, 1))


def seconds(operator: str, *volumes: Volume) -> float:
    """Of one layer."""
    (leg,) = TIMING.legs(0, 1, *volumes)
    index = leg.operators.index(operator)
    return leg.ends[index] - (leg.ends[index - 1] if index else 0.0)


def test_attention_takes_prefills_and_decodes_one_after_the_other() -> None:
    apart = seconds("attention", PREFILL) + seconds("attention", DECODES)
    assert seconds("attention", PREFILL, DECODES) == pytest.approx(apart)


@pytest.mark.parametrize("operator", ["qkv_proj", "o_proj", "experts"])
def test_weights_are_read_once_for_both(operator: str) -> None:
    both = seconds(operator, PREFILL, DECODES)
    assert seconds(operator, PREFILL) <= both < seconds(operator, PREFILL) + seconds(operator, DECODES)
    assert both == pytest.approx(seconds(operator, PREFILL + DECODES))


def course_seconds(prefill: Volume | None, first: int, last: int, decodes: int) -> float:
    """Of a pass through the simulated executor."""
    loop = VirtualLoop()
    executor = SimulatedExecutor(loop, TIMING)
    prompt = (Part(range(prefill.rows), 0, ()),) if prefill else ()
    work = Work(LAYERS, prompt, tuple(Part((0,), 8999, ()) for _ in range(decodes)), first=first, last=last)
    drive = executor.prepare(0, work, Preempt.NEVER)
    loop.close()
    return drive.course.seconds


def test_a_layered_iteration_costs_its_group_with_both_and_the_other_layers_with_decodes_alone() -> None:
    def layers(count: int, *volumes: Volume) -> float:
        return sum(leg.seconds for leg in TIMING.legs(0, count, *volumes))

    decodes = sum([Volume.of(8999, 1)] * 15, Volume.of(8999, 1))
    together = course_seconds(PREFILL, 12, 15, 16)
    expected = TIMING.before(PREFILL + decodes) + layers(3, PREFILL, decodes) + layers(LAYERS - 3, decodes)
    assert together == pytest.approx(expected)
    # A prefill without decodes skips the other layers.
    assert course_seconds(PREFILL, 12, 15, 0) == pytest.approx(TIMING.before(PREFILL) + layers(3, PREFILL))


def test_sixteen_groups_cost_the_decodes_sixteen_steps_and_the_prefill_its_layers_once() -> None:
    """Chunks read all experts sixteen times, groups once: that is all that Layered Prefill saves."""
    prompt = Volume.of(0, 8192)
    chunks = sum(course_seconds(Volume.of(0, 512), 0, LAYERS, 9) for _ in range(16))
    groups = sum(course_seconds(prompt, 3 * group, 3 * group + 3, 9) for group in range(16))
    alone = course_seconds(prompt, 0, LAYERS, 0)
    steps = 16 * course_seconds(None, 0, 0, 9)
    assert groups < chunks
    assert alone < groups < alone + steps + 16 * TIMING.device.step
