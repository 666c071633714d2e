"""Hand-over to another device: copy a sequence's rows from one cache into blocks of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv.cache import KVCache


def copy_blocks(
    source: KVCache, source_blocks: Sequence[int], target: KVCache, target_blocks: Sequence[int], length: int
) -> None:
    """Copy the K and V of token positions [0, length) of one sequence, layer by layer. Rows beyond `length` are neither
    read nor written. Both caches may be the same one, and block sizes may differ. Hand-over on one device needs no
    copy: see `Quota.adopt`.

    ValueError if the caches do not hold the same kind of rows, or the blocks on either side are too few.
    """
    for name, cache, blocks in (("source", source, source_blocks), ("target", target, target_blocks)):
        if length > len(blocks) * cache.block_size:
            raise ValueError(f"{length} tokens need more than the {len(blocks)} {name} blocks of {cache.block_size}")
    if (kind := _row_kind(source)) != _row_kind(target):
        raise ValueError(f"the source cache holds {kind} (layers, shape, dtype), the target {_row_kind(target)}")
    source_rows = _rows(source, source_blocks, length)
    target_rows = _rows(target, target_blocks, length)
    for old, new in zip((*source.key, *source.value), (*target.key, *target.value), strict=True):
        new.flatten(0, 1)[target_rows] = old.flatten(0, 1)[source_rows].to(target.device)


def _row_kind(cache: KVCache) -> tuple[int, tuple[int, ...], torch.dtype]:
    first = cache.key[0]
    return len(cache.key), tuple(first.shape[2:]), first.dtype


def _rows(cache: KVCache, blocks: Sequence[int], length: int) -> torch.Tensor:
    """Where token positions [0, length) lie in a layer's tensor seen as [num_blocks * block_size, heads, head_dim]."""
    position = torch.arange(length)
    starts = torch.tensor(blocks, dtype=torch.int64) * cache.block_size
    return (starts[position // cache.block_size] + position % cache.block_size).to(cache.device)
