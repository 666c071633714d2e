"""Attention over the paged cache: one small function, the backends behind it.

    attend = plan_attention(batch, backend)     # once a forward pass: block tables, lengths
    out = attend(q, layer)                      # each layer: [rows, heads, head_dim] -> the same

Every row attends to its own sequence up to and including itself. K and V of these rows are already in the cache, and
nothing beyond a sequence's length is read. All backends are deterministic.

- `sdpa`: torch's scaled_dot_product_attention, a sequence at a time. Any device, any dtype.
- `matmul`: the same, but prefills in bfloat16 as plain matrix products over query tiles (see `causal_matmul`). CPU.
- `varlen`: torch's varlen_attn with a block table. CUDA, 16-bit, and FlashAttention 3 activated in torch.
- `flash`: the flash-attn package. CUDA, 16-bit, blocks of a multiple of 256 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import cast

import torch
import torch.nn.functional as F

from models.batch import Batch, Span

Attend = Callable[[torch.Tensor, int], torch.Tensor]
Causal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

BACKENDS = ("sdpa", "matmul", "varlen", "flash")


def default_backend(device: torch.device, dtype: torch.dtype, block_size: int) -> str:
    """The fastest backend that these can have."""
    if device.type == "cpu":
        return "matmul" if dtype == torch.bfloat16 else "sdpa"
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        if torch.nn.attention.current_flash_attention_impl() == "FA3":
            return "varlen"
        if block_size % 256 == 0 and find_spec("flash_attn") is not None:
            return "flash"
    return "sdpa"


def plan_attention(batch: Batch, backend: str) -> Attend:
    """What a forward pass over `batch` calls in each layer."""
    if backend in ("sdpa", "matmul"):
        return _SequenceBySequence(batch, causal_matmul if backend == "matmul" else causal_sdpa)
    if backend in ("varlen", "flash"):
        return _BlockTable(batch, backend)
    raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


class _SequenceBySequence:
    """Reads each sequence's K and V in turn: a view of the cache where its blocks are consecutive, else a copy."""

    def __init__(self, batch: Batch, causal: Causal) -> None:
        self.cache = batch.cache
        self.causal = causal
        self.reads = [(span, self._blocks(span)) for span in batch.spans]

    def _blocks(self, span: Span) -> torch.Tensor | None:
        """The blocks to gather, int64 [blocks], or None where they are consecutive."""
        used = span.blocks[: -(-span.length // self.cache.block_size)]
        if used == tuple(range(used[0], used[0] + len(used))):
            return None
        return torch.tensor(used, device=self.cache.device)

    def __call__(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        out = torch.empty_like(q)
        for span, blocks in self.reads:
            key = self._read(self.cache.key[layer], span, blocks)
            value = self._read(self.cache.value[layer], span, blocks)
            rows = slice(span.start, span.stop)
            if span.rows == 1:
                out[rows] = one_row(q[rows], key, value)
            else:
                self.causal(q[rows], key, value, out[rows])
        return out

    def _read(self, tensor: torch.Tensor, span: Span, blocks: torch.Tensor | None) -> torch.Tensor:
        """[length, kv_heads, head_dim] of one sequence."""
        if blocks is not None:
            return tensor.index_select(0, blocks).flatten(0, 1)[: span.length]
        first = span.blocks[0] * self.cache.block_size
        return tensor.flatten(0, 1)[first : first + span.length]


def one_row(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A decode step of one sequence: q [1, heads, head_dim] against [length, kv_heads, head_dim].

    The query heads that share a KV head become its query rows: K and V are read once, not once a head. A CPU in
    bfloat16 takes two rows five times as fast as one, so a KV head with a single query head gets its row twice.
    """
    kv_heads, head_dim = key.shape[1:]
    rows = q.view(1, kv_heads, -1, head_dim)
    if rows.shape[2] == 1:
        rows = rows.expand(-1, -1, 2, -1)
    out = F.scaled_dot_product_attention(rows, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
    return out[:, :, : q.shape[1] // kv_heads].reshape(q.shape)


def causal_sdpa(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """The last rows of one sequence attend to all of it: q and out [rows, heads, head_dim], K and V [length, ...].

    Rows behind a context go in tiles, so that the mask never holds more than 256 rows.
    """
    rows, length = len(q), len(key)
    context = length - rows
    tile = 256 if context else rows
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        seen = context + stop
        mask = None
        if context:
            mask = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).tril(context + start)
        tile_out = F.scaled_dot_product_attention(
            q[start:stop].transpose(0, 1)[None],
            key[:seen].transpose(0, 1)[None],
            value[:seen].transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=not context,
            enable_gqa=True,
        )
        out[start:stop] = tile_out[0].transpose(0, 1)


_SCORES = 1 << 20  # of one tile, in elements: two such buffers stay in a CPU's cache


def causal_matmul(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """The same as `causal_sdpa`, as three plain operations per query tile: scores, softmax, weighted sum.

    torch's CPU kernel (2.13) multiplies bfloat16 in float32 unless the CPU has AMX; oneDNN's matrix product does not,
    and is several times faster. Scores are rounded to bfloat16 and the softmax is computed in float32, as in
    transformers' eager attention.
    """
    rows, heads, head_dim = q.shape
    length, kv_heads = key.shape[:2]
    group, context = heads // kv_heads, length - rows
    q = (q * head_dim**-0.5).view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    out = out.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    key, value = key.permute(1, 2, 0).contiguous(), value.transpose(0, 1).contiguous()
    tile = max(16, min(rows, _SCORES // (heads * length)))
    scores, weights = q.new_empty(2, heads * tile * length)
    future = torch.full((tile, tile), float("-inf"), dtype=q.dtype, device=q.device).triu(1)  # added: 0 changes nothing
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        count, seen = stop - start, context + stop
        s = scores[: heads * count * seen].view(kv_heads, group * count, seen)
        w = weights[: heads * count * seen].view(kv_heads, group * count, seen)
        torch.bmm(q[:, :, start:stop].flatten(1, 2), key[:, :, :seen], out=s)
        s.view(heads, count, seen)[:, :, seen - count :].add_(future[:count, :count])
        torch.softmax(s, dim=-1, out=w)
        out[:, :, start:stop] = torch.bmm(w, value[:, :seen]).view(kv_heads, group, count, head_dim)


class _BlockTable:
    """One kernel for all sequences, which finds their blocks by a table. CUDA only."""

    def __init__(self, batch: Batch, backend: str) -> None:
        def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=batch.cache.device)

        spans = batch.spans
        width = max(len(span.blocks) for span in spans)
        self.cache = batch.cache
        self.kernel = self._varlen if backend == "varlen" else self._flash
        self.blocks = int32([[*span.blocks, *[0] * (width - len(span.blocks))] for span in spans])
        self.starts = int32([0, *(span.stop for span in spans)])
        self.lengths = int32([span.length for span in spans])
        self.max_rows = max(span.rows for span in spans)
        self.max_length = max(span.length for span in spans)

    def __call__(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self.kernel(q, self.cache.key[layer], self.cache.value[layer])

    def _varlen(self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(  # a tensor, as no auxiliary output is asked for
            q,
            key,
            value,
            self.starts,
            None,  # lengths come from seqused_k
            self.max_rows,
            self.max_length,
            window_size=(-1, 0),  # causal, aligned to each sequence's end
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.blocks,
            num_splits=1,  # a row's result does not depend on the rest of the batch
        )
        return cast(torch.Tensor, out)

    def _flash(self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        ends = F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        out = flash_attn_varlen_func(
            q, key, value, self.starts, ends, self.max_rows, self.max_length, causal=True, block_table=self.blocks
        )
        return cast(torch.Tensor, out)
