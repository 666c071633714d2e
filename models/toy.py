"""Tiny models with random weights and one token a byte: for tests and labs, made in memory from a seed.

`toy` is a Llama, `toy-moe` a Qwen3-MoE. A decode step of either takes a millisecond or two on a CPU. They say nothing
sensible, but always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from models.config import ModelConfig
from models.decoder import Model

# Token ids: 0-255 are the bytes, then the special tokens in this order.
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258


_SHARED: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_ID,
}


def toy_config() -> ModelConfig:
    """Four layers, 64 wide, four heads over two KV heads, 4,096 tokens of context."""
    return ModelConfig.from_hf(
        _SHARED
        | {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "max_position_embeddings": 4096,
        }
    )


def toy_moe_config() -> ModelConfig:
    """Six layers of 32 experts, of which each token takes four; 128 wide, 8,192 tokens of context."""
    return ModelConfig.from_hf(
        _SHARED
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 128,
            "intermediate_size": 256,  # of dense layers, of which it has none
            "num_hidden_layers": 6,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "max_position_embeddings": 8192,
        }
    )


TOYS: dict[str, Callable[[], ModelConfig]] = {"toy": toy_config, "toy-moe": toy_moe_config}


def toy_weights(name: str = "toy", *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Checkpoint name -> float32 tensor, the same in every process."""
    return random_weights(TOYS[name](), seed)


def random_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights for a small model of any shape.

    Matrices have variance 1 / in_features, so that every operator moves the output: with the usual small initial
    weights the embedding alone would decide the next token, and a wrong attention would go unnoticed.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = Model(config, torch.float32).parameters_wanted()
    weights = {}
    for tensor, view in wanted.items():
        noise = torch.randn(view.shape, generator=generator)
        weights[tensor] = 1 + 0.1 * noise if view.ndim == 1 else noise / view.shape[1] ** 0.5
        if tensor.endswith(".mlp.gate.weight"):
            # A longer row is chosen more often: 16 tokens meet 70 % of the experts, where even routing gives 88 %.
            weights[tensor] *= torch.linspace(2.0, 0.2, len(noise))[:, None]
    return weights
