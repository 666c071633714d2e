"""The mixture of experts: what it computes, that it never waits for the device, how it is loaded, where it parks.

Whole models are held against transformers in test_models.py, parks in test_park.py; here is what is special to experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_helpers import Sequences, drive, hf_json, logits, pair, prompt, reference
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import PreTrainedModel

from engine.executor import Finished, Forwards, drive_on
from engine.gate import Gate
from engine.lab import Lab
from engine.sampling import Draw
from engine.virtual import VirtualLoop
from engine.work import Part, Work
from kv.cache import KVCache
from models import moe
from models.checkpoint import CheckpointError
from models.config import ModelConfig, MoEConfig
from models.decoder import Model
from models.load import fill, load_config, load_model
from models.moe import MoE, grouped, looped
from models.tokenizer import load_tokenizer
from models.toy import random_weights, toy_config, toy_moe_config
from scheduling.batch import FillBudget, FillChunks
from scheduling.layered import Layered
from scheduling.order import FCFS
from scheduling.placement import Piggyback
from scheduling.plan import Chunked, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.request import Sampling

DENSE = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
SPARSE = ("qkv_proj", "attention", "o_proj", "router", "dispatch", "experts", "combine")
SHAPE: dict[str, Any] = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}


def tiny(seed: int = 0, **changes: Any) -> Model:
    config = ModelConfig.from_hf(hf_json("qwen3_moe", **(SHAPE | changes)))
    model = Model(config, torch.float32)
    fill(model, random_weights(config, seed))
    return model


def block(model: Model, layer: int = 0) -> MoE:
    found = model.layers[layer].mlp
    assert isinstance(found, MoE)
    return found


# What it computes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 1, 4), (0, 8, 0), (5, 0, 0), (0, 0, 3), (0, 0, 0)], ids=str)
def test_grouped_products_equal_the_loop(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(sizes), 16, generator=generator).to(dtype)
    weight = torch.randn(len(sizes), 24, 16, generator=generator).to(dtype)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    torch.testing.assert_close(grouped(rows, weight, ends), looped(rows, weight, ends))


def test_the_whole_model_with_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    batch = Sequences(model, [prompt(40), prompt(7, 1)]).batch([(0, 0, 40), (1, 0, 7)])
    expected = logits(model, batch)
    monkeypatch.setattr(moe, "grouped", looped)
    torch.testing.assert_close(logits(model, batch), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_block_token_by_token(norm_topk_prob: bool) -> None:
    """Case D9: softmax over all experts, then the best k, then (or not) made to sum to one."""
    model = tiny(norm_topk_prob=norm_topk_prob)
    layer = block(model)
    weights = random_weights(model.config, 0)
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(3))
    expected = []
    for row in x:
        normed = F.rms_norm(row, (48,), weights["model.layers.0.post_attention_layernorm.weight"], 1e-5)
        shares = torch.softmax(weights["model.layers.0.mlp.gate.weight"] @ normed, dim=0)
        best = shares.argsort(descending=True)[:3]
        total = shares[best].sum() if norm_topk_prob else 1.0
        for expert in best.tolist():
            name = f"model.layers.0.mlp.experts.{expert}."
            gate, up, down = (weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
            row = row + shares[expert] / total * (down @ (F.silu(gate @ normed) * (up @ normed)))
        expected.append(row)
    torch.testing.assert_close(drive(layer(x, Gate())), torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_experts_are_chosen_in_float32(norm_topk_prob: bool) -> None:
    """Case D9. In bfloat16, probabilities of 64 experts would be equal by rounding, and their order chance."""
    config = ModelConfig.from_hf(hf_json("qwen3_moe", **(SHAPE | {"num_experts": 64}), norm_topk_prob=norm_topk_prob))
    model = Model(config, torch.bfloat16)
    fill(model, random_weights(config, 0))
    layer = block(model)
    x = 0.3 * torch.randn(200, 48, generator=torch.Generator().manual_seed(5)).bfloat16()
    weights, chosen = layer.route(x)
    shares = torch.softmax(layer.router(x).float(), dim=-1)
    best = shares.gather(1, chosen)
    assert torch.equal(best, shares.topk(3, dim=-1).values)
    assert torch.equal(weights, (best / best.sum(1, keepdim=True) if norm_topk_prob else best).bfloat16())


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    layer = block(tiny())
    x = torch.randn(30, 48, generator=torch.Generator().manual_seed(4))
    alone = torch.cat([drive(layer(row[None], Gate())) for row in x])
    torch.testing.assert_close(drive(layer(x, Gate())), alone, atol=1e-5, rtol=0)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: asking for one, or for a shape that depends on one, raises."""
    with FakeTensorMode():
        layer = block(Model(toy_moe_config(), torch.bfloat16))
        gate = Gate()
        gate.routed = []
        out = drive(layer(torch.empty(10, 128, dtype=torch.bfloat16), gate))
        assert out.shape == (10, 128) and [ends.shape for ends in gate.routed] == [(32,)]
        monkeypatch.setattr(moe, "grouped", looped)  # which does ask
        with pytest.raises(DataDependentOutputException):
            drive(layer(torch.empty(10, 128, dtype=torch.bfloat16), Gate()))


# Layers, operators, gates


def mixed() -> Model:
    """Layers 0 and 2 dense, 1 and 3 sparse."""
    return tiny(num_hidden_layers=4, decoder_sparse_step=2)


def test_dense_and_sparse_layers_name_their_operators() -> None:
    model = mixed()
    assert [model.layer_operators(layer) for layer in range(4)] == [DENSE, SPARSE, DENSE, SPARSE]


def test_the_gates_report_the_operators_that_the_layers_name() -> None:
    """In order, one layer after the other: the cost model, traces and plots go by these names."""

    class Listening(Gate):
        def operator(self, name: str) -> Gate:
            heard.append(name)
            return super().operator(name)

    heard: list[str] = []
    model = mixed()
    batch = Sequences(model, [prompt(9)]).batch([(0, 0, 9)])
    with torch.inference_mode():
        drive(model.run_layers(model.embed(batch.tokens), 0, 4, batch, Listening()))
    assert heard == [*DENSE, *SPARSE, *DENSE, *SPARSE]


@pytest.mark.parametrize(
    ("first", "last", "decodes"), [(0, 4, 0), (0, 1, 0), (1, 2, 0), (1, 3, 0), (0, 0, 2), (1, 2, 2), (2, 4, 1)]
)
def test_boundaries_are_counted_exactly(first: int, last: int, decodes: int) -> None:
    model = mixed()
    shape = model.config
    cache = KVCache(4, 16, 4, shape.num_kv_heads, shape.head_dim, torch.float32)
    parts = [Part(prompt(9), 0, tuple(range(3)))] if last else []
    decoding = [Part(prompt(1), 0, (8 + i,), (Draw(Sampling(), 0, 0, 0),)) for i in range(decodes)]
    work = Work(4, tuple(parts), tuple(decoding), first=first, last=last)
    work.carried.hidden = torch.zeros(9, shape.hidden_size)
    one = Forwards(model, cache).drive(0, work, Gate())
    with torch.inference_mode():
        assert isinstance(drive_on(one, VirtualLoop()), Finished)
    assert one.gate.passed == one.boundaries > 0


@pytest.mark.parametrize(("level", "stops"), [(Preempt.LAYER, "combine"), (Preempt.HALF_LAYER, "o_proj combine")])
def test_coarser_levels_stop_at_the_ends_of_sparse_layers(level: Preempt, stops: str) -> None:
    assert [name for name in SPARSE if level.stops_at(name)] == stops.split()


def test_layers_in_groups_equal_layers_at_once() -> None:
    model = mixed()
    batch = Sequences(model, [prompt(30, 3), prompt(5, 4)]).batch([(0, 0, 30), (1, 0, 5)])
    expected = logits(model, batch)
    with torch.inference_mode():
        x = model.embed(batch.tokens)
        for first, last in ((0, 1), (1, 3), (3, 4)):
            x = drive(model.run_layers(x, first, last, batch, Gate()))
        assert torch.equal(model.head(x), expected)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_chunks_across_layer_groups_equal_transformers(norm_topk_prob: bool) -> None:
    """Chunks of a prompt, each of which crosses the layers in groups, and then a decode step."""
    theirs, ours = pair("qwen3_moe", **SHAPE, mlp_only_layers=[1], norm_topk_prob=norm_topk_prob)
    tokens = prompt(50, 8)
    expected = reference(theirs, tokens)
    sequences = Sequences(ours, [tokens])
    with torch.inference_mode():
        for start, stop in ((0, 17), (17, 49), (49, 50)):
            batch = sequences.batch([(0, start, stop)])
            x = ours.embed(batch.tokens)
            for first, last in ((0, 2), (2, 3)):
                x = drive(ours.run_layers(x, first, last, batch, Gate()))
            torch.testing.assert_close(ours.head(x), expected[start:stop], atol=1e-4, rtol=0)


# Loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, Path]:
    """transformers' model, saved as published ones are, and as transformers 5 has it in memory."""
    theirs, _ = pair("qwen3_moe", **SHAPE, mlp_only_layers=[1], norm_topk_prob=True)
    numbered, fused = tmp_path_factory.mktemp("numbered"), tmp_path_factory.mktemp("fused")
    theirs.save_pretrained(numbered)
    theirs.save_pretrained(fused, save_original_format=False)
    return theirs, numbered, fused


def test_both_namings_of_experts(saved: tuple[PreTrainedModel, Path, Path]) -> None:
    theirs, numbered, fused = saved
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in load_file(numbered / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(fused / "model.safetensors")
    tokens = prompt(30)
    for folder in (numbered, fused):
        model = load_model(folder, dtype="float32")
        rows = logits(model, Sequences(model, [tokens]).batch([(0, 0, 30)]))
        torch.testing.assert_close(rows, reference(theirs, tokens), atol=1e-4, rtol=0)


def copy(folder: Path, to: Path, config: dict[str, Any], *without: str) -> Path:
    """A saved model with another config, or without some tensors."""
    (to / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if name not in without}, to / "model.safetensors")
    return to


@pytest.mark.parametrize("said", [4, 16])
@pytest.mark.parametrize("naming", [1, 2], ids=["numbered", "fused"])
def test_another_count_of_experts_than_the_config_says_is_refused(
    saved: tuple[PreTrainedModel, Path, Path], tmp_path: Path, naming: int, said: int
) -> None:
    folder = saved[naming]
    assert isinstance(folder, Path)
    with pytest.raises(CheckpointError, match=f"the weights have 8 experts in layer 0, config.json says {said}"):
        load_model(copy(folder, tmp_path, {"num_local_experts": said}))


def test_a_missing_matrix_of_one_expert_is_named(saved: tuple[PreTrainedModel, Path, Path], tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    with pytest.raises(CheckpointError, match=f"the weights have no {name}"):
        load_model(copy(saved[1], tmp_path, {}, name))


def test_experts_in_a_layer_that_should_be_dense_are_refused(
    saved: tuple[PreTrainedModel, Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"the weights have no model\.layers\.0\.mlp\.gate_proj\.weight"):
        load_model(copy(saved[1], tmp_path, {"mlp_only_layers": [0, 1]}))


def test_widths_that_grouped_products_cannot_take_are_refused() -> None:
    for changes, name in (({"moe_intermediate_size": 6}, "moe_intermediate_size 6"), ({"hidden_size": 42}, "hidden")):
        config = ModelConfig.from_hf(hf_json("qwen3_moe", **(SHAPE | changes)))
        with pytest.raises(ValueError, match=f"{name}.* in torch.float32: .* multiple of 16 bytes.* multiple of 4"):
            Model(config, torch.float32)


# The config


def test_what_the_config_says_of_experts() -> None:
    config = ModelConfig.from_hf(hf_json("qwen3_moe", **SHAPE, norm_topk_prob=True))
    assert config.moe == MoEConfig(8, 3, 32, norm_topk_prob=True, layers=(0, 1, 2))
    assert config.head_dim == 16 and config.family.qk_norm
    assert ModelConfig.from_hf(hf_json("qwen3")).moe is None


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [(1, [], (0, 1, 2, 3, 4)), (2, [], (1, 3)), (2, [3], (1,)), (1, [0, 4], (1, 2, 3)), (6, None, ())],
)
def test_which_layers_are_sparse(step: int, dense: list[int] | None, sparse: tuple[int, ...]) -> None:
    config = hf_json("qwen3_moe", **SHAPE) | {"num_hidden_layers": 5}
    read = ModelConfig.from_hf(config | {"decoder_sparse_step": step, "mlp_only_layers": dense})
    assert read.moe is not None and read.moe.layers == sparse
    assert [read.is_sparse(layer) for layer in range(5)] == [layer in sparse for layer in range(5)]


def test_published_and_transformers_5_configs_name_the_experts_differently() -> None:
    written = hf_json("qwen3_moe", **SHAPE)
    assert "num_local_experts" in written and "num_experts" not in written
    published = {key: value for key, value in written.items() if key != "num_local_experts"} | {"num_experts": 8}
    assert ModelConfig.from_hf(published) == ModelConfig.from_hf(written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"num_experts": 0}, "num_experts must be a positive whole number, got 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be a positive whole number, got -1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number, got 0"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers must list layers below 3, got \[3\]"),
        ({"mlp_only_layers": 2}, "mlp_only_layers must list layers below 3, got 2"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window attention is not supported"),
    ],
)
def test_bad_configs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf_json("qwen3_moe", **SHAPE) | changes)


# The toy


def test_the_toy_has_experts_in_every_layer_and_speaks_bytes() -> None:
    config = load_config("toy-moe")
    assert config.moe is not None and config.moe.layers == tuple(range(config.num_layers))
    assert config.vocab_size == toy_config().vocab_size
    assert load_tokenizer("toy-moe").tokenizer.encode("layby").ids == list(b"layby")


def test_the_toys_routing_is_uneven() -> None:
    """Sixteen tokens of different sequences meet fewer experts than even routing would let them."""
    model = load_model("toy-moe")
    prompts = [[byte] for byte in range(0, 256, 16)]
    batch = Sequences(model, prompts).batch([(i, 0, 1) for i in range(16)])
    gate = Gate()
    gate.routed = []
    with torch.inference_mode():
        drive(model.run_layers(model.embed(batch.tokens), 0, 6, batch, gate))
    sizes = torch.stack(gate.routed).diff(dim=1, prepend=torch.zeros(6, 1, dtype=torch.int32))
    assert sizes.sum() == 6 * 16 * 4
    met = (sizes > 0).float().mean().item()
    assert 0.4 < met < 0.8 < 1 - (1 - 4 / 32) ** 16


@pytest.mark.parametrize(
    "system",
    [
        System(FCFS(), FillBudget(512), Whole(), Preempt.NEVER),
        System(FCFS(), FillChunks(64), Chunked(64), Preempt.SLICE, Piggyback()),
        System(FCFS(), FillBudget(512), Layered(64), Preempt.SLICE, Piggyback()),
        System(FCFS(), FillBudget(512), Layered(50, chunk=100), Preempt.SLICE, Piggyback()),
    ],
    ids=["whole", "chunked", "layered", "layered-chunked"],
)
def test_every_way_of_cutting_gives_the_tokens_of_one_plain_forward(system: System) -> None:
    model = load_model("toy-moe")
    prompts = [prompt(300, 1), prompt(90, 2)]
    expected = []
    for tokens in prompts:
        tokens = list(tokens)
        for _ in range(4):
            batch = Sequences(model, [tokens], KVCache(6, 256, 4, 2, 32, torch.float32)).batch([(0, 0, len(tokens))])
            tokens.append(int(logits(model, batch)[-1].argmax()))
        expected.append(tokens[-4:])
    with Lab(system, model=model) as lab:
        requests = [lab.submit(one, sampling=Sampling(max_tokens=4, ignore_eos=True)) for one in prompts]
        lab.run()
        assert [lab.outputs(request) for request in requests] == expected
        lab.check()


def test_two_sparse_models_share_nothing() -> None:
    """Case D14."""
    one, other = tiny(), tiny()
    batch = Sequences(one, [prompt(12)]).batch([(0, 0, 12)])
    before = logits(one, batch)
    for view in other.parameters_wanted().values():
        view.zero_()
    assert torch.equal(logits(one, batch), before)
