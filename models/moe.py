"""The mixture of experts that takes the MLP's place: every token goes through the few experts its router chooses.

    router     probabilities of all experts, the best k of them, their weights
    dispatch   the rows of each expert side by side: k copies of every token's row, sorted by expert
    experts    SwiGLU, one grouped matrix product for all experts' rows (they differ in number)
    combine    every token's k results back in its place, weighted, summed, added to the residual stream

Nothing here waits for the device: no shape depends on the routing, and where each expert's rows end is itself a tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from models.config import ModelConfig
from models.gate import Gate
from models.linear import Linear, RMSNorm


class MoE:
    """Qwen3-MoE's block. The weights of all experts lie in two tensors: gate and up [experts, 2 * inner, hidden], down
    [experts, hidden, inner]."""

    operators = ("router", "dispatch", "experts", "combine")

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        assert config.moe is not None
        moe = config.moe
        hidden, inner = config.hidden_size, moe.intermediate_size
        for name, size in (("hidden_size", hidden), ("moe_intermediate_size", inner)):
            if size * dtype.itemsize % 16:
                raise ValueError(
                    f"{name} {size} in {dtype}: grouped matrix products need rows of a multiple of 16 bytes, "
                    f"which is a multiple of {16 // dtype.itemsize}"
                )
        self.config = moe
        self.norm = RMSNorm("post_attention_layernorm", hidden, config.rms_norm_eps, dtype, device)
        self.router = Linear(hidden, {"mlp.gate": moe.num_experts}, False, dtype, device)
        self.gate_up_proj = torch.empty(moe.num_experts, 2 * inner, hidden, dtype=dtype, device=device)
        self.down_proj = torch.empty(moe.num_experts, hidden, inner, dtype=dtype, device=device)
        self._expert_ids = torch.arange(moe.num_experts, device=device)

    async def __call__(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden], residual included."""
        normed = self.norm(x)
        weights, chosen = self.route(normed)
        await gate.operator("router")
        rows, places, ends = self.dispatch(normed, chosen)
        del normed, chosen
        if gate.routed is not None:
            gate.routed.append(ends)
        await gate.operator("dispatch")
        rows = self.run_experts(rows, ends)
        await gate.operator("experts")
        x = x + combine(rows, places, weights)
        await gate.operator("combine")
        return x

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, hidden] -> weights and ids of the chosen experts, both [rows, k].

        Softmax over all experts comes first, in float32, then the choice; `norm_topk_prob` then makes the k weights sum
        to one. (Other families choose first.)
        """
        probabilities = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.config.experts_per_token, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows by expert.

        Returns the rows [rows * k, hidden], sorted by expert; where token t's j-th row went, int64 [rows * k] at
        t * k + j; and the end of each expert's rows, int32 [experts].
        """
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self._expert_ids, right=True, out_int32=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return x.index_select(0, order // self.config.experts_per_token), places, ends

    def run_experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Each row through its expert: [rows * k, hidden] -> the same."""
        gated, up = grouped(rows, self.gate_up_proj, ends).chunk(2, dim=-1)
        return grouped(F.silu(gated) * up, self.down_proj, ends)

    def parameters(self, prefix: str, *, fused_experts: bool) -> dict[str, torch.Tensor]:
        """Names as on the hub, three matrices an expert; with `fused_experts` as transformers 5 has them in memory, two
        tensors for all."""
        views = self.norm.parameters(prefix) | self.router.parameters(prefix)
        prefix += "mlp.experts."
        if fused_experts:
            return views | {f"{prefix}gate_up_proj": self.gate_up_proj, f"{prefix}down_proj": self.down_proj}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, up = gate_up.chunk(2)
            views |= {
                f"{prefix}{expert}.gate_proj.weight": gate,
                f"{prefix}{expert}.up_proj.weight": up,
                f"{prefix}{expert}.down_proj.weight": down,
            }
        return views


def grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [rows, in] through the weight of their group, [groups, out, in] -> [rows, out]; `ends` int32 [groups].

    On CUDA torch has a kernel for bfloat16 from compute capability 9.0 on; for anything else it waits for `ends`
    itself, and loops.
    """
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def looped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What `grouped` means, written out. It waits for the device to learn the sizes of the groups."""
    out = rows.new_empty(len(rows), weight.shape[1])
    start = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        out[start:end] = F.linear(rows[start:end], matrix)
        start = end
    return out


def combine(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts' results [rows * k, hidden], found at `places`, weighted by [rows, k] -> [rows, hidden].

    A gather and a product: always summed in the same order, which adding into place on a GPU would not be.
    """
    by_token = rows.index_select(0, places).view(*weights.shape, -1)
    return torch.bmm(weights[:, None], by_token)[:, 0]
