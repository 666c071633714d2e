"""Converting a GGUF to a Hugging Face folder, on a tiny one written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, pre_tokenizers

from models.gguf import convert, unpermute
from models.load import load_model
from models.rope import Rope, RopeConfig, rotate

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What writing a GGUF does to q and k: the two rows of a RoPE pair, half a head apart, come to lie side by side."""
    first, second = np.split(weight.reshape(heads, -1, HIDDEN), 2, axis=1)
    return np.stack((first, second), axis=2).reshape(weight.shape)


def tokens() -> list[str]:
    """Three special tokens, the 256 bytes in the spelling of byte-level BPE, and one merged token."""
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "12"]


def write_gguf(path: Path, *, head: bool = False, extra: str = "", **changes: Any) -> dict[str, np.ndarray]:
    """A random Llama, q and k in GGUF's order, `changes` made to its metadata. Returns checkpoint name -> float32."""
    meta = {"architecture": "llama", "pre": "smollm", "rope_scaling": None} | changes
    writer = GGUFWriter(path, meta["architecture"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens()))
    if meta["rope_scaling"]:
        writer.add_string("llama.rope.scaling.type", meta["rope_scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(meta["pre"])
    writer.add_token_list(tokens())
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens()) - 3))
    writer.add_token_merges(["Ġ t", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")

    rng = np.random.default_rng(0)
    expected: dict[str, np.ndarray] = {}

    def add(gguf_name: str, name: str, *shape: int, heads: int = 0) -> None:
        """As Q8_0, which has its own rounding: what is expected is what the file says, not what went in."""
        weight = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(gguf_name, weight)
            expected[name] = weight
            return
        packed = quantize(weight, GGMLQuantizationType.Q8_0)
        expected[name] = dequantize(packed, GGMLQuantizationType.Q8_0)
        if heads:
            packed = quantize(interleave(weight, heads), GGMLQuantizationType.Q8_0)
        writer.add_tensor(gguf_name, packed, raw_dtype=GGMLQuantizationType.Q8_0)

    width, kv_width = HIDDEN, HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", "model.embed_tokens.weight", len(tokens()), HIDDEN)
    for i in range(LAYERS):
        blk, layer = f"blk.{i}.", f"model.layers.{i}."
        add(blk + "attn_norm.weight", layer + "input_layernorm.weight", HIDDEN)
        add(blk + "attn_q.weight", layer + "self_attn.q_proj.weight", width, HIDDEN, heads=HEADS)
        add(blk + "attn_k.weight", layer + "self_attn.k_proj.weight", kv_width, HIDDEN, heads=KV_HEADS)
        add(blk + "attn_v.weight", layer + "self_attn.v_proj.weight", kv_width, HIDDEN)
        add(blk + "attn_output.weight", layer + "self_attn.o_proj.weight", HIDDEN, width)
        add(blk + "ffn_norm.weight", layer + "post_attention_layernorm.weight", HIDDEN)
        add(blk + "ffn_gate.weight", layer + "mlp.gate_proj.weight", INNER, HIDDEN)
        add(blk + "ffn_up.weight", layer + "mlp.up_proj.weight", INNER, HIDDEN)
        add(blk + "ffn_down.weight", layer + "mlp.down_proj.weight", HIDDEN, INNER)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    if head:
        add("output.weight", "lm_head.weight", len(tokens()), HIDDEN)
    if extra:
        add(extra, extra, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("head", [False, True])
def test_every_tensor_arrives_under_its_name_and_in_its_order(tmp_path: Path, head: bool) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", head=head)
    convert(tmp_path / "tiny.gguf", tmp_path)
    model = load_model(tmp_path, dtype="bfloat16")
    parameters = model.parameters_wanted()
    assert parameters.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(parameters[name], torch.from_numpy(weight).bfloat16()), name
    assert model.config.tie_word_embeddings is not head
    assert model.config.rms_norm_eps == 1e-5  # and not float32's 9.999999747378752e-06
    assert model.config.rope.theta == 50_000.0
    assert model.config.eos_token_ids == {2}


def test_unpermuted_rows_turn_as_gguf_means_them() -> None:
    """GGUF turns neighbours (2i, 2i + 1) by one angle; RoPE here turns (i, i + d/2). Scores q k^T must not differ."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((2 * 16, HIDDEN)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((5, HIDDEN)).astype(np.float32))
    rotation = Rope(RopeConfig(), head_dim=16).rotation(torch.arange(5))

    neighbours = (x @ torch.from_numpy(weight).T).view(5, 2, 8, 2)
    even, odd = neighbours.unbind(-1)
    cos, sin = rotation
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    halves = (x @ torch.from_numpy(unpermute(weight, heads=2)).T).view(5, 2, 16)
    ours = rotate(halves, rotation)
    scores = torch.einsum("qhd,khd->hqk", turned, turned)
    assert torch.allclose(torch.einsum("qhd,khd->hqk", ours, ours), scores, atol=1e-4)


def test_the_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a t").tokens == ["a", "Ġt"]
    assert tokenizer.encode("12").tokens == ["1", "2"]  # digits are split before the merges are looked for
    assert tokenizer.encode("<|im_start|>t<|im_end|>").tokens == ["<|im_start|>", "t", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("<|im_end|>ž\n 12").ids) == "ž\n 12"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'; only 'llama'"),
        ({"pre": "llama-bpe"}, "kind 'llama-bpe'; only 'gpt2' of kind 'smollm'"),
        ({"rope_scaling": "yarn"}, "rope.scaling is not converted"),
        ({"extra": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' belongs to no plain Llama"),
        ({"extra": "blk.0.attn_q.bias"}, "tensor 'blk.0.attn_q.bias' belongs to no plain Llama"),
    ],
)
def test_what_is_no_plain_llama_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "tiny.gguf", tmp_path)
