"""What one drive computes: a description without tensors, which an executor turns into a forward pass, or into time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.sampling import Draw, Sampled


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows: `tokens`, after `context` tokens that are in the cache already.

    `blocks` is a snapshot of its block table. `draws` are the tokens to choose from the logits of its last row: one for
    each choice; none where no logits are needed.
    """

    tokens: Sequence[int]
    context: int
    blocks: tuple[int, ...]
    draws: tuple[Draw, ...] = ()


@dataclass(slots=True)
class Carried:
    """What a cohort keeps between the layer groups of its prefill: the hidden state of its rows, [rows, hidden]."""

    hidden: Any = None


@dataclass(frozen=True, slots=True)
class Work:
    """Decode rows cross all `layers`, prefill rows the layers [first, last).

    A whole prefill has all layers and no decode rows, a decode step no prefill rows, a layered iteration both. Where
    the prefill's layers end before the model's, `carried` takes the hidden state to the cohort's next slice. `before`
    runs first: copies of blocks (hand-over from another device, copy-on-write).
    """

    layers: int
    prefill: tuple[Part, ...] = ()
    decode: tuple[Part, ...] = ()
    first: int = 0
    last: int = 0
    carried: Carried = field(default_factory=Carried)
    before: tuple[Callable[[], None], ...] = ()

    @property
    def rows(self) -> int:
        return sum(len(part.tokens) for part in (*self.prefill, *self.decode))

    def rows_in(self, layer: int) -> int:
        """Rows that cross this layer."""
        parts = [*self.decode, *(self.prefill if self.first <= layer < self.last else ())]
        return sum(len(part.tokens) for part in parts)

    @property
    def first_crossed(self) -> int:
        """The layer with which the pass begins."""
        return 0 if self.decode else self.first

    @property
    def layers_crossed(self) -> int:
        """Layers that the pass runs one after the other, each with its gates."""
        return self.layers if self.decode else self.last - self.first


@dataclass(frozen=True, slots=True)
class Computed:
    """What a drive gives back: the draws of each part, in the order of the work."""

    prefill: tuple[tuple[Sampled, ...], ...]
    decode: tuple[tuple[Sampled, ...], ...]
