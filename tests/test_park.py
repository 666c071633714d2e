"""The promise of the mechanism: a forward pass parked anywhere gives bit for bit what it gives when never parked."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from conftest import poison, poison_freed_blocks

from engine.config import EngineConfig
from engine.gate import Gate
from engine.lab import Lab
from engine.timeline import Kind
from kv.cache import KVCache
from models.batch import Batch
from models.decoder import Model
from models.load import fill, load_model
from models.toy import random_weights, toy_moe_config
from scheduling.request import SLO, Sampling, State

PROMPT_LENGTHS = (37, 5, 64)  # a cohort: inside a block, less than one, exactly four


class ParkAt(Gate):
    """Parks once, at boundary `index`."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def __await__(self) -> Generator[None]:
        if self.passed == self.index:
            yield


@pytest.fixture(scope="module", params=["toy", "toy-moe", "mixed"])
def model(request: pytest.FixtureRequest) -> Model:
    """Dense layers, sparse ones, and both in turn."""
    if request.param != "mixed":
        return load_model(request.param)
    config = toy_moe_config()
    assert config.moe is not None
    mixed = Model(replace(config, num_layers=4, moe=replace(config.moe, layers=(1, 2))), torch.float32)
    fill(mixed, random_weights(mixed.config, seed=0))
    return mixed


def new_cache(model: Model) -> KVCache:
    shape = model.config
    cache = KVCache(shape.num_layers, 64, 16, shape.num_kv_heads, shape.head_dim, model.cache_dtype)
    poison(cache, list(range(64)))
    return cache


def cohort(model: Model, cache: KVCache, first_block: int, lengths: tuple[int, ...], seed: int) -> Batch:
    draw = random.Random(seed)
    parts = []
    for length in lengths:
        blocks = list(range(first_block, first_block := first_block - (-length // 16)))
        parts.append(([draw.randrange(model.config.vocab_size) for _ in range(length)], 0, blocks))
    return Batch.build(cache, parts)


@torch.inference_mode()
def prefill(model: Model, batch: Batch, gate: Gate, meanwhile: Batch | None = None) -> tuple[torch.Tensor, int]:
    """Logits of all rows, and how often the pass was suspended. `meanwhile` crosses all layers during each park."""
    parks = 0
    pass_ = model.run_layers(model.embed(batch.tokens), 0, model.config.num_layers, batch, gate)
    try:
        while True:
            pass_.send(None)
            parks += 1
            if meanwhile is not None:
                prefill(model, meanwhile, Gate())
    except StopIteration as done:
        return model.head(done.value), parks


def boundaries(model: Model) -> int:
    return sum(len(model.layer_operators(layer)) for layer in range(model.config.num_layers))


def test_parked_at_every_operator_in_turn_the_logits_are_bitwise_equal(model: Model) -> None:
    """Case A8. Another cohort crosses all layers during each park, in the same cache tensors."""
    cache = new_cache(model)
    expected, parks = prefill(model, cohort(model, cache, 0, PROMPT_LENGTHS, seed=1), Gate())
    assert parks == 0
    written = [tensor[:8].clone() for tensor in (*cache.key, *cache.value)]
    for index in range(1, boundaries(model) + 1):
        cache = new_cache(model)
        batch = cohort(model, cache, 0, PROMPT_LENGTHS, seed=1)
        logits, parks = prefill(model, batch, ParkAt(index), meanwhile=cohort(model, cache, 20, (50, 3), seed=2))
        assert parks == 1, index
        assert torch.equal(logits, expected), f"parked at boundary {index}"
        for now, then in zip((*cache.key, *cache.value), written, strict=True):
            assert torch.equal(now[:8].nan_to_num(), then.nan_to_num()), f"parked at boundary {index}"


def test_parked_at_every_boundary_of_one_pass(model: Model) -> None:
    class ParkAlways(Gate):
        def __await__(self) -> Generator[None]:
            yield

    cache = new_cache(model)
    expected, _ = prefill(model, cohort(model, cache, 0, PROMPT_LENGTHS, seed=3), Gate())
    logits, parks = prefill(model, cohort(model, new_cache(model), 0, PROMPT_LENGTHS, seed=3), ParkAlways())
    assert parks == boundaries(model)
    assert torch.equal(logits, expected)


def toy_lab(model: Model) -> Lab:
    lab = Lab("flowprefill", model=model, config=EngineConfig(num_blocks=128), per_operator=0.001, per_token=0.0)
    poison_freed_blocks(lab)
    return lab


def submit_cohort(lab: Lab) -> list:
    draw = random.Random(7)
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]
    return [lab.submit(prompt, slo=SLO(ttft=50.0), sampling=sampling) for prompt in prompts]


def test_through_the_engine_a_park_at_every_operator_changes_no_token(model: Model) -> None:
    with toy_lab(model) as lab:
        requests = submit_cohort(lab)
        lab.run()
        expected = [lab.outputs(request) for request in requests]
        assert [len(tokens) for tokens in expected] == [6, 6, 6]
    for index in range(1, boundaries(model)):
        with toy_lab(model) as lab:
            requests = submit_cohort(lab)
            lab.step_until("started")
            lab.run(0.001 * (index - 0.5))
            urgent = lab.submit([1, 2, 3], slo=SLO(ttft=1.0))
            assert lab.step_until("parked").data["boundary"] == index
            lab.run()
            assert [lab.outputs(request) for request in requests] == expected, f"parked at boundary {index}"
            assert urgent.state == State.FINISHED
            lab.check()


@pytest.mark.parametrize("leavers", [(0, 1, 2), (1,), (0,)], ids=["all", "one", "head"])
@pytest.mark.parametrize("parked", [False, True], ids=["running", "parked"])
def test_abort_at_every_operator_leaves_the_pools_whole(model: Model, leavers: tuple[int, ...], parked: bool) -> None:
    """All members of a cohort, or one of several, leave at every boundary in turn; freed blocks hold NaN at once."""
    with toy_lab(model) as lab:
        requests = submit_cohort(lab)
        lab.run()
        expected = [lab.outputs(request) for request in requests]
    for index in range(1, boundaries(model)):
        with toy_lab(model) as lab:
            requests = submit_cohort(lab)
            lab.step_until("started")
            lab.run(0.001 * (index - 0.5))
            if parked:
                lab.submit([1, 2, 3], slo=SLO(ttft=1.0))
                lab.step_until("parked")
            at = lab.now
            for leaver in leavers:
                assert lab.engine.abort(requests[leaver].id)
            lab.check()
            lab.run()
            lab.check()
            assert lab.engine.idle
            for i, request in enumerate(requests):
                if i in leavers:
                    assert request.state == State.ABORTED and lab.outputs(request) == []
                else:
                    assert lab.outputs(request) == expected[i], f"aborted at boundary {index}"
            if len(leavers) == len(requests):
                # Case B5: nobody waits for this prefill any more, so it stopped at the next gate.
                closed = next(e for e in lab.events if e.kind == Kind.CLOSED)
                assert closed.time - at <= 0.0011
