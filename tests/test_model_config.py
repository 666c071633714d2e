"""What is read from config.json, and that anything that would silently change the results is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from model_helpers import hf_json

from models.config import ModelConfig
from models.rope import RopeConfig

SMOLLM2 = {  # as its config.json has it, with the keys that do not matter here
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"dtype": "q4"},
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN2_5 = {  # Qwen2.5-0.5B-Instruct, which carries a window it does not use
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_whole_config_of_smollm2() -> None:
    assert ModelConfig.from_hf(SMOLLM2) == ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=100_000.0),
        eos_token_ids=frozenset({2}),
    )


def test_an_unused_window_is_no_obstacle() -> None:
    config = ModelConfig.from_hf(QWEN2_5)
    assert (config.head_dim, config.family.qkv_bias, config.family.qk_norm) == (64, True, False)


def test_head_dim_comes_from_the_config_or_the_family() -> None:
    assert ModelConfig.from_hf(hf_json("qwen3", head_dim=16)).head_dim == 16
    without = {key: value for key, value in hf_json("qwen3").items() if key != "head_dim"}
    assert ModelConfig.from_hf(without).head_dim == 128
    assert ModelConfig.from_hf(SMOLLM2 | {"head_dim": 32}).head_dim == 32


def test_without_kv_heads_there_are_as_many_as_heads() -> None:
    assert ModelConfig.from_hf(SMOLLM2 | {"num_key_value_heads": None}).num_kv_heads == 9


def test_embeddings_are_untied_unless_said() -> None:
    silent = {key: value for key, value in SMOLLM2.items() if key != "tie_word_embeddings"}
    assert not ModelConfig.from_hf(silent).tie_word_embeddings


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (2, None, {2}),
        ([1, 2], None, {1, 2}),
        (2, {"eos_token_id": [3, 4]}, {2, 3, 4}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {}, set()),
    ],
)
def test_every_eos_id_counts(in_config: Any, in_generation_config: dict[str, Any] | None, expected: set[int]) -> None:
    """Case C6; the tokenizer's own is added where it is loaded."""
    assert ModelConfig.from_hf(SMOLLM2 | {"eos_token_id": in_config}, in_generation_config).eos_token_ids == expected


def test_yarn_stretches_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert ModelConfig.from_hf(QWEN2_5).context_length == 32768
    assert ModelConfig.from_hf(QWEN2_5 | {"rope_scaling": yarn}).context_length == 131072
    assert ModelConfig.from_hf(QWEN2_5 | {"rope_scaling": {"type": "linear", "factor": 4.0}}).context_length == 32768


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, r"\['MistralForCausalLM'\] not supported; supported: LlamaForC"),
        ({"architectures": None}, r"architectures \[\] not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures LlamaForCausalLM not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported; False is"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; 'silu' is"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*gptq.* is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved True is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"sliding_window": 4096}, "sliding-window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention layers are"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, got 0"),
        ({"vocab_size": "49152"}, "vocab_size must be a positive whole number, got '49152'"),
        ({"intermediate_size": 1536.0}, "intermediate_size must be a positive whole number, got 1536.0"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive whole number, got True"),
        ({"num_key_value_heads": 2}, "num_attention_heads 9 is no multiple of num_key_value_heads 2"),
        ({"hidden_size": 577}, "hidden_size 577 is no multiple of num_attention_heads 9"),
        ({"head_dim": 63}, "head_dim must be even for RoPE, got 63"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a small positive number, got None"),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id must be a token id or a list of them, got '</s>'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    ],
)
def test_what_would_change_the_results_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(SMOLLM2 | changes)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({"use_sliding_window": True}, True),
        ({"use_sliding_window": True, "sliding_window": None}, False),
        ({"use_sliding_window": True, "max_window_layers": 24}, False),
        ({"layer_types": ["full_attention"] * 24, "use_sliding_window": True}, False),
        ({"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, True),
    ],
)
def test_a_window_is_refused_where_a_layer_uses_it(changes: dict[str, Any], used: bool) -> None:
    if used:
        with pytest.raises(ValueError, match="sliding-window attention is not supported"):
            ModelConfig.from_hf(QWEN2_5 | changes)
    else:
        ModelConfig.from_hf(QWEN2_5 | changes)


def test_a_bad_generation_config_is_named() -> None:
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id .* got \[2, None\]"):
        ModelConfig.from_hf(SMOLLM2, {"eos_token_id": [2, None]})
