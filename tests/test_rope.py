"""Case D2: cos and sin equal transformers' for every kind of RoPE, in both spellings, beyond the original length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from models.rope import Rope, RopeConfig, rotate

HEAD_DIM = 64
MAX_POSITIONS = 4096
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "llama 3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, all settings": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.5,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "yarn, original length left out": {"rope_type": "yarn", "factor": 2.0},
}


def written(values: dict[str, Any], theta: float, spelling: str) -> dict[str, Any]:
    """The part of config.json that concerns RoPE, in transformers 5's spelling or in one of the two before it."""
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_theta": theta, **values}}
    kind = values["rope_type"]
    scaling = {spelling.removeprefix("rope_scaling, "): kind, **{k: v for k, v in values.items() if k != "rope_type"}}
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling, rope_type", "rope_scaling, type"])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str, theta: float, spelling: str) -> None:
    values = KINDS[kind]
    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters={"rope_theta": theta, **values}
    )
    positions = torch.cat((torch.arange(64), torch.arange(500, 4 * MAX_POSITIONS, 17)))
    x = torch.zeros(1, len(positions), HEAD_DIM)
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(x, positions[None])

    rope = Rope(RopeConfig.from_hf(written(values, theta, spelling), MAX_POSITIONS), HEAD_DIM)
    ours = rope.rotation(positions)
    torch.testing.assert_close(rope.frequencies, embedding.inv_freq, atol=0, rtol=1e-6)
    torch.testing.assert_close(ours.cos[:, 0], cos[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.sin[:, 0], sin[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)

    q = torch.randn(len(positions), 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    turned, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(q, ours), turned[0].transpose(0, 1), atol=1e-4, rtol=0)


def test_the_scaled_kinds_differ_from_the_default_one() -> None:
    positions = torch.arange(2000, 2100)
    tables = {}
    for kind, values in KINDS.items():
        config = RopeConfig.from_hf(written(values, 10_000.0, "rope_parameters"), MAX_POSITIONS)
        tables[kind] = Rope(config, HEAD_DIM).rotation(positions).cos
    for kind, table in tables.items():
        assert (kind == "default") == torch.allclose(table, tables["default"], atol=1e-3), kind


def test_a_length_beside_the_scaling_keys_counts() -> None:
    inside = written(KINDS["yarn"], 10_000.0, "rope_scaling, type")
    outside = {**inside, "original_max_position_embeddings": 256}
    assert RopeConfig.from_hf(inside, MAX_POSITIONS).original_length == 1024
    assert RopeConfig.from_hf(outside, MAX_POSITIONS).original_length == 256


def test_theta_defaults_to_10000() -> None:
    assert RopeConfig.from_hf({}, MAX_POSITIONS) == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope type 'llama3' needs 'low_freq_factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope 'factor' must be a positive number, got '4'"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "rope 'factor' must be a positive number, got -1.0"),
        ({"rope_theta": True}, "rope 'rope_theta' must be a positive number, got True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}}, "unknown key 'alpha' for rope type 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor other than 1.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "unknown key 'full_attention'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}}, "'truncate' must be true or false"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling .* and rope_parameters .* disagree",
        ),
        (
            {"rope_scaling": {**KINDS["llama 3.1"], "low_freq_factor": 4.0}},
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
    ],
)
def test_what_would_change_the_angles_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config, MAX_POSITIONS)
