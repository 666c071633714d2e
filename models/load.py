"""From a name to a model with its weights in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import Checkpoint, CheckpointError, read_json
from models.config import ModelConfig
from models.decoder import Model
from models.hub import resolve
from models.tokenizer import load_tokenizer
from models.toy import TOYS, toy_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_READABLE = (torch.float32, torch.bfloat16, torch.float16)

# An expert's matrix by itself, with its number, or one tensor for all experts of a layer.
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.|gate_up_proj$)")


def load_model(name: str | Path, *, dtype: str = "auto", device: torch.device | str = "cpu") -> Model:
    """Load `toy`, `toy-moe`, `smollm2`, a folder, or `org/name` of the Hugging Face hub.

    `dtype` is float32, bfloat16 or auto. ValueError says what is wrong with the name, the config or the weights: a
    model is returned with every parameter loaded, or not at all. Each call makes a model of its own.
    """
    device = torch.device(device)
    config, weights = load_config(name), _weights(name)
    model = Model(config, choose_dtype(dtype, weights, device), device)
    fill(model, weights)
    return model


def _weights(name: str | Path) -> Mapping[str, torch.Tensor]:
    return toy_weights(str(name)) if name in TOYS else Checkpoint(resolve(name))


def load_config(name: str | Path) -> ModelConfig:
    """What `load_model(name)` would have as its `config`, without the weights."""
    if name in TOYS:
        return TOYS[str(name)]()
    folder = resolve(name)
    generation_config: dict[str, Any] = {}
    if (folder / "generation_config.json").is_file():
        generation_config = read_json(folder / "generation_config.json")
    config = ModelConfig.from_hf(read_json(folder / "config.json"), generation_config)
    if (folder / "tokenizer.json").is_file():
        # Some models name a token that ends a turn nowhere else.
        eos = load_tokenizer(folder).eos_token_id
        config = replace(config, eos_token_ids=config.eos_token_ids | ({eos} if eos is not None else set()))
    return config


def choose_dtype(wanted: str, weights: Mapping[str, torch.Tensor], device: torch.device) -> torch.dtype:
    """The type to keep the weights in: float32, bfloat16, or for auto what is fastest without losing anything.

    An accelerator takes them as they are stored. So does a CPU that multiplies bfloat16 (SmolLM2-135M on one core with
    AVX512-BF16: a prefill of 128 tokens 3.3x faster than in float32, a decode step 1.5x); any other type and any other
    CPU gets float32.
    """
    if wanted in _DTYPES:
        return _DTYPES[wanted]
    if wanted != "auto":
        raise ValueError(f"dtype must be auto, {' or '.join(_DTYPES)}, got {wanted!r}")
    embedding = weights.get("model.embed_tokens.weight")
    stored = torch.float32 if embedding is None else embedding.dtype  # `fill` will name a missing one
    if device.type != "cpu":
        return stored
    abilities = torch.cpu.get_capabilities()
    multiplies_bfloat16 = abilities.get("avx512_bf16") or abilities.get("amx_bf16")
    return stored if stored == torch.bfloat16 and multiplies_bfloat16 else torch.float32


def fill(model: Model, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy every parameter of `model` from `weights`, tensor by tensor, converting to the model's type.

    CheckpointError names a parameter that is missing or has the wrong shape or type, and a tensor that the model has
    no place for, which would mean that it is not the model its config describes.
    """
    _refuse_other_expert_counts(model.config, weights)
    fused_experts = any(name.endswith(".mlp.experts.gate_up_proj") for name in weights)
    wanted = model.parameters_wanted(fused_experts=fused_experts)
    missing = [name for name in wanted if name not in weights]
    if missing == ["lm_head.weight"]:
        raise CheckpointError(
            "the weights have no lm_head.weight, and config.json does not say tie_word_embeddings: true, which would "
            "use model.embed_tokens.weight in its place"
        )
    if missing:
        raise CheckpointError(f"the weights have no {_some(missing)}")
    unexpected = [name for name in weights if name not in wanted and not model.may_skip(name)]
    if unexpected:
        architecture = model.config.architecture
        raise CheckpointError(f"the weights have {_some(unexpected)}, which {architecture} as configured does not use")
    for name in weights:  # in the order of the files
        if name not in wanted:
            continue
        source, target = weights[name], wanted[name]
        if source.shape != target.shape:
            raise CheckpointError(f"{name} has shape {list(source.shape)}, config.json asks for {list(target.shape)}")
        if source.dtype not in _READABLE:
            raise CheckpointError(f"{name} is {source.dtype}; float32, bfloat16 and float16 weights are supported")
        target.copy_(source)


def _refuse_other_expert_counts(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Experts are counted before anything else: a config that is wrong about them would mean hundreds of tensors."""
    held: dict[int, int] = {}
    for name in weights:
        if match := _EXPERT.match(name):
            layer, expert = int(match[1]), match[2]
            count = int(expert) + 1 if expert is not None else weights[name].shape[0]
            held[layer] = max(held.get(layer, 0), count)
    for layer, count in held.items():
        if config.is_sparse(layer) and config.moe is not None and config.moe.num_experts != count:
            said = config.moe.num_experts
            raise CheckpointError(f"the weights have {count} experts in layer {layer}, config.json says {said}")


def _some(names: list[str]) -> str:
    """The first few of a list that may hold hundreds."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
