"""The cost model: the operators are the model's own, the sums are right, and the A800 is what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.calibration import FITTED, LLAMA3_8B_ON_A800, fit_prefill, prefill_seconds
from engine.hardware import DEVICES, device
from models.architectures import ARCHITECTURES
from models.config import ModelConfig
from models.costs import Volume, model_costs
from models.decoder import Model
from models.toy import toy_config

LLAMA = ARCHITECTURES["llama3-8b"]
DENSE = [name for name, config in ARCHITECTURES.items() if name != "qwen3-30b-a3b"]


@pytest.mark.parametrize("config", [toy_config(), *(ARCHITECTURES[name] for name in DENSE)], ids=["toy", *DENSE])
def test_the_operators_are_those_that_the_models_gates_report(config: ModelConfig) -> None:
    model, costs = Model(config, torch.bfloat16, "meta"), model_costs(config)
    assert costs.num_layers == config.num_layers
    for index, layer in enumerate(costs.layers):
        assert tuple(operator.name for operator in layer) == model.layer_operators(index)


@pytest.mark.parametrize("config", [toy_config(), *(ARCHITECTURES[name] for name in DENSE)], ids=["toy", *DENSE])
def test_the_weights_are_all_the_bytes_of_the_model_but_norms_and_biases(config: ModelConfig) -> None:
    matrices = [t for t in Model(config, torch.bfloat16, "meta").parameters_wanted().values() if t.dim() == 2]
    assert model_costs(config).weight_bytes == sum(t.numel() * t.element_size() for t in matrices)


def test_the_published_sizes() -> None:
    billions = {name: model_costs(ARCHITECTURES[name]).weight_bytes / 2e9 for name in DENSE}
    published = {"llama3-8b": 8.03, "llama3-70b": 70.6, "qwen2.5-14b": 14.8, "qwen3-8b": 8.2}
    assert billions == pytest.approx(published, rel=0.01)
    assert model_costs(LLAMA).kv_bytes_per_token == 128 * 1024  # 32 layers, 8 heads of 128, K and V, 2 bytes


def test_a_prefill_takes_two_flops_for_each_weight_and_row_and_four_for_each_pair_and_channel() -> None:
    costs = model_costs(LLAMA)
    rows = 1000
    volume = Volume(rows, pairs := rows * (rows + 1) / 2, rows)
    flops = sum(operator.flops(volume) for layer in costs.layers for operator in layer)
    weights = sum(operator.weight_bytes for layer in costs.layers for operator in layer) / 2
    assert flops == 2 * weights * rows + 4 * pairs * 4096 * 32


def test_attention_reads_every_key_and_value_once_and_projections_read_all_weights_for_a_single_row() -> None:
    costs = model_costs(LLAMA)
    nothing_but_keys = sum(op.bytes_per_key for layer in costs.layers for op in layer)
    assert nothing_but_keys == costs.kv_bytes_per_token
    qkv = costs.layers[0][0]
    assert qkv.weights_read(Volume(rows=1)) == qkv.weight_bytes == 2 * 4096 * (4096 + 2 * 1024)


def test_tensor_parallel_ranks_share_the_work_and_sum_the_hidden_state_twice_a_layer() -> None:
    alone, ranks = model_costs(ARCHITECTURES["llama3-70b"]), model_costs(ARCHITECTURES["llama3-70b"], tp=4)
    volume = Volume(rows=512, pairs=512 * 513 / 2, keys=512)
    for one, shared in zip(alone.layers[0], ranks.layers[0], strict=True):
        assert shared.flops(volume) == one.flops(volume) / 4
        assert shared.weight_bytes == one.weight_bytes / 4
    assert ranks.kv_bytes_per_token == alone.kv_bytes_per_token / 4
    reduced = [operator.reduced_bytes_per_row for operator in ranks.layers[0]]
    assert reduced == [0, 0, 8192 * 2, 0, 8192 * 2]
    assert not any(operator.reduced_bytes_per_row for operator in alone.layers[0])


def test_few_kv_heads_are_replicated_and_a_degree_that_does_not_divide_is_refused() -> None:
    assert model_costs(LLAMA, tp=16).kv_bytes_per_token == model_costs(LLAMA, tp=8).kv_bytes_per_token
    with pytest.raises(ValueError, match="tp 3 does not divide 32 heads"):
        model_costs(LLAMA, tp=3)
    with pytest.raises(ValueError, match="tp 0"):
        model_costs(LLAMA, tp=0)


def test_a_ring_all_reduce_sends_almost_twice_the_bytes() -> None:
    a100 = DEVICES["a100-80g"]
    size = 1e9
    assert a100.all_reduce(size, 4) == pytest.approx(20e-6 + 1.5e9 / (300e9 * 0.8))
    assert a100.all_reduce(0, 4) == 0


def test_an_operator_takes_as_long_as_its_scarcest_resource() -> None:
    a100, down = DEVICES["a100-80g"], model_costs(LLAMA).layers[0][4]
    weights, peak = 4096 * 14336, 312e12 * a100.matmul_efficiency
    assert a100.seconds(down, Volume(rows=16384)) == pytest.approx(2 * weights * 16384 / peak)
    one_row = 2 * weights + 2 * (4096 + 14336 + 2 * 4096)
    assert a100.seconds(down, Volume(rows=1)) == pytest.approx(one_row / (2.039e12 * 0.8))
    assert replace(a100, launch=1.0).seconds(down, Volume(rows=1)) == 1.0


def test_the_a800_is_fitted_to_three_prefill_times_and_right_to_10_percent_on_the_others() -> None:
    costs, kept = model_costs(LLAMA), DEVICES["a800-80g"]
    held_out = set(LLAMA3_8B_ON_A800) - set(FITTED)
    assert len(held_out) == 3
    for tokens, measured in LLAMA3_8B_ON_A800.items():
        assert prefill_seconds(costs, kept, tokens) == pytest.approx(measured, rel=0.1 if tokens in held_out else 0.01)
    fitted = fit_prefill(costs, kept, {tokens: LLAMA3_8B_ON_A800[tokens] for tokens in FITTED})
    for name in ("launch", "step", "matmul_efficiency"):
        assert getattr(kept, name) == pytest.approx(getattr(fitted, name), rel=0.01)


def test_the_fit_recovers_the_figures_that_made_the_times() -> None:
    costs = model_costs(LLAMA)
    truth = replace(DEVICES["a100-80g"], launch=40e-6, step=0.005, matmul_efficiency=0.5)
    times = {tokens: prefill_seconds(costs, truth, tokens) for tokens in (32, 1024, 8192)}
    found = fit_prefill(costs, DEVICES["a100-80g"], times)
    assert (found.launch, found.step, found.matmul_efficiency) == pytest.approx((40e-6, 0.005, 0.5), rel=1e-6)
    with pytest.raises(ValueError, match="got 2"):
        fit_prefill(costs, truth, {32: 0.1, 64: 0.2})


def test_devices_are_known_by_name_and_impossible_ones_are_refused() -> None:
    assert device("h200").memory_bytes == 141e9
    with pytest.raises(ValueError, match="no device called 'h300'; there are: a100-80g, a800-80g, h100-80g, "):
        device("h300")
    with pytest.raises(ValueError, match=r"matmul_efficiency must be above 0 and at most 1, got 1\.5"):
        replace(device("h200"), matmul_efficiency=1.5)
    assert all(each.source for each in DEVICES.values())
