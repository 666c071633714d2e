"""What a model is, read from its config.json. Whatever would change the results and is not computed here is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Family:
    """Where the architectures differ. Everything else they share."""

    qkv_bias: bool = False  # Qwen2 and 2.5 add a bias to q, k and v
    qk_norm: bool = False  # Qwen3 normalises every head of q and k before RoPE
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    experts: bool = False  # a mixture of experts in place of the MLP, in some or all layers


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, experts=True),
}

# Keys that change the results, and the only values of them that are computed here; a missing key is the first value.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "rope_interleaved": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The mixture of experts that `layers` have in place of the MLP (models/moe.py)."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the weights of a token's experts are made to sum to one
    layers: tuple[int, ...]  # the others are dense

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], num_layers: int) -> MoEConfig:
        """ValueError names the key that is missing, malformed or out of range."""
        # transformers 5 writes num_local_experts
        num_experts = _count(config, "num_experts", config.get("num_local_experts"))
        experts_per_token = _count(config, "num_experts_per_tok")
        if experts_per_token > num_experts:
            raise ValueError(
                f"config.json: num_experts_per_tok {experts_per_token} is more than num_experts {num_experts}"
            )
        every, dense = _count(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(one) is not int or not 0 <= one < num_layers for one in dense):
            raise ValueError(f"config.json: mlp_only_layers must list layers below {num_layers}, got {dense!r}")
        return cls(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=_count(config, "moe_intermediate_size"),
            norm_topk_prob=_flag(config, "norm_topk_prob"),
            layers=tuple(i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense),
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Lengths and positions are in tokens."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    eos_token_ids: frozenset[int]
    moe: MoEConfig | None = None  # None: every layer is dense

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def context_length(self) -> int:
        """The longest sequence the model is meant for: YaRN stretches its original length by its factor."""
        stretched = int(self.rope.original_length * self.rope.factor) if self.rope.kind == "yarn" else 0
        return max(self.max_position_embeddings, stretched)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the JSON of config.json and, where there is one, generation_config.json.

        Every EOS id that either of them names ends a generation. ValueError names the key that is missing, malformed
        or not supported.
        """
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in FAMILIES:
            supported = ", ".join(FAMILIES)
            raise ValueError(f"config.json: architectures {architectures} not supported; supported: {supported}")
        architecture = architectures[0]
        family = FAMILIES[architecture]
        for key, allowed in _ONLY.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise ValueError(f"config.json: {key} {value!r} is not supported; {allowed[0]!r} is")

        num_layers, num_heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
        hidden_size = _count(config, "hidden_size")
        num_kv_heads = _count(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        if family.default_head_dim is None and config.get("head_dim") is None and hidden_size % num_heads:
            sizes = f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
            raise ValueError(f"config.json: {sizes}, and there is no head_dim")
        head_dim = _count(config, "head_dim", family.default_head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim must be even for RoPE, got {head_dim}")
        _refuse_sliding_window(config, architecture, num_layers)
        eps = config.get("rms_norm_eps")
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
            raise ValueError(f"config.json: rms_norm_eps must be a small positive number, got {eps!r}")
        max_position_embeddings = _count(config, "max_position_embeddings")
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_count(config, "intermediate_size"),
            vocab_size=_count(config, "vocab_size"),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=float(eps),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            rope=RopeConfig.from_hf(config, max_position_embeddings),
            eos_token_ids=_eos(config, "config.json") | _eos(generation_config or {}, "generation_config.json"),
            moe=MoEConfig.from_hf(config, num_layers) if family.experts else None,
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.moe is not None and layer in self.moe.layers


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive whole number, got {value!r}")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def _eos(config: Mapping[str, Any], file: str) -> frozenset[int]:
    """`eos_token_id` may be absent, one id or several."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str, num_layers: int) -> None:
    """Qwen's configs carry a window that they do not use; one that some layer uses is refused."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        used = any(kind != "full_attention" for kind in layer_types)
    elif architecture == "LlamaForCausalLM":
        used = config.get("sliding_window") is not None
    else:
        used = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
        if architecture != "Qwen3MoeForCausalLM":  # where one is used, all its layers use it
            used = used and config.get("max_window_layers", 28) < num_layers
    if used:
        raise ValueError("config.json: sliding-window attention is not supported; only full_attention layers are")
