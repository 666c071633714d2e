"""The cache tensors: per layer one K and one V, cut into blocks."""

from __future__ import annotations

import torch


class KVCache:
    """`key[layer]`, `value[layer]`: [num_blocks, block_size, kv_heads, head_dim].

    One per device; instances on a device hold quotas of its blocks (kv/pool.py). Rows beyond a sequence's length are
    never read: they may hold anything, NaN included.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (num_blocks, block_size, kv_heads, head_dim)
        # Not zeroed: that would touch, and so claim, memory that may never be used.
        self.key = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.value = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within this cache (copy-on-write after a fork)."""
        for tensor in (*self.key, *self.value):
            tensor[target].copy_(tensor[source])
