"""Every attention backend gives what a softmax written out in float64 gives, and reads nothing else."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import poison
from torch.nn.attention import varlen

from kv.cache import KVCache
from models import attention
from models.attention import BACKENDS, default_backend, plan_attention
from models.batch import Batch

BLOCK = 16
HEAD_DIM = 32
HEADS = [(6, 2), (4, 4), (4, 1)]  # query heads, KV heads
# (context, rows) of each sequence of a batch.
BATCHES = {
    "a prompt": [(0, 50)],
    "one token": [(0, 1)],
    "a decode": [(77, 1)],
    "a chunk behind a context": [(37, 21)],
    "a long chunk behind a context": [(45, 600)],
    "prompts, chunks and decodes": [(0, 33), (64, 1), (16, 16), (0, 1), (5, 40), (130, 1)],
}


def filled(kind: str, heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, Batch]:
    """Random q and a batch whose K and V are in scattered blocks; all other rows of the cache are NaN."""
    generator = torch.Generator().manual_seed(1)
    lengths = [context + rows for context, rows in BATCHES[kind]]
    blocks = 2 + sum(-(-length // BLOCK) for length in lengths)
    cache = KVCache(1, blocks, BLOCK, kv_heads, HEAD_DIM, dtype)
    poison(cache, list(range(blocks)))
    free = torch.randperm(blocks, generator=generator).tolist()
    parts = []
    for context, rows in BATCHES[kind]:
        table = [free.pop() for _ in range(-(-(context + rows) // BLOCK))]
        for position in range(context + rows):
            place = table[position // BLOCK], position % BLOCK
            cache.key[0][place] = torch.randn(kv_heads, HEAD_DIM, generator=generator)
            cache.value[0][place] = torch.randn(kv_heads, HEAD_DIM, generator=generator)
        parts.append(([0] * rows, context, table))
    batch = Batch.build(cache, parts)
    q = torch.randn(len(batch.tokens), heads, HEAD_DIM, generator=generator).to(dtype)
    return q, batch


def written_out(q: torch.Tensor, batch: Batch) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=torch.float64)
    cache = batch.cache
    for span in batch.spans:
        key, value = (t[list(span.blocks)].flatten(0, 1)[: span.length] for t in (cache.key[0], cache.value[0]))
        for row in range(span.start, span.stop):
            seen = span.context + row - span.start + 1
            for head in range(q.shape[1]):
                kv_head = head * key.shape[1] // q.shape[1]
                scores = key[:seen, kv_head].double() @ q[row, head].double() / math.sqrt(HEAD_DIM)
                out[row, head] = scores.softmax(0) @ value[:seen, kv_head].double()
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("backend", ["sdpa", "matmul"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("kind", BATCHES)
def test_equals_the_softmax_written_out(
    kind: str, heads: int, kv_heads: int, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    q, batch = filled(kind, heads, kv_heads, dtype)
    before = q.clone()
    out = plan_attention(batch, backend)(q, 0)
    assert out.dtype == dtype
    assert out.shape == q.shape
    torch.testing.assert_close(out.double(), written_out(q, batch), atol=tolerance, rtol=0)
    assert torch.equal(q, before)


@pytest.mark.parametrize("scores", [1, 20_000, 1 << 30])
def test_query_tiles_of_any_size_give_the_same(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, batch = filled("prompts, chunks and decodes", 6, 2, torch.float32)
    expected = plan_attention(batch, "sdpa")(q, 0)
    monkeypatch.setattr(attention, "_SCORES", scores)
    torch.testing.assert_close(plan_attention(batch, "matmul")(q, 0), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 2, 3), (0, 1, 3, 2), (4, 5, 0, 1)], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "matmul"])
def test_blocks_in_any_order_equal_those_in_a_row(backend: str, order: tuple[int, ...]) -> None:
    """(0, 2, 1, 3) begins and ends where a row of four does, and is none."""
    q, batch = filled("a chunk behind a context", 6, 2, torch.float32)
    (span,) = batch.spans
    assert len(span.blocks) == len(order)

    def laid_out(blocks: tuple[int, ...]) -> torch.Tensor:
        cache = KVCache(1, 6, BLOCK, 2, HEAD_DIM, torch.float32)
        poison(cache, list(range(6)))
        for target, source in zip(blocks, span.blocks, strict=True):
            cache.key[0][target] = batch.cache.key[0][source]
            cache.value[0][target] = batch.cache.value[0][source]
        return plan_attention(Batch.build(cache, [([0] * span.rows, span.context, blocks)]), backend)(q, 0)

    assert torch.equal(laid_out(order), laid_out((0, 1, 2, 3)))


@pytest.mark.parametrize("backend", ["sdpa", "matmul"])
def test_consecutive_blocks_equal_scattered_ones(backend: str) -> None:
    q, scattered = filled("a chunk behind a context", 6, 2, torch.float32)
    (span,) = scattered.spans
    cache = KVCache(1, 8, BLOCK, 2, HEAD_DIM, torch.float32)
    poison(cache, list(range(8)))
    for target, source in enumerate(span.blocks, start=3):
        cache.key[0][target] = scattered.cache.key[0][source]
        cache.value[0][target] = scattered.cache.value[0][source]
    consecutive = Batch.build(cache, [([0] * span.rows, span.context, range(3, 3 + len(span.blocks)))])
    assert torch.equal(plan_attention(consecutive, backend)(q, 0), plan_attention(scattered, backend)(q, 0))


def fake_varlen_attn(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """What torch documents of the CUDA kernel, on a CPU: paged K and V, causal to the end of each sequence."""
    assert cu_seq_k is None
    assert window_size == (-1, 0)
    assert enable_gqa
    assert num_splits == 1
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    rows = cu_seq_q.diff()
    assert (max_q, max_k) == (rows.max(), seqused_k.max())
    tables = block_table.tolist()
    cache = KVCache(1, len(key), key.shape[1], *key.shape[2:], key.dtype)
    cache.key, cache.value = [key], [value]
    parts = zip(rows.tolist(), seqused_k.tolist(), tables, strict=True)
    batch = Batch.build(cache, [([0] * count, length - count, table) for count, length, table in parts])
    return plan_attention(batch, "sdpa")(q, 0)


def test_varlen_is_given_tables_that_describe_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen_attn)
    q, batch = filled("prompts, chunks and decodes", 6, 2, torch.float32)
    assert torch.equal(plan_attention(batch, "varlen")(q, 0), plan_attention(batch, "sdpa")(q, 0))


def test_flash_attn_is_given_tables_that_describe_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, starts: Any, ends: Any, max_q: int, max_k: int, *, causal: bool, block_table: Any
    ) -> Any:
        assert causal
        assert ends.dtype == torch.int32
        settings: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
        return fake_varlen_attn(
            q, k, v, starts, None, max_q, max_k, seqused_k=ends.diff(), block_table=block_table, **settings
        )

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    q, batch = filled("prompts, chunks and decodes", 6, 2, torch.float32)
    assert torch.equal(plan_attention(batch, "flash")(q, 0), plan_attention(batch, "sdpa")(q, 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", BATCHES)
def test_on_cuda_the_default_backend_equals_the_softmax_written_out(kind: str) -> None:
    q, batch = filled(kind, 6, 2, torch.bfloat16)
    cache = KVCache(1, batch.cache.num_blocks, BLOCK, 2, HEAD_DIM, torch.bfloat16, "cuda")
    cache.key[0].copy_(batch.cache.key[0])
    cache.value[0].copy_(batch.cache.value[0])
    parts = [([0] * span.rows, span.context, span.blocks) for span in batch.spans]
    backend = default_backend(cache.device, cache.dtype, BLOCK)
    out = plan_attention(Batch.build(cache, parts), backend)(q.cuda(), 0)
    torch.testing.assert_close(out.double().cpu(), written_out(q, batch), atol=4e-2, rtol=0)


def test_the_default_is_the_fastest_that_the_device_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_backend(cpu, torch.float32, 16) == "sdpa"
    assert default_backend(cpu, torch.bfloat16, 16) == "matmul"
    assert default_backend(cuda, torch.float32, 256) == "sdpa"
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert default_backend(cuda, torch.bfloat16, 256) == "sdpa"
    monkeypatch.setattr(attention, "find_spec", lambda name: name == "flash_attn" or None)
    assert default_backend(cuda, torch.bfloat16, 256) == "flash"
    assert default_backend(cuda, torch.bfloat16, 16) == "sdpa"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert default_backend(cuda, torch.bfloat16, 16) == "varlen"


def test_an_unknown_backend_is_refused() -> None:
    _, batch = filled("one token", 4, 4, torch.float32)
    with pytest.raises(ValueError, match=f"attention backend must be one of {', '.join(BACKENDS)}, got 'flashy'"):
        plan_attention(batch, "flashy")
