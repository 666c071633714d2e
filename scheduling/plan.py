"""Cut how? A plan cuts a prefill into slices.

A slice is one rectangle of work: token ranges of some requests times a range of layers. One drive runs one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from scheduling.predictor import Extent
from scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a cohort: prompt tokens [start, stop)."""

    request: Request
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """Whether the prompt is complete after this share, so that its first token can be sampled."""
        return self.stop == len(self.request.prompt)

    @property
    def extent(self) -> Extent:
        return self.start, self.tokens

    def cut(self, tokens: int) -> Share:
        """The share, or the first `tokens` of it."""
        return self if self.tokens <= tokens else Share(self.request, self.start, self.start + tokens)


Group = tuple[int, int]  # the layers [first, last)


class Plan(Protocol):
    @property
    def largest_share(self) -> float:
        """Tokens of the largest share it makes; infinite where every prompt stays whole."""
        ...

    def take(self, request: Request) -> int:
        """How many of the request's remaining prompt tokens its next pass through the layers computes; at least 1."""
        ...

    def groups(self, tokens: int, num_layers: int) -> Sequence[Group]:
        """The layer groups in which a cohort of `tokens` tokens crosses the model, one slice each."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Every prompt in one slice."""

    @property
    def largest_share(self) -> float:
        return inf

    def take(self, request: Request) -> int:
        return request.remaining

    def groups(self, tokens: int, num_layers: int) -> Sequence[Group]:
        return ((0, num_layers),)


@dataclass(frozen=True, slots=True)
class Chunked:
    """Along tokens: prompts longer than `above` in chunks of `size`; shorter ones whole."""

    size: int
    above: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"chunk size must be at least 1 token, got {self.size}")
        if self.above < 0:
            raise ValueError(f"chunked.above must be 0 tokens or more, got {self.above}")

    @property
    def largest_share(self) -> float:
        return max(self.size, self.above)

    def take(self, request: Request) -> int:
        return min(self.size, request.remaining) if len(request.prompt) > self.above else request.remaining

    def groups(self, tokens: int, num_layers: int) -> Sequence[Group]:
        return ((0, num_layers),)


def next_share(plan: Plan, request: Request) -> Share:
    return Share(request, request.computed, request.computed + plan.take(request))


def later_extents(plan: Plan, request: Request, computed: int) -> list[Extent]:
    """What remains once `computed` tokens of the prompt are in the cache, one extent for each pass still to come."""
    probe = Request(request.id, request.prompt, request.sampling, request.slo, computed=computed)
    extents: list[Extent] = []
    while probe.remaining:
        tokens = plan.take(probe)
        extents.append((probe.computed, tokens))
        probe.computed += tokens
    return extents
