"""A Llama in GGUF, rewritten as a Hugging Face folder: config, tokenizer and bfloat16 weights.

Quantised weights are dequantised and rounded to bfloat16, the format that such models are published in: its rounding
(one part in 512) is far below that of four or eight bits, for half the disk of float32.
File format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_CONTROL_TOKEN = 3  # GGUF's token type for tokens such as <|im_end|>


def convert(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors.

    `folder` exists. ValueError names what is not a plain Llama with a byte-level BPE of the "smollm" kind.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{source.name}: architecture {fields['general.architecture']!r}; only 'llama' is converted")
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    generation_config = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", generation_config)
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(fields))

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name, kind = _weight_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type)  # float32, in row-major order, as in PyTorch
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        weights[name] = torch.tensor(weight).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, [heads * head_dim, hidden], back into the order of Hugging Face's RoPE.

    GGUF holds the two rows that RoPE turns together side by side (0, 1), (2, 3), ...; Hugging Face holds them half a
    head apart: (0, d/2), (1, d/2 + 1), ...
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _weight_name(name: str) -> tuple[str, str]:
    """The checkpoint name of a GGUF tensor, and which weight of a layer it is."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight", match[2]
    kind = name.removesuffix(".weight")
    if kind not in _TOP:
        raise ValueError(f"GGUF tensor {name!r} belongs to no plain Llama")
    return f"{_TOP[kind]}.weight", kind


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise ValueError("GGUF: llama.rope.scaling is not converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": fields["llama.vocab_size"],
        "rms_norm_eps": _float32(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _float32(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _float32(value: float) -> float:
    """The short decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE. The "smollm" kind splits every digit off before the words are looked for."""
    model, kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if (model, kind) != ("gpt2", "smollm"):
        raise ValueError(f"GGUF tokenizer {model!r} of kind {kind!r}; only 'gpt2' of kind 'smollm' is converted")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        # The class of transformers that takes tokenizer.json as it is; a model's own class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
