"""What one drive computes: a description without tensors, which an executor turns into a forward pass, or into time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


def volume(parts: Sequence[Part]) -> Volume:
    """How much these parts are to compute, and the reading of K and V that it takes."""
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
class Repeated:
    """Up to `steps` decode steps one after the other, of which only the size is told: `volume` is the first one's, and
    each sequence grows by one token a step."""

    volume: Volume
    steps: int


class Stretch(NamedTuple):
    """`steps` decode steps, evenly spaced: when the first and when the last was done, on the engine's clock."""

    first: float
    last: float
    steps: int


@dataclass(frozen=True, slots=True)
class Work:
    """Decode rows cross all `layers`, prefill rows the layers [first, last).

    A whole prefill has all layers and no decode rows, a decode step no prefill rows, a layered iteration both. Where
    the prefill's layers end before the model's, `carried` takes the hidden state to the cohort's next slice. `before`
    runs first: copies of blocks (hand-over from another device, copy-on-write).

    In a simulation `repeated` may stand in place of decode parts.
    """

    layers: int
    prefill: tuple[Part, ...] = ()
    decode: tuple[Part, ...] = ()
    repeated: Repeated | None = None
    first: int = 0
    last: int = 0
    carried: Carried = field(default_factory=Carried)
    before: tuple[Move, ...] = ()

    @property
    def decoded(self) -> Volume:
        """Of the decode rows, in the first step if there are several."""
        return volume(self.decode) if self.repeated is None else self.repeated.volume

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
        return self.layers if self.decode or self.repeated else self.last - self.first


@dataclass(frozen=True, slots=True)
class Computed:
    """What a drive gives back: the draws of each part, in the order of the work, or the repeated steps that were done.
    `counters`: where the executor was asked to count."""

    prefill: tuple[tuple[Sampled, ...], ...]
    decode: tuple[tuple[Sampled, ...], ...]
    stretch: Stretch | None = None
    counters: Counters | None = None

    @property
    def counted(self) -> dict[str, Any]:
        """The counters as data of an event; nothing where nobody counts."""
        return {} if self.counters is None else self.counters.data
