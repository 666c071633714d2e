"""Shapes of well-known models, for simulating them without their weights: the keys of their public config.json."""

from __future__ import annotations

from typing import Any

from models.config import ModelConfig

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": [128001, 128008, 128009],
}

# Llama 3 is Llama 3.1 here: the same shape with a longer context, and what FlowPrefill's authors ran.
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA3
    | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "llama3-70b": _LLAMA3
    | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "qwen2.5-14b": {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": [151645, 151643],
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": [151645, 151643],
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,  # of dense layers, of which it has none
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": [151645, 151643],
    },
}

ARCHITECTURES: dict[str, ModelConfig] = {name: ModelConfig.from_hf(config) for name, config in _CONFIGS.items()}
