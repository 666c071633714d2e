"""Small model folders on disk for the tests of loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.checkpoint import INDEX
from models.toy import EOS_ID, toy_config, toy_weights


def toy_hf_config(**changes: Any) -> dict[str, Any]:
    """The toy model's config.json; a change to None takes the key away."""
    config = toy_config()
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    } | changes
    return {key: value for key, value in values.items() if value is not None}


def write_model(folder: Path, weights: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """The toy model as a folder with one weight file, with other `weights` or `config` values where given."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(toy_hf_config(**config)))
    save_file(toy_weights() if weights is None else weights, folder / "model.safetensors")
    return folder


def shard(folder: Path, files: int = 2, pattern: str = "model-{}.safetensors") -> dict[str, str]:
    """Replace a folder's one weight file by several and an index. Returns the index: tensor name -> file."""
    weights = toy_weights()
    file_of = {name: pattern.format(i % files) for i, name in enumerate(weights)}
    for file in set(file_of.values()):
        save_file({name: weights[name] for name in weights if file_of[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    return file_of
