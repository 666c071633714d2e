"""The forward pass that executors drive. Everything it needs is in its arguments: a snapshot.

It runs on an executor's thread. No `with`, no `finally`, no lock may stand around an `await` of the gate: the
coroutine can be suspended there, and resumed or dropped later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.counting import Counting
from engine.gate import Gate
from engine.sampling import Sampled, sample
from engine.work import Computed, Part, Work
from kv.cache import KVCache
from models.batch import Batch
from models.config import ModelConfig


class LanguageModel(Protocol):
    """What the engine asks of a model: the hand-written ones of models/, and a fake one (engine/fake.py)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def cache_dtype(self) -> torch.dtype: ...

    def layer_operators(self, layer: int) -> tuple[str, ...]:
        """Names of a layer's operators, in the order in which its gates report them."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor: ...

    async def run_layers(self, x: torch.Tensor, first: int, last: int, batch: Batch, gate: Gate) -> torch.Tensor: ...

    def head(self, x: torch.Tensor) -> torch.Tensor: ...


async def forward(
    model: LanguageModel, cache: KVCache, work: Work, gate: Gate, counting: Counting | None = None
) -> Computed:
    """Carry out `work`: decode rows through all layers, prefill rows through theirs, then the draws.

    1. Decode rows cross the layers before the prefill's, alone.
    2. Both cross the prefill's layers together, and share the reading of their weights.
    3. Decode rows cross the rest. The prefill's hidden state is kept, unless these were the last layers.

    With `counting`, the pass is counted when it is done.
    """
    if counting is not None:
        gate.routed = []
    for copy in work.before:
        copy()
    parts = (*work.prefill, *work.decode)
    both = Batch.build(cache, ((part.tokens, part.context, part.blocks) for part in parts))
    prefill_rows = sum(len(part.tokens) for part in work.prefill)
    decode_only = both.tail(len(work.prefill)) if work.decode else both
    prefill, decode = both.tokens[:prefill_rows], both.tokens[prefill_rows:]
    hidden = model.embed(prefill) if work.first == 0 else work.carried.hidden

    # 1.
    x = model.embed(decode)
    if work.decode and work.first > 0:
        x = await model.run_layers(x, 0, work.first, decode_only, gate)
    # 2.
    if work.prefill:
        x = _joined(hidden, x)
        x = await model.run_layers(x, work.first, work.last, both, gate)
        hidden, x = x[:prefill_rows], x[prefill_rows:]
        work.carried.hidden = hidden if work.last < work.layers else None
    # 3.
    if work.decode and work.last < work.layers:
        x = await model.run_layers(x, work.last, work.layers, decode_only, gate)

    sampled = _draw(model, _joined(hidden, x), both, parts)
    gate.drain()
    counters = None if counting is None else counting.measured(work, gate.routed or ())
    return Computed(tuple(sampled[: len(work.prefill)]), tuple(sampled[len(work.prefill) :]), counters=counters)


def _joined(prefill: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    """Rows of both; no copy where one of them has none."""
    if not len(decode):
        return prefill
    return torch.cat([prefill, decode]) if len(prefill) else decode


def _draw(model: LanguageModel, x: torch.Tensor, batch: Batch, parts: Sequence[Part]) -> list[tuple[Sampled, ...]]:
    """The draws of each part, from the logits of its last row; the head computes no other rows."""
    drawing = [i for i, part in enumerate(parts) if part.draws]
    sampled: list[tuple[Sampled, ...]] = [()] * len(parts)
    if drawing:
        logits = model.head(x[batch.last_rows[drawing]]).cpu()
        for i, choices in zip(drawing, sample(logits, [parts[i].draws for i in drawing]), strict=True):
            sampled[i] = choices
    return sampled
