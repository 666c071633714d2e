"""Loading: every parameter in its place or an error that names it, whatever the folder holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import shard, toy_hf_config, write_model
from safetensors.torch import load_file, save_file

from engine.gate import Gate
from examples.load_memory import measure
from kv.cache import KVCache
from models.batch import Batch
from models.checkpoint import INDEX, Checkpoint, CheckpointError
from models.config import ModelConfig
from models.decoder import Model
from models.load import choose_dtype, fill, load_config, load_model
from models.tokenizer import load_tokenizer
from models.toy import EOS_ID, toy_weights


def logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """float32 [vocab] behind the last of `tokens`."""
    config = model.config
    cache = KVCache(config.num_layers, 4, 16, config.num_kv_heads, config.head_dim, model.cache_dtype)
    batch = Batch.build(cache, [(tokens, 0, range(4))])
    try:
        model.run_layers(model.embed(batch.tokens), 0, config.num_layers, batch, Gate()).send(None)
    except StopIteration as done:
        return model.head(done.value[batch.last_rows])[0]
    raise AssertionError("parked, although nobody asked")


def assert_holds(model: Model, weights: dict[str, torch.Tensor]) -> None:
    parameters = model.parameters_wanted()
    assert parameters.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(parameters[name], weight), name


# Names and files


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path))
    assert_holds(model, toy_weights())
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert load_config(tmp_path) == model.config


def test_a_folder_by_its_path_as_text(tmp_path: Path) -> None:
    assert_holds(load_model(str(write_model(tmp_path))), toy_weights())


def test_shards(tmp_path: Path) -> None:
    shard(write_model(tmp_path), files=3)
    assert_holds(load_model(tmp_path), toy_weights())


def test_of_two_shard_sets_only_the_indexed_one_is_read(tmp_path: Path) -> None:
    """Case D6: a folder that holds both the publisher's own shards and Hugging Face's."""
    shard(write_model(tmp_path))
    other = {name: torch.full_like(weight, float("nan")) for name, weight in toy_weights().items()}
    save_file(other, tmp_path / "consolidated.00.safetensors")
    save_file(other, tmp_path / "model.safetensors")
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"not safetensors at all")
    assert_holds(load_model(tmp_path), toy_weights())


def test_a_tensor_in_two_shards_is_read_from_the_one_the_index_names(tmp_path: Path) -> None:
    file_of = shard(write_model(tmp_path))
    wrong = next(file for file in file_of.values() if file != file_of["model.norm.weight"])
    weights = load_file(tmp_path / wrong)
    save_file({**weights, "model.norm.weight": torch.zeros(64)}, tmp_path / wrong)
    assert_holds(load_model(tmp_path), toy_weights())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(write_model(tmp_path))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is missing"):
        load_model(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    file_of = shard(write_model(tmp_path))
    file = file_of["model.layers.2.mlp.up_proj.weight"]
    weights = load_file(tmp_path / file)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / file)
    with pytest.raises(CheckpointError, match=rf"{file}: .*model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(tmp_path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        load_model(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"lm_head.weight": 3}}', "{"])
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    (write_model(tmp_path) / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_model(tmp_path)


def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "other")
    folder = write_model(tmp_path / "model")
    weight_map = dict.fromkeys(toy_weights(), "../other/model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"files of this folder, got '\.\./other/model\.safetensors'"):
        load_model(folder)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing; pickled .* convert them to safetensors"):
        load_model(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(tmp_path)


# Names, shapes and types of tensors


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = toy_weights()
    del weights["model.layers.3.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match=r"no model\.layers\.3\.self_attn\.k_proj\.weight$"):
        load_model(write_model(tmp_path, weights))


def test_untied_without_a_head(tmp_path: Path) -> None:
    """Case D4."""
    weights = toy_weights()
    del weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight, and config\.json does not say tie_word_embeddings"):
        load_model(write_model(tmp_path, weights))


def test_tied_without_a_head(tmp_path: Path) -> None:
    weights = toy_weights()
    del weights["lm_head.weight"]
    model = load_model(write_model(tmp_path, weights, tie_word_embeddings=True))
    assert_holds(model, weights)
    rows = torch.randn(3, 64)
    expected = torch.nn.functional.linear(model.norm(rows), weights["model.embed_tokens.weight"])
    assert torch.equal(model.head(rows), expected)


def test_what_the_model_makes_itself_is_passed_over(tmp_path: Path) -> None:
    weights = toy_weights()
    expected = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    assert_holds(load_model(write_model(tmp_path, weights, tie_word_embeddings=True)), expected)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(64) for i in range(4)}
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.q_proj\.bias, .* and 1 more, which LlamaForCausalLM"):
        load_model(write_model(tmp_path, toy_weights() | extra))


@pytest.mark.parametrize("shape", [[64, 32], [32, 64], [128], [32 * 64]])
def test_a_wrong_shape_is_named(tmp_path: Path, shape: list[int]) -> None:
    weights = toy_weights() | {"model.layers.1.self_attn.v_proj.weight": torch.zeros(shape)}
    if shape == [32, 64]:  # the right one
        load_model(write_model(tmp_path, weights))
        return
    with pytest.raises(CheckpointError) as error:
        load_model(write_model(tmp_path, weights))
    assert str(error.value) == (
        f"model.layers.1.self_attn.v_proj.weight has shape {shape}, config.json asks for [32, 64]"
    )


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    weights = toy_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is torch\.float8_e4m3fn; float32, bfloat16 and"):
        load_model(write_model(tmp_path, weights))


def test_fill_leaves_no_parameter_out() -> None:
    """Nothing of the model's own storage is left as it was allocated."""
    weights = toy_weights()
    model = load_model("toy")
    stored = {id(tensor): tensor for tensor in tensors_of(model)}
    for tensor in stored.values():
        tensor.fill_(float("nan"))
    fill(model, weights)
    assert not any(tensor.isnan().any() for tensor in stored.values())
    assert sum(tensor.numel() for tensor in stored.values()) == sum(weight.numel() for weight in weights.values())


def tensors_of(part: object) -> list[torch.Tensor]:
    """Every weight that the parts of a model hold, but RoPE's frequencies, which are computed."""
    found: list[torch.Tensor] = []
    for name, value in vars(part).items():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += [tensor for one in value if hasattr(one, "__dict__") for tensor in tensors_of(one)]
        elif name != "rope" and type(value).__module__.startswith("models.") and hasattr(value, "__dict__"):
            found += tensors_of(value)
    return found


# Config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(write_model(tmp_path, **change))


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_config_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    (write_model(tmp_path) / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not JSON|a JSON object is needed, got a list)"):
        load_model(tmp_path)


def test_eos_ids_are_the_union_of_all_three_sources(tmp_path: Path) -> None:
    """Case C6."""
    folder = write_model(tmp_path, eos_token_id=[1, 2])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    load_tokenizer("toy").tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    assert load_model(folder).config.eos_token_ids == {1, 2, 3, EOS_ID}


# Types


def test_dtypes(tmp_path: Path) -> None:
    weights = {name: weight.bfloat16() for name, weight in toy_weights().items()}
    folder = write_model(tmp_path, weights, torch_dtype="bfloat16")
    assert_holds(load_model(folder, dtype="bfloat16"), weights)
    assert_holds(load_model(folder, dtype="float32"), {name: weight.float() for name, weight in weights.items()})


@pytest.mark.parametrize(
    ("stored", "abilities", "device", "expected"),
    [
        (torch.bfloat16, {"avx512_bf16": True}, "cpu", torch.bfloat16),
        (torch.bfloat16, {"amx_bf16": True}, "cpu", torch.bfloat16),
        (torch.bfloat16, {"avx512_bf16": False, "avx2": True}, "cpu", torch.float32),
        (torch.float16, {"avx512_bf16": True}, "cpu", torch.float32),
        (torch.float32, {"avx512_bf16": True}, "cpu", torch.float32),
        (torch.bfloat16, {}, "cuda", torch.bfloat16),
        (torch.float16, {}, "cuda", torch.float16),
    ],
)
def test_auto_dtype(
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    abilities: dict[str, bool],
    device: str,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    weights = {"model.embed_tokens.weight": torch.zeros(1, dtype=stored)}
    assert choose_dtype("auto", weights, torch.device(device)) == expected


def test_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="dtype must be auto, float32 or bfloat16, got 'int4'"):
        load_model("toy", dtype="int4")


# One process, several models


def test_two_models_share_no_state(tmp_path: Path) -> None:
    """Case D14."""
    tokens = list(b"a layby is a place to pull over")
    first = load_model("toy")
    alone = logits(first, tokens)
    other = toy_weights(seed=1)
    second = load_model(write_model(tmp_path, other, rope_theta=500.0))
    assert not torch.allclose(logits(second, tokens), alone, atol=1e-2)
    assert torch.equal(logits(first, tokens), alone)
    for view in second.parameters_wanted().values():
        view.zero_()
    assert torch.equal(logits(first, tokens), alone)
    assert_holds(first, toy_weights())
    assert_holds(load_model(tmp_path), other)  # the file was not written through its memory map


def test_the_toy_is_the_same_in_every_process() -> None:
    script = (
        "import hashlib, torch; torch.set_num_threads(1)\n"
        "from models.load import load_model\n"
        "weights = load_model('toy').parameters_wanted()\n"
        "print(hashlib.sha256(b''.join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_toy_attends_to_all_of_its_prompt() -> None:
    """Its weights are large enough that a wrong attention would be noticed."""
    model = load_model("toy")
    one, other = logits(model, list(b"x" + b"a" * 40)), logits(model, list(b"y" + b"a" * 40))
    assert (one - other).abs().max() > 1e-3


# Memory


def test_a_checkpoint_is_a_view_of_its_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_model(tmp_path))
    assert checkpoint["lm_head.weight"].data_ptr() != 0
    assert len(checkpoint) == len(list(checkpoint)) == len(toy_weights())
    with pytest.raises(KeyError):
        checkpoint["no such tensor"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is a figure of Linux")
@pytest.mark.timeout(600)
def test_anonymous_memory_of_loading() -> None:
    """A tenth more than the weights and 200 MB. LAYBY_LOAD_MEGABYTES=2000 for the full size."""
    figures = measure(int(os.environ.get("LAYBY_LOAD_MEGABYTES", "600")))
    assert figures["anonymous_bytes"] <= figures["bound_bytes"]
    assert figures["anonymous_bytes"] > figures["checkpoint_bytes"]  # else nothing was measured


def test_the_helpers_config_is_the_toys() -> None:
    assert ModelConfig.from_hf(toy_hf_config()) == load_config("toy")
