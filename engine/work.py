"""What one drive computes: a description without tensors, which an executor turns into a forward pass, or into time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.counters import Counters
from engine.sampling import Draw, Sampled
from models.costs import Volume


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


class LazyParts(Collection[Part], ABC):
    """Parts that are made when they are asked for; a simulation asks only for their volume."""

    @property
    @abstractmethod
    def volume(self) -> Volume: ...

    def __contains__(self, part: object) -> bool:
        return part in tuple(self)


def volume(parts: Collection[Part]) -> Volume:
    """How much these parts are to compute, and the reading of K and V that it takes."""
    if isinstance(parts, LazyParts):
        return parts.volume
    total = Volume()
    for part in parts:
        total += Volume.of(part.context, len(part.tokens), 1 if part.draws else 0)
    return total


@dataclass(slots=True)
class Carried:
    """What a cohort keeps between the layer groups of its prefill: the hidden state of its rows, [rows, hidden]."""

    hidden: Any = None


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of K and V that are copied before a pass reads or writes them. `handed_over`: tokens of them that come from
    another device; 0 for a block that is copied on this one."""

    copy: Callable[[], None]
    handed_over: int = 0

    def __call__(self) -> None:
        self.copy()


@dataclass(frozen=True, slots=True)
class Work:
    """Decode rows cross all `layers`, prefill rows the layers [first, last).

    A whole prefill has all layers and no decode rows, a decode step no prefill rows, a layered iteration both. Where
    the prefill's layers end before the model's, `carried` takes the hidden state to the cohort's next slice. `before`
    runs first: copies of blocks (hand-over from another device, copy-on-write).

    `steps`: how many decode steps would see the same choices, if run one after the other. An executor may run them in
    one go (the simulated one does), or just the first.
    """

    layers: int
    prefill: tuple[Part, ...] = ()
    decode: Collection[Part] = ()
    first: int = 0
    last: int = 0
    carried: Carried = field(default_factory=Carried)
    before: tuple[Move, ...] = ()
    steps: int = 1

    def snapshot(self) -> Work:
        """The same work with every part made, for another thread: lazy ones read what the loop thread changes."""
        return replace(self, decode=tuple(self.decode))

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
    """What a drive gives back: the draws of each part, in the order of the work; for a decode part, one for each step.

    `first_step`: when the first of several decode steps was done, in seconds on the engine's clock. They are evenly
    spaced, and the last ends with the drive. `counters`: where the executor was asked to count.
    """

    prefill: Sequence[tuple[Sampled, ...]]
    decode: Sequence[tuple[Sampled, ...]]
    first_step: float | None = None
    counters: Counters | None = None

    @property
    def counted(self) -> dict[str, Any]:
        """The counters as data of an event; nothing where nobody counts."""
        return {} if self.counters is None else self.counters.data
