"""Rotary position embedding: default, linear, llama3 and YaRN frequencies, in both spellings of the config's keys.

Position p turns the pair (i, i + head_dim/2) of a head by the angle p * frequency[i] (Su et al., RoFormer,
arXiv:2104.09864, in the half-split layout of the Hugging Face checkpoints). The scaled kinds only change the
frequencies, and YaRN also the length of the turned vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# The keys that each kind of RoPE may be given. Anything else is refused: some other program would act on it.
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. `original_length`, in tokens, is what the model was trained at before scaling.

    `low_freq_factor` and `high_freq_factor` belong to llama3; `beta_fast`, `beta_slow`, `truncate` and
    `attention_factor` (what cos and sin are multiplied by) to YaRN.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it) of a config.json.

        ValueError, naming the key, for a kind or a key that is not computed here, a missing key, or a bad number.
        """
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        for key, part in (("rope_scaling", old), ("rope_parameters", new)):
            if part is not None and not isinstance(part, Mapping):
                raise ValueError(f"config.json: {key} must be an object, got {part!r}")
        if old and new and dict(old) != dict(new):
            raise ValueError(f"config.json: rope_scaling {old} and rope_parameters {new} disagree; keep one of them")
        values: dict[str, Any] = dict(old or new or {})
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in _KEYS:
            raise ValueError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_KEYS)}")
        unknown = sorted(set(values) - _KEYS[kind] - _COMMON_KEYS)
        if unknown:
            raise ValueError(f"config.json: unknown key {unknown[0]!r} for rope type {kind!r}")
        for place in (values, config):
            if place.get("partial_rotary_factor", 1.0) not in (None, 1.0):
                raise ValueError("config.json: partial_rotary_factor other than 1.0 is not supported")

        def number(key: str, default: float | None = None) -> float:
            value = values.get(key)
            if value is None:
                value = default
            if value is None:
                raise ValueError(f"config.json: rope type {kind!r} needs {key!r}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"config.json: rope {key!r} must be a positive number, got {value!r}")
            return float(value)

        theta = number("rope_theta", config.get("rope_theta", 10_000.0))
        if kind == "default":
            return cls(theta=theta)
        if kind == "linear":
            return cls(kind, theta, factor=number("factor"))

        # A length beside the scaling keys wins over one among them, as in transformers (Phi-3 is spelled that way).
        outside = config.get("original_max_position_embeddings")
        if outside is not None:
            values["original_max_position_embeddings"] = outside
        original = int(number("original_max_position_embeddings", max_position_embeddings))
        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                raise ValueError(f"config.json: rope low_freq_factor {low} must be below high_freq_factor {high}")
            return cls(kind, theta, number("factor"), original, low, high)

        truncate = values.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ValueError(f"config.json: rope 'truncate' must be true or false, got {truncate!r}")
        factor = number("factor", max_position_embeddings / original)
        if values.get("attention_factor") is not None:
            attention_factor = number("attention_factor")
        elif values.get("mscale") and values.get("mscale_all_dim"):
            attention_factor = _yarn_length(factor, number("mscale")) / _yarn_length(factor, number("mscale_all_dim"))
        else:
            attention_factor = _yarn_length(factor)
        return cls(
            kind,
            theta,
            factor,
            original,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=truncate,
            attention_factor=attention_factor,
        )


def _yarn_length(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of the logits with the context, sqrt(1/t) in arXiv:2309.00071 section 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rotation(NamedTuple):
    """Cos and sin of the angles of some rows, float32 [rows, 1, head_dim/2]: one for all heads and layers."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rope:
    """The frequencies of one model, float32 [head_dim/2], and the rotation of q and k."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.frequencies = _frequencies(config, head_dim).to(device)
        self.attention_factor = config.attention_factor

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """For `positions`, int64 [rows]: computed once a forward pass, used by every layer of it."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(cos[:, None], sin[:, None])


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn every head of `x` [rows, heads, head_dim]; computed in float32, returned in x's type."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / config.theta**exponent
    if config.kind == "linear":
        return base / config.factor
    if config.kind == "llama3":
        return _llama3(base, config)
    if config.kind == "yarn":
        return _yarn(base, config, head_dim)
    return base


def _llama3(base: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1's release)."""
    wavelength = 2 * math.pi / base
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = ((config.original_length / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / config.factor + keep * base


def _yarn(base: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often within the original length are kept, slow ones stretched: arXiv:2309.00071, 3.2."""

    def dimension(rotations: float) -> float:
        turns = config.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    stretch = ramp.clamp(0, 1)
    return (1 - stretch) * base + stretch * base / config.factor
