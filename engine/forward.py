"""The two forward passes that executors drive. Everything they need is in their arguments: a snapshot.

They run on an executor's thread. No `with`, no `finally`, no lock may stand around an `await` of the gate: the
coroutine can be suspended there, and resumed or dropped later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.gate import Gate
from engine.sampling import Draw, Sampled, sample
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

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of one layer's operators, in the order in which its gates report them."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor: ...

    async def run_layers(self, x: torch.Tensor, first: int, last: int, batch: Batch, gate: Gate) -> torch.Tensor: ...

    def head(self, x: torch.Tensor) -> torch.Tensor: ...


async def forward(
    model: LanguageModel,
    batch: Batch,
    gate: Gate,
    rows: Sequence[int],
    draws: Sequence[Draw],
    before: Sequence[Callable[[], None]] = (),
) -> list[Sampled]:
    """All layers over `batch`, then one token for each of `draws`, whose rows count within `rows`.

    `rows` are the batch rows whose logits are needed: the last of each prompt that is complete, every one of a decode
    step. `before` runs first: copies of blocks (hand-over from another device, copy-on-write).
    """
    for copy in before:
        copy()
    x = model.embed(batch.tokens)
    x = await model.run_layers(x, 0, model.config.num_layers, batch, gate)
    sampled = sample(model.head(x[torch.tensor(rows, device=x.device)]).cpu(), draws) if rows else []
    gate.drain()
    return sampled
