"""The decoder that Llama, Qwen2.5, Qwen3 and Qwen3-MoE share. Its forward pass is a coroutine: a gate per operator.

No `with`, no `try`, no lock stands around an await here: the executor thread enters torch.inference_mode once, and a
parked forward pass must hold nothing that belongs to a thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from models.attention import Attend, default_backend, plan_attention
from models.batch import Batch
from models.config import ModelConfig
from models.gate import Gate
from models.linear import Linear, RMSNorm
from models.moe import MoE
from models.rope import Rope, Rotation, rotate


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202). Its sibling is models/moe.py."""

    operators = ("gate_up_proj", "down_proj")

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.norm = RMSNorm("post_attention_layernorm", hidden, config.rms_norm_eps, dtype, device)
        self.gate_up_proj = Linear(hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}, False, dtype, device)
        self.down_proj = Linear(inner, {"mlp.down_proj": hidden}, False, dtype, device)

    async def __call__(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden], residual included."""
        gated, up = self.gate_up_proj(self.norm(x)).chunk(2, dim=-1)
        inner = F.silu(gated).mul_(up)
        await gate.operator("gate_up_proj")
        x = x + self.down_proj(inner)
        await gate.operator("down_proj")
        return x

    def parameters(self, prefix: str) -> dict[str, torch.Tensor]:
        parts = (self.norm, self.gate_up_proj, self.down_proj)
        return {name: view for part in parts for name, view in part.parameters(prefix).items()}


class Layer:
    """One decoder layer: attention, then MLP or experts, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        family = config.family
        self.head_dim = head_dim
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.norm = RMSNorm("input_layernorm", hidden, config.rms_norm_eps, dtype, device)
        parts = {
            "self_attn.q_proj": heads * head_dim,
            "self_attn.k_proj": kv_heads * head_dim,
            "self_attn.v_proj": kv_heads * head_dim,
        }
        self.qkv_proj = Linear(hidden, parts, family.qkv_bias, dtype, device)
        self.q_norm = self.k_norm = None
        if family.qk_norm:
            self.q_norm = RMSNorm("self_attn.q_norm", head_dim, config.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm("self_attn.k_norm", head_dim, config.rms_norm_eps, dtype, device)
        self.o_proj = Linear(heads * head_dim, {"self_attn.o_proj": hidden}, False, dtype, device)
        self.mlp: MLP | MoE = MoE(config, dtype, device) if config.is_sparse(index) else MLP(config, dtype, device)

    def qkv(self, x: torch.Tensor, rotation: Rotation, batch: Batch, index: int) -> torch.Tensor:
        """[rows, hidden] -> q, [rows, heads, head_dim]; K and V of the rows go to the cache.

        RoPE and the writes belong to this operator: what is left in the frame of a parked forward pass is q alone.
        """
        heads = self.qkv_proj(self.norm(x)).view(len(x), -1, self.head_dim)
        qk, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [self.num_heads, self.num_kv_heads], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = torch.split(rotate(qk, rotation), [self.num_heads, self.num_kv_heads], dim=1)
        batch.cache.key[index].flatten(0, 1).index_copy_(0, batch.slots, k)
        batch.cache.value[index].flatten(0, 1).index_copy_(0, batch.slots, v)
        return q

    @property
    def operators(self) -> tuple[str, ...]:
        return ("qkv_proj", "attention", "o_proj", *self.mlp.operators)

    def parameters(self, prefix: str, *, fused_experts: bool) -> dict[str, torch.Tensor]:
        parts = (self.norm, self.qkv_proj, self.q_norm, self.k_norm, self.o_proj)
        views = {name: view for part in parts if part is not None for name, view in part.parameters(prefix).items()}
        if isinstance(self.mlp, MoE):
            return views | self.mlp.parameters(prefix, fused_experts=fused_experts)
        return views | self.mlp.parameters(prefix)


class Model:
    """One model on one device. Weights are uninitialised until a loader has filled `parameters_wanted()`.

    Weights, activations and cache have one dtype. Measured on two cores with AVX512-BF16 and SmolLM2-135M's shapes:
    matrix products of a prefill run at 900 GFLOP/s in bfloat16, 200 in float32; those of a decode step are bound by
    reading the weights. A cache in float32 would make decode attention 10 to 25 % faster (once query heads share
    their KV head's read, see models/attention.py), but is twice as large, and prefills would have to convert it.
    `attention` names a backend of models/attention.py; None takes the fastest one.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attention: str | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.cache_dtype = dtype
        self.device = torch.device(device)
        self.attention = attention
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed_tokens = Linear(hidden, {"model.embed_tokens": vocab}, False, dtype, self.device)
        self.layers = [Layer(config, index, dtype, self.device) for index in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", hidden, config.rms_norm_eps, dtype, self.device)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = Linear(hidden, {"lm_head": vocab}, False, dtype, self.device)
        self.rope = Rope(config.rope, config.head_dim, self.device)

    def layer_operators(self, layer: int) -> tuple[str, ...]:
        """Names of a layer's operators, in the order in which its gates report them. Dense and sparse layers differ."""
        return self.layers[layer].operators

    def parameters_wanted(self, *, fused_experts: bool = False) -> dict[str, torch.Tensor]:
        """Every tensor name a checkpoint must hold -> the view to copy it into, which has the expected shape.

        The views lie in the fused weights, so `target.copy_(source)` is the only copy. All of them are needed.
        `fused_experts`: for a checkpoint that holds the experts of a layer together, not by their numbers.
        """
        wanted = self.embed_tokens.parameters("")
        for index, layer in enumerate(self.layers):
            wanted |= layer.parameters(f"model.layers.{index}.", fused_experts=fused_experts)
        wanted |= self.norm.parameters("")
        if self.lm_head is not self.embed_tokens:
            wanted |= self.lm_head.parameters("")
        return wanted

    def may_skip(self, name: str) -> bool:
        """Whether a checkpoint tensor outside `parameters_wanted()` is no loss: what the model computes or ties itself.

        Any other one means that the checkpoint is of another architecture, and a loader should refuse it.
        """
        tied_head = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_head or name.endswith("rotary_emb.inv_freq")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [rows] -> [rows, hidden]."""
        return F.embedding(tokens, self.embed_tokens.weight)

    async def run_layers(self, x: torch.Tensor, first: int, last: int, batch: Batch, gate: Gate) -> torch.Tensor:
        """Rows [rows, hidden] through the layers [first, last), with a gate behind every operator of each.

        `x` is the whole state between layers (the residual is already added), so the layers may be run in groups,
        any time apart. It is not changed in place.
        """
        rotation = self.rope.rotation(batch.positions)
        attend = self._plan_attention(batch)
        for index in range(first, last):
            layer = self.layers[index]
            q = layer.qkv(x, rotation, batch, index)
            await gate.operator("qkv_proj")
            out = attend(q, index).flatten(1)
            await gate.operator("attention")
            x = x + layer.o_proj(out)
            await gate.operator("o_proj")
            x = await layer.mlp(x, gate)
        return x

    def _plan_attention(self, batch: Batch) -> Attend:
        backend = self.attention or default_backend(self.device, self.dtype, batch.cache.block_size)
        return plan_attention(batch, backend)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [rows, hidden] behind the last layer -> logits, float32 [rows, vocab]."""
        return self.lm_head(self.norm(x)).float()
