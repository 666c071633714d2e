"""Every family computes what transformers computes, however its rows are batched, chunked and laid out."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from model_helpers import BLOCK, Sequences, drive, logits, pair, poisoned_cache, prompt, reference
from transformers import PreTrainedModel

from engine.gate import Gate
from models.batch import Batch
from models.decoder import Model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 6}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied, yarn": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN}),
}
MOE = {"head_dim": 16, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FAMILIES |= {
    "qwen3_moe": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "qwen3_moe, weights not normalised": ("qwen3_moe", MOE | {"norm_topk_prob": False}),
    "qwen3_moe, every second layer dense": ("qwen3_moe", MOE | {"decoder_sparse_step": 2}),
    "qwen3_moe, one layer dense": ("qwen3_moe", MOE | {"mlp_only_layers": [1], "norm_topk_prob": True}),
}
LENGTHS = (131, 1, 40, BLOCK)  # beyond four times the original length of the scaled ones; one token; whole blocks


@cache
def family(name: str) -> tuple[PreTrainedModel, Model]:
    kind, changes = FAMILIES[name]
    return pair(kind, **changes)


@pytest.fixture(params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Model]:
    return family(request.param)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_cohort_of_whole_prompts(models: tuple[PreTrainedModel, Model]) -> None:
    theirs, ours = models
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    batch = Sequences(ours, prompts).batch([(one, 0, len(tokens)) for one, tokens in enumerate(prompts)])
    rows = logits(ours, batch)
    assert rows.dtype == torch.float32
    for span, tokens in zip(batch.spans, prompts, strict=True):
        close(rows[span.start : span.stop], reference(theirs, tokens))


@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1, 64])
def test_chunks_of_any_size_beside_decodes(models: tuple[PreTrainedModel, Model], chunk: int) -> None:
    """Case A19. One prompt advances chunk by chunk; in the same batches, another sequence decodes token by token."""
    theirs, ours = models
    chunked, decoding = prompt(70, 1), prompt(90, 2)
    sequences = Sequences(ours, [chunked, decoding])
    expected = reference(theirs, chunked), reference(theirs, decoding)
    position = 20
    close(logits(ours, sequences.batch([(1, 0, position)])), expected[1][:position])
    for start in range(0, len(chunked), chunk):
        stop = min(start + chunk, len(chunked))
        rows = logits(ours, sequences.batch([(0, start, stop), (1, position, position + 1)]))
        close(rows[:-1], expected[0][start:stop])
        close(rows[-1], expected[1][position])
        position += 1


@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_names_and_places_are_complete(name: str) -> None:
    """Every tensor of transformers' model has its place in ours, and each place is a different piece of memory."""
    theirs, ours = family(name)
    wanted = ours.parameters_wanted(fused_experts=True)
    assert {name for name in theirs.state_dict() if not ours.may_skip(name)} == set(wanted)
    spans = sorted((view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()) for view in wanted.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_only_what_is_computed_anyway_may_be_skipped() -> None:
    tied, untied = family("llama tied")[1], family("llama")[1]
    assert tied.may_skip("lm_head.weight")
    assert not untied.may_skip("lm_head.weight")
    assert untied.may_skip("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not untied.may_skip("model.layers.0.self_attn.q_proj.bias")


def test_layers_in_groups_equal_layers_at_once() -> None:
    """What a layered plan does: x between the groups is the whole state, and a group leaves its input alone."""
    _, ours = family("qwen2")
    sequences = Sequences(ours, [prompt(30, 3)])
    batch = sequences.batch([(0, 0, 30)])
    expected = logits(ours, batch)
    with torch.inference_mode():
        x = ours.embed(batch.tokens)
        for layer in range(len(ours.layers)):
            before = x.clone()
            after = drive(ours.run_layers(x, layer, layer + 1, batch, Gate()))
            assert torch.equal(x, before)
            x = after
        assert torch.equal(ours.head(x), expected)


def test_the_gates_report_the_operators_of_every_layer_in_order() -> None:
    class Listening(Gate):
        def operator(self, name: str) -> Gate:
            heard.append(name)
            return super().operator(name)

    heard: list[str] = []
    _, ours = family("llama")
    batch = Sequences(ours, [prompt(9)]).batch([(0, 0, 9)])
    with torch.inference_mode():
        drive(ours.run_layers(ours.embed(batch.tokens), 1, 3, batch, Listening()))
    assert heard == [*ours.layer_operators(1), *ours.layer_operators(2)]
    assert ours.layer_operators(1) == ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")


def test_scattered_blocks_equal_consecutive_ones() -> None:
    _, ours = family("llama")
    tokens = prompt(50, 4)
    scattered = Sequences(ours, [tokens])
    assert scattered.tables[0] != sorted(scattered.tables[0])
    in_order = Batch.build(poisoned_cache(ours), [(tokens, 0, range(13))])
    assert torch.equal(logits(ours, scattered.batch([(0, 0, 50)])), logits(ours, in_order))


def test_two_passes_are_bitwise_equal() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, ours = pair("llama", dtype)
        first, second = (logits(ours, Sequences(ours, [prompt(77)]).batch([(0, 0, 77)])) for _ in range(2))
        assert torch.equal(first, second)


def test_two_models_share_nothing() -> None:
    """Case D14."""
    (_, one), (_, other) = pair("llama"), pair("llama")
    sequences = Sequences(one, [prompt(12)])
    before = logits(one, sequences.batch([(0, 0, 12)]))
    for view in other.parameters_wanted().values():
        view.zero_()
    assert torch.equal(logits(one, sequences.batch([(0, 0, 12)])), before)


@pytest.mark.parametrize("backend", ["sdpa", "matmul"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(backend: str) -> None:
    """Over a prefill in two chunks, ours may err at most 1.3 times as much as transformers in bfloat16."""
    theirs, ours = pair("llama", torch.bfloat16)
    ours.attention = backend
    tokens = prompt(150, 5)
    exact = reference(theirs, tokens)
    error = (reference(theirs.to(torch.bfloat16), tokens).float() - exact).square().mean().sqrt()
    sequences = Sequences(ours, [tokens])
    rows = [logits(ours, sequences.batch([(0, start, stop)])) for start, stop in ((0, 100), (100, 150))]
    assert (torch.cat(rows) - exact).square().mean().sqrt() < 1.3 * error
    assert ours.cache_dtype == torch.bfloat16
