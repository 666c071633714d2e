"""Cut how? A plan says which slice of a request's prefill comes next.

A slice is one rectangle of work: token ranges of some requests times a range of layers. One drive runs one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduling.predictor import Part
from scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a slice: prompt tokens [start, stop)."""

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
    def part(self) -> Part:
        return self.start, self.tokens


@dataclass(frozen=True, slots=True)
class Slice:
    """The shares of one forward pass, the head's first. All layers: layer groups come with Layered Prefill."""

    shares: tuple[Share, ...]

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.shares)

    @property
    def parts(self) -> list[Part]:
        return [share.part for share in self.shares]


class Plan(Protocol):
    def take(self, request: Request) -> int:
        """How many of the request's remaining prompt tokens its next slice computes; at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Every prompt in one slice."""

    def take(self, request: Request) -> int:
        return request.remaining


@dataclass(frozen=True, slots=True)
class Chunked:
    """Prompts longer than `above` tokens in chunks of `size`; shorter ones whole."""

    size: int
    above: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"chunk size must be at least 1 token, got {self.size}")
        if self.above < 0:
            raise ValueError(f"chunked.above must be 0 tokens or more, got {self.above}")

    def take(self, request: Request) -> int:
        return min(self.size, request.remaining) if len(request.prompt) > self.above else request.remaining


def next_share(plan: Plan, request: Request) -> Share:
    return Share(request, request.computed, request.computed + plan.take(request))


def later_parts(plan: Plan, request: Request, computed: int) -> list[Part]:
    """The parts that remain once `computed` tokens of the prompt are in the cache, one for each slice still to come."""
    probe = Request(request.id, request.prompt, computed=computed)
    parts: list[Part] = []
    while probe.remaining:
        tokens = plan.take(probe)
        parts.append((probe.computed, tokens))
        probe.computed += tokens
    return parts
