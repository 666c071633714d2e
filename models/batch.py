"""What one forward pass needs to know about its rows: which sequence each belongs to, and where its K and V go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class Span:
    """The rows [start, stop) of a batch that belong to one sequence, which already has `context` tokens in the cache.

    `blocks` is a snapshot of the sequence's block table: token position p lives in block `blocks[p // block_size]`.
    """

    start: int
    stop: int
    context: int
    blocks: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def length(self) -> int:
        """Tokens in the cache once these rows are written; attention reads exactly [0, length)."""
        return self.context + self.rows


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens`, `positions`, `slots`: int64 [rows]. Slot = block * block_size + offset, where a row's K and V go."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: tuple[Span, ...]
    cache: KVCache

    @classmethod
    def build(cls, cache: KVCache, parts: Iterable[tuple[Sequence[int], int, Sequence[int]]]) -> Batch:
        """From (new tokens, context, blocks) of each sequence, in row order: a snapshot, which nobody changes later."""
        tokens: list[int] = []
        positions: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        spans: list[Span] = []
        size = cache.block_size
        for new, context, blocks in parts:
            start, end = len(tokens), context + len(new)
            if end > len(blocks) * size:
                raise ValueError(f"{end} tokens need more than the {len(blocks)} blocks of {size} given")
            tokens.extend(new)
            here = torch.arange(context, end)
            positions.append(here)
            slots.append(torch.tensor(blocks, dtype=torch.int64)[here // size] * size + here % size)
            spans.append(Span(start, len(tokens), context, tuple(blocks)))
        columns = torch.stack([torch.tensor(tokens, dtype=torch.int64), torch.cat(positions), torch.cat(slots)])
        columns = columns.to(cache.device, non_blocking=True)
        return cls(columns[0], columns[1], columns[2], tuple(spans), cache)

    def tail(self, first: int) -> Batch:
        """The batch without its first `first` sequences."""
        if first == 0:
            return self
        offset = self.spans[first - 1].stop
        spans = tuple(replace(span, start=span.start - offset, stop=span.stop - offset) for span in self.spans[first:])
        return Batch(self.tokens[offset:], self.positions[offset:], self.slots[offset:], spans, self.cache)

    @property
    def last_rows(self) -> torch.Tensor:
        """The last row of each sequence, int64 [sequences]: the only ones whose logits are needed."""
        return torch.tensor([span.stop - 1 for span in self.spans], dtype=torch.int64, device=self.tokens.device)
