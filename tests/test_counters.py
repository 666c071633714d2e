"""What drives read and compute, counted: experts by the routing that really happened, the rest from the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from model_helpers import prompt

from engine.config import EngineConfig
from engine.counters import Account, Counters
from engine.counting import Counting
from engine.executor import Finished, Forwards, drive_on
from engine.gate import Gate
from engine.lab import Lab
from engine.sampling import Draw
from engine.simulation import Arrival, Deployment, simulate
from engine.timeline import Kind
from engine.virtual import VirtualLoop
from engine.work import Carried, Computed, Part, Work
from kv.cache import KVCache
from models.config import ModelConfig
from models.costs import Volume, model_costs
from models.decoder import Model
from models.load import fill, load_model
from models.moe import MoE
from models.toy import random_weights, toy_moe_config
from scheduling.batch import FillBudget, FillChunks
from scheduling.layered import Layered
from scheduling.order import FCFS
from scheduling.placement import Piggyback
from scheduling.plan import Chunked, Plan, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.request import Sampling

EXPERT = 3 * 128 * 64 * 4  # bytes of one expert of the toy
DRAW = (Draw(Sampling(), seed=0, index=0, position=0),)


def mixed() -> Model:
    """Layers 1, 2 and 4 of five are sparse."""
    config = toy_moe_config()
    assert config.moe is not None
    model = Model(replace(config, num_layers=5, moe=replace(config.moe, layers=(1, 2, 4))), torch.float32)
    fill(model, random_weights(model.config, seed=0))
    return model


def run(model: Model, work: Work) -> Counters:
    shape = model.config
    cache = KVCache(shape.num_layers, 64, 16, shape.num_kv_heads, shape.head_dim, torch.float32)
    for tensor in (*cache.key, *cache.value):
        tensor.zero_()
    counting = Counting(model_costs(shape, itemsize=4))
    with torch.inference_mode():
        reply = drive_on(Forwards(model, cache, counting).drive(0, work, Gate()), VirtualLoop())
    assert isinstance(reply, Finished) and isinstance(reply.value, Computed) and reply.value.counters is not None
    return reply.value.counters


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[int]]]:
    """The experts that each sparse layer's router has chosen, noted on the way."""
    seen: list[set[int]] = []
    route = MoE.route

    def noting(self: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = route(self, x)
        seen.append(set(chosen.flatten().tolist()))
        return weights, chosen

    monkeypatch.setattr(MoE, "route", noting)
    yield seen


# One pass


def test_experts_are_counted_as_they_were_chosen(met: list[set[int]]) -> None:
    parts = (Part(prompt(30, 1), 0, (0, 1), DRAW), Part(prompt(3, 2), 0, (2,), DRAW))
    counters = run(load_model("toy-moe"), Work(6, parts, last=6))
    assert len(met) == 6 and any(len(experts) < 32 for experts in met)
    assert counters.expert_bytes == pytest.approx(EXPERT * sum(map(len, met)))
    assert counters.prefill_expert_bytes == counters.expert_bytes
    assert counters.passes == 1


def test_a_layers_experts_are_charged_to_all_its_rows_evenly(met: list[set[int]]) -> None:
    """A layered iteration: two decode rows cross all layers, six prefill rows the layers [2, 4) only."""
    decodes = tuple(Part([7 + i], 20, (8 + 2 * i, 9 + 2 * i), DRAW) for i in range(2))
    work = Work(5, (Part(prompt(6, 3), 0, (0,)),), decodes, first=2, last=4, carried=Carried(torch.randn(6, 128)))
    counters = run(mixed(), work)
    layer_1, layer_2, layer_4 = map(len, met)
    assert counters.expert_bytes == pytest.approx(EXPERT * (layer_1 + layer_2 + layer_4))
    assert counters.prefill_expert_bytes == pytest.approx(EXPERT * layer_2 * 6 / 8)


def test_a_group_that_begins_behind_sparse_layers(met: list[set[int]]) -> None:
    work = Work(5, (Part(prompt(6, 3), 0, (0,), DRAW),), first=2, last=5, carried=Carried(torch.randn(6, 128)))
    counters = run(mixed(), work)
    assert len(met) == 2
    assert counters.expert_bytes == counters.prefill_expert_bytes == pytest.approx(EXPERT * sum(map(len, met)))


def test_dense_models_have_no_experts_and_the_rest_is_arithmetic() -> None:
    counters = run(load_model("toy"), Work(4, (Part(prompt(10), 0, (0,), DRAW),), (Part([1], 6, (1,), DRAW),), last=4))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 192  # weights
    head, pairs = 64 * 259, 55 + 7
    assert counters.expert_bytes == counters.prefill_expert_bytes == 0
    assert counters.flops == 4 * (2 * 11 * layer + 4 * 64 * pairs) + 2 * 2 * head
    assert counters.kv_bytes == 4 * (10 + 7) * 2 * 2 * 16 * 4  # K and V of two heads of 16 in float32
    activations = counters.bytes - counters.kv_bytes - 4 * (4 * layer + head)
    assert 0 < activations < counters.bytes


def test_nobody_asked_nothing_kept() -> None:
    model = load_model("toy-moe")
    cache = KVCache(6, 8, 16, 2, 32, torch.float32)
    gate = Gate()
    with torch.inference_mode():
        reply = drive_on(
            Forwards(model, cache).drive(0, Work(6, (Part([1, 2], 0, (0,), DRAW),), last=6), gate), VirtualLoop()
        )
    assert isinstance(reply, Finished) and reply.value.counters is None and reply.value.counted == {}
    assert gate.routed is None


# Expected ones


def test_expected_and_measured_differ_in_the_experts_alone() -> None:
    model = load_model("toy-moe")
    work = Work(6, (Part(prompt(40), 0, (0, 1, 2), DRAW),), (Part([1], 6, (5,), DRAW),), last=6)
    measured, expected = run(model, work), Counting(model_costs(model.config, itemsize=4)).expected(work)
    assert (expected.flops, expected.kv_bytes) == (measured.flops, measured.kv_bytes)
    without = measured.bytes - measured.expert_bytes
    assert expected.bytes - expected.expert_bytes == pytest.approx(without)
    assert expected.expert_bytes != measured.expert_bytes
    assert expected.prefill_expert_bytes == pytest.approx(expected.expert_bytes * 40 / 41)


def test_ranks_are_counted_together() -> None:
    config: ModelConfig = toy_moe_config()
    work = Work(6, (Part(prompt(40), 0, (0, 1, 2), DRAW),), last=6)
    alone, two = (Counting(model_costs(config, tp=tp, itemsize=4)).expected(work) for tp in (1, 2))
    assert (two.expert_bytes, two.kv_bytes) == pytest.approx((alone.expert_bytes, alone.kv_bytes))
    assert two.passes == 1


def test_experts_of_layers_are_read_once_in_a_layered_prefill() -> None:
    """Groups add up to the whole; chunks read the experts again each time."""
    counting = Counting(model_costs(toy_moe_config(), itemsize=4))
    part = Part(range(2048), 0, ())
    whole = counting.expected(Work(6, (part,), last=6))
    groups = [counting.expected(Work(6, (part,), first=i, last=i + 2)) for i in (0, 2, 4)]
    chunks = [counting.expected(Work(6, (Part(range(512), i, ()),), last=6)) for i in range(0, 2048, 512)]
    assert sum(one.expert_bytes for one in groups) == pytest.approx(whole.expert_bytes)
    assert sum(one.flops for one in groups) == pytest.approx(whole.flops)
    assert sum(one.flops for one in chunks) == pytest.approx(whole.flops)
    assert sum(one.expert_bytes for one in chunks) > 3 * whole.expert_bytes
    assert sum(one.kv_bytes for one in chunks) == pytest.approx(whole.kv_bytes * (512 + 1024 + 1536 + 2048) / 2048)


# Through the engine


def account(plan: Plan) -> tuple[Account, list[dict]]:
    """Four prompts that overlap, and what their drives were counted at."""
    batch = FillChunks(64) if isinstance(plan, Chunked) else FillBudget(1024)
    system = System(FCFS(), batch, plan, Preempt.SLICE, Piggyback())
    model = load_model("toy-moe")
    with Lab(system, model=model, config=EngineConfig(num_blocks=512, counters=True), per_token=0.001) as lab:
        books = Account()
        lab.engine.timeline.add(books)
        for seed in range(4):
            lab.submit(prompt(150 + seed, seed), sampling=Sampling(max_tokens=8, ignore_eos=True))
            lab.run(0.05)
        lab.run()
        return books, [event.data for event in lab.events if event.kind == Kind.COMPLETED]


def test_the_engine_counts_where_it_is_asked_to() -> None:
    books, completed = account(Chunked(64))
    assert books.total == sum((Counters(**data) for data in completed), Counters())
    assert books.total.passes == len(completed)
    assert set(books.expert_bytes) == {0, 1, 2, 3}
    assert sum(books.expert_bytes.values()) == pytest.approx(books.total.expert_bytes)
    assert books.mean_decode_batch > 1
    with Lab("flowprefill", model=load_model("toy-moe")) as lab:
        lab.submit(tokens=5)
        lab.run()
        assert all(event.data == {} for event in lab.events if event.kind == Kind.COMPLETED)


def test_layers_in_groups_read_fewer_experts_than_chunks() -> None:
    """Layered Prefill's claim, on routing that really happened; both compute the same."""
    (layered, _), (chunked, _) = account(Layered(64)), account(Chunked(64))
    assert layered.total.flops == pytest.approx(chunked.total.flops, rel=0.01)
    assert layered.total.prefill_expert_bytes < 0.6 * chunked.total.prefill_expert_bytes
    assert layered.total.expert_bytes < 0.9 * chunked.total.expert_bytes


def test_counters_add_up() -> None:
    one = Counters(1, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert one + one == one * 2 == Counters(2, 4.0, 6.0, 8.0, 10.0, 12.0)
    assert Counters(**one.data) == one
    assert Volume.of(0, 0) == Volume(sequences=1)


# In a simulation


def test_a_simulation_counts_by_the_coverage_model() -> None:
    """Eight decode steps, run in one go, are counted as one by one."""
    books = Account()
    system = System(FCFS(), FillBudget(1024), Whole(), Preempt.NEVER)
    simulate(system, [Arrival(0.0, 200, 9)], Deployment(toy_moe_config()), sinks=[books], counters=True)
    counting = Counting(model_costs(toy_moe_config()))
    expected = counting.expected(Work(6, (Part(range(200), 0, (), DRAW),), last=6))
    for step in range(8):
        expected += counting.expected(Work(6, decode=(Part([0], 200 + step, (), DRAW),)))
    assert books.total.passes == 9 and books.mean_decode_batch == 1
    assert books.total.data == pytest.approx(expected.data)
    assert books.expert_bytes == {0: pytest.approx(expected.expert_bytes)}
