"""What mixtures of experts cost: the operators that the gates report, all experts held, only the chosen ones read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.calibration import QWEN3_30B_ON_H100, chunk_seconds, fit_chunks
from engine.hardware import DEVICES
from models.architectures import ARCHITECTURES
from models.config import ModelConfig
from models.costs import Operator, Volume, model_costs
from models.coverage import coverage, separate_rows
from models.decoder import Model
from models.toy import toy_moe_config

QWEN3 = ARCHITECTURES["qwen3-30b-a3b"]


def mixed() -> ModelConfig:
    config = toy_moe_config()
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, layers=(1, 4)))


def operator(config: ModelConfig, name: str, **options: int) -> Operator:
    (found,) = [one for one in model_costs(config, **options).layers[-1] if one.name == name]
    return found


@pytest.mark.parametrize("config", [QWEN3, toy_moe_config(), mixed()], ids=["qwen3-30b-a3b", "toy-moe", "mixed"])
def test_the_operators_of_every_layer_are_those_of_the_gates(config: ModelConfig) -> None:
    model = Model(config, torch.bfloat16, "meta")
    costs = model_costs(config)
    for layer, operators in enumerate(costs.layers):
        assert tuple(one.name for one in operators) == model.layer_operators(layer)


def test_alike_layers_are_counted_together() -> None:
    costs = model_costs(mixed())
    assert [count for count, _ in costs.stretches(0, 6)] == [1, 1, 2, 1, 1]
    assert [count for count, _ in costs.stretches(2, 4)] == [2]


def test_the_published_size() -> None:
    assert model_costs(QWEN3).weight_bytes / 2e9 == pytest.approx(30.53, rel=0.001)


def test_a_token_computes_with_its_own_experts_only() -> None:
    """3.3 billion parameters are active, as the name says; less the embeddings, 2.7."""
    row = Volume(rows=1)
    flops = sum(one.flops(row) for layer in model_costs(QWEN3).layers for one in layer if one.weight_bytes)
    assert flops / 2 == pytest.approx(2.74e9, rel=0.01)


def test_experts_are_read_where_some_row_is_routed_to_them() -> None:
    experts = operator(QWEN3, "experts")
    one = 3 * 2048 * 768 * 2
    assert experts.weight_bytes == 128 * one
    assert experts.weights_read(Volume(rows=1)) == pytest.approx(8 * one)
    assert QWEN3.moe is not None
    assert experts.weights_read(Volume(rows=32)) == pytest.approx(128 * one * coverage(QWEN3.moe, 32))
    assert experts.weights_read(Volume(rows=10**6)) == pytest.approx(128 * one, rel=1e-2)


def test_tokens_of_one_prompt_meet_fewer_experts_than_as_many_decodes() -> None:
    experts = operator(QWEN3, "experts")
    chunk, decodes = Volume.of(1000, 512), Volume(rows=13)
    assert QWEN3.moe is not None
    both = experts.weight_bytes * coverage(QWEN3.moe, separate_rows(512) + 13)
    assert experts.weights_read(chunk + decodes) == pytest.approx(both)
    assert experts.weights_read(chunk) < experts.weights_read(Volume(rows=512))
    assert experts.flops(chunk) == experts.flops(Volume(rows=512))
    assert Volume.of(7, 1, drawn=1) == Volume(rows=1, pairs=8, keys=8, sequences=1, drawn=1)


def test_ranks_share_every_expert_and_sum_the_hidden_state_behind_them() -> None:
    for name in ("router", "dispatch"):
        assert operator(QWEN3, name, tp=2) == operator(QWEN3, name)
    alone, ranks = operator(QWEN3, "experts"), operator(QWEN3, "experts", tp=2)
    volume = Volume(rows=100)
    assert ranks.flops(volume) == alone.flops(volume) / 2
    assert ranks.weights_read(volume) == pytest.approx(alone.weights_read(volume) / 2)
    assert operator(QWEN3, "combine").reduced_bytes_per_row == 0
    assert operator(QWEN3, "combine", tp=2).reduced_bytes_per_row == 2 * 2048


# On a device


def test_two_h100_are_fitted_to_chunked_prefills_of_layered_prefills_figure_2() -> None:
    costs, kept = model_costs(QWEN3, tp=2), DEVICES["h100-80g-nano-vllm"]
    for chunk, (experts, others) in QWEN3_30B_ON_H100.items():
        ours = chunk_seconds(costs, kept, chunk)
        assert ours == pytest.approx((experts, others), rel=0.04)
        assert sum(ours) == pytest.approx(experts + others, rel=0.04)
    fitted = fit_chunks(costs, kept, QWEN3_30B_ON_H100)
    for name in ("launch", "step", "grouped_efficiency", "attention_efficiency", "bandwidth_efficiency"):
        assert getattr(fitted, name) == pytest.approx(getattr(kept, name), rel=0.01)


def test_grouped_products_have_an_efficiency_of_their_own() -> None:
    device = DEVICES["h100-80g"]
    experts, volume = operator(QWEN3, "experts"), Volume(rows=100_000)
    assert device.seconds(experts, volume) == pytest.approx(
        experts.flops(volume) / (989e12 * device.grouped_efficiency)
    )
    with pytest.raises(ValueError, match="grouped_efficiency must be above 0 and at most 1, got 0"):
        replace(device, grouped_efficiency=0)


def test_decodes_replayed_as_a_graph_take_no_launches() -> None:
    device = replace(DEVICES["h100-80g-nano-vllm"], launch=1.0)
    router = operator(QWEN3, "router")
    assert device.seconds(router, Volume(rows=4, sequences=4)) < 0.001
    assert device.seconds(router, Volume(rows=4, sequences=1)) == 3.0
    assert replace(device, decode_launch=0.5).seconds(router, Volume(rows=4, sequences=4)) == 1.5
