"""A tiny Llama with random weights and one token a byte: for tests and labs, made in memory from a seed.

A forward pass of it takes about a millisecond on a CPU. It says nothing sensible, but always the same.
"""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.decoder import Model

# Token ids: 0-255 are the bytes, then the special tokens in this order.
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258


def toy_config() -> ModelConfig:
    """Four layers, 64 wide, four heads over two KV heads, 4,096 tokens of context."""
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": 256 + len(SPECIAL_TOKENS),
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "eos_token_id": EOS_ID,
        }
    )


def toy_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Checkpoint name -> float32 tensor, the same in every process.

    Matrices have variance 1 / in_features, so that every operator moves the output: with the usual small initial
    weights the embedding alone would decide the next token, and a wrong attention would go unnoticed.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: view.shape for name, view in Model(toy_config(), torch.float32).parameters_wanted().items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / shape[1] ** 0.5
    return weights
