"""Copying a sequence from one cache to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kv.cache import KVCache
from kv.pool import BlockPool
from kv.transfer import copy_blocks

LAYERS, HEADS, DIM = 3, 2, 4


def make_cache(num_blocks: int, block_size: int = 4, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> KVCache:
    """Every row distinct, and NaN nowhere yet."""
    cache = KVCache(LAYERS, num_blocks, block_size, heads, DIM, dtype)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.key, *cache.value):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def rows(cache: KVCache, blocks: tuple[int, ...], length: int) -> torch.Tensor:
    """[2 * layers, length, heads, head_dim]: what attention would read of one sequence."""
    layers = (*cache.key, *cache.value)
    return torch.stack([torch.cat([layer[block] for block in blocks])[:length] for layer in layers])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("target_block_size", [2, 4, 16])
def test_the_target_holds_the_same_rows(length: int, target_block_size: int) -> None:
    source = make_cache(8)
    target = KVCache(LAYERS, 12, target_block_size, HEADS, DIM, torch.float32)
    source_table = BlockPool(8, 4).quota("prefill-0", 8).allocate(length)
    target_table = BlockPool(12, target_block_size).quota("decode-0", 12).allocate(length + 2)
    expected = rows(source, source_table.blocks, length)
    copy_blocks(source, source_table.blocks, target, target_table.blocks, length)
    assert torch.equal(rows(target, target_table.blocks, length), expected)


def test_rows_beyond_the_length_are_neither_read_nor_written() -> None:
    source, target = make_cache(4), make_cache(4)
    for tensor in (*source.key, *source.value):
        tensor[3, 1:] = float("nan")
    before = rows(target, (1, 2), 8)
    copy_blocks(source, (0, 3), target, (1, 2), 5)
    after = rows(target, (1, 2), 8)
    assert torch.equal(after[:, :5], rows(source, (0, 3), 5))
    assert torch.equal(after[:, 5:], before[:, 5:])


def test_within_one_cache_other_blocks_are_left_alone() -> None:
    cache = make_cache(6)
    moved, others = rows(cache, (4, 1), 7), rows(cache, (0, 1, 3, 4), 16)
    copy_blocks(cache, (4, 1), cache, (2, 5), 7)
    assert torch.equal(rows(cache, (2, 5), 7), moved)
    assert torch.equal(rows(cache, (0, 1, 3, 4), 16), others)


def test_too_few_blocks_are_refused_on_either_side() -> None:
    cache = make_cache(6)
    with pytest.raises(ValueError, match="9 tokens need more than the 2 source blocks of 4"):
        copy_blocks(cache, (0, 1), cache, (2, 3, 4), 9)
    with pytest.raises(ValueError, match="9 tokens need more than the 2 target blocks of 4"):
        copy_blocks(cache, (2, 3, 4), cache, (0, 1), 9)


@pytest.mark.parametrize("other", [{"heads": HEADS + 1}, {"dtype": torch.bfloat16}])
def test_caches_of_another_kind_are_refused(other: dict[str, Any]) -> None:
    source, target = make_cache(2), make_cache(2, **other)
    with pytest.raises(ValueError, match=r"the source cache holds .*torch\.float32.*, the target "):
        copy_blocks(source, (0,), target, (1,), 2)
