"""Attention over the paged cache. One small function, three backends that return the same rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from models.batch import Batch, Span


def attention(q: torch.Tensor, batch: Batch, layer: int) -> torch.Tensor:
    """Every row of `q` [rows, heads, head_dim] attends to its own sequence up to and including itself.

    K and V of these rows are already in the cache. Returns [rows, heads * head_dim].
    """
    out = torch.empty_like(q)
    for span in batch.spans:
        out[span.start : span.stop] = _sdpa(q[span.start : span.stop], batch, layer, span)
    return out.flatten(1)


def _gather(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """K or V of one sequence, [length, kv_heads, head_dim]: a view if its blocks are consecutive, else a copy."""
    first, count = span.blocks[0], -(-span.length // tensor.shape[1])
    blocks = span.blocks[:count]
    consecutive = blocks == tuple(range(first, first + count))
    rows = tensor[first : first + count] if consecutive else tensor[list(blocks)]
    return rows.flatten(0, 1)[: span.length]


def _sdpa(q: torch.Tensor, batch: Batch, layer: int, span: Span) -> torch.Tensor:
    k, v = _gather(batch.cache.key[layer], span), _gather(batch.cache.value[layer], span)
    mask = None
    if span.context and span.rows > 1:
        mask = torch.ones(span.rows, span.length, dtype=torch.bool, device=q.device).tril(span.context)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=span.context == 0 and span.rows > 1,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
