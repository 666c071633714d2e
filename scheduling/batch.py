"""With whom? Who crosses the layers together with the head.

A batch policy sees the other waiting requests in priority order and returns the shares of one slice, the head's
first. `free_blocks` is what the KV pool can still give; the head's own need has been checked before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scheduling.plan import Plan, Share, later_extents, next_share
from scheduling.predictor import Load, Predict
from scheduling.ranked import Room
from scheduling.request import Request

Misfit = Literal["skip", "stop"]


def blocks_needed(request: Request, block_size: int) -> int:
    """Blocks a request still has to be given: the whole prompt's at admission, none later. One that is computed again
    begins where there is room for all that it had; else it would have to give it up again at once, and for ever."""
    return 0 if request.admitted else -(-len(request.prompt) // block_size) + request.blocks_beside


@dataclass(slots=True)
class Forming:
    """A slice in the making: what it holds, and whether one more request fits in the pool.

    A policy that skips whatever does not fit sets `room`, so that the queue need not show it thousands of misfits.
    """

    free_blocks: int
    block_size: int
    decode_rows: int = 0  # decodes that will share the pass
    shares: list[Share] = field(default_factory=list)
    tokens: int = 0
    room: Room = field(default_factory=Room)

    def fits(self, request: Request) -> bool:
        return blocks_needed(request, self.block_size) <= self.free_blocks

    def add(self, share: Share) -> None:
        self.shares.append(share)
        self.tokens += share.tokens
        self.free_blocks -= blocks_needed(share.request, self.block_size)


class Batch(Protocol):
    def form(
        self, head: Share, others: Iterable[Request], plan: Plan, predict: Predict, now: float, forming: Forming
    ) -> Sequence[Share]: ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One request at a time."""

    def form(
        self, head: Share, others: Iterable[Request], plan: Plan, predict: Predict, now: float, forming: Forming
    ) -> Sequence[Share]:
        return [head]


@dataclass(frozen=True, slots=True)
class FillBudget:
    """DistServe: whole prompts while their tokens sum to at most `budget`, up to the first that does not fit.

    A longer prompt runs alone. (In DistServe's code it would block the queue for ever.)
    """

    budget: int = 4096

    def __post_init__(self) -> None:
        _check_budget(self.budget)

    def form(
        self, head: Share, others: Iterable[Request], plan: Plan, predict: Predict, now: float, forming: Forming
    ) -> Sequence[Share]:
        forming.add(head)
        for request in others:
            share = next_share(plan, request)
            if forming.tokens + share.tokens > self.budget or not forming.fits(request):
                break
            forming.add(share)
        return forming.shares


@dataclass(frozen=True, slots=True)
class FillChunks:
    """Fill every pass with `budget` tokens, in priority order; the last prompt is cut to what is left, and its rest is
    taken along by the next pass. So A's last chunk is computed beside B's first (Sarathi-Serve, vLLM, DistServe-CP).

    How many prompts are under way at once is a matter of the order. Where none overtakes what has begun (FCFS, or any
    order under `Preempt.NEVER`), at most ceil(budget / chunk) are, as only those of one pass can be. Where a newcomer
    may come first, as many as the KV pool holds: blocks for a whole prompt are given when it begins, so that every one
    of them can be finished.
    """

    budget: int = 2048
    decodes_count: bool = True  # against the budget, where decodes share the pass

    def __post_init__(self) -> None:
        _check_budget(self.budget)

    def form(
        self, head: Share, others: Iterable[Request], plan: Plan, predict: Predict, now: float, forming: Forming
    ) -> Sequence[Share]:
        budget = self.budget - (forming.decode_rows if self.decodes_count else 0)
        forming.add(head.cut(max(1, budget)))
        for request in others:
            left = budget - forming.tokens
            if left < 1 or not forming.fits(request):
                break
            forming.add(next_share(plan, request).cut(left))
        return forming.shares


@dataclass(frozen=True, slots=True)
class FillSequences:
    """Whole prompts, however long, up to `limit` sequences in a pass, its decodes counted (Orca, FasterTransformer)."""

    limit: int = 32

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"the limit of sequences must be at least 1, got {self.limit}")

    def form(
        self, head: Share, others: Iterable[Request], plan: Plan, predict: Predict, now: float, forming: Forming
    ) -> Sequence[Share]:
        forming.add(head)
        for request in others:
            if forming.decode_rows + len(forming.shares) >= self.limit or not forming.fits(request):
                break
            forming.add(next_share(plan, request))
        return forming.shares


@dataclass(frozen=True, slots=True)
class SLOAware:
    """FlowPrefill's Algorithm 1: add requests in priority order while the head still makes its deadline.

    budget           tokens in a slice (paper: about 4K is a good balance; released code: 2,048)
    margin           share of the head's TTFT target kept in reserve (paper: 0; released code: 0.1)
    on_misfit        a request over the budget or the pool: look further, or stop
    on_late          a request that would make the head late: look further (paper), or stop (released code)
    long_head_alone  a head with more tokens left than the budget takes nobody along, even beside a chunk that would
                     leave room (released code)
    """

    budget: int = 4096
    margin: float = 0.0
    on_misfit: Misfit = "skip"
    on_late: Misfit = "skip"
    long_head_alone: bool = False

    def __post_init__(self) -> None:
        _check_budget(self.budget)
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be at least 0 and below 1 of the TTFT target, got {self.margin}")
        for name in ("on_misfit", "on_late"):
            if getattr(self, name) not in ("skip", "stop"):
                raise ValueError(f"{name} must be 'skip' or 'stop', got {getattr(self, name)!r}")

    def form(
        self, head: Share, others: Iterable[Request], plan: Plan, predict: Predict, now: float, forming: Forming
    ) -> Sequence[Share]:
        forming.add(head)
        if self.long_head_alone and head.request.remaining > self.budget:
            return forming.shares
        # The head's later chunks have to be in time too.
        later = sum(predict([extent]) for extent in later_extents(plan, head.request, head.stop))
        time_left = head.request.deadline - now - later - self.margin * (head.request.slo.ttft or 0.0)
        load = Load().plus(head.extent)
        self._narrow(forming)
        for request in others:
            share = next_share(plan, request)
            if forming.tokens + share.tokens > self.budget or not forming.fits(request):
                if self.on_misfit == "stop":
                    break
                continue
            with_share = load.plus(share.extent)
            if predict.seconds(with_share) > time_left:
                if self.on_late == "stop":
                    break
                if self.on_misfit == "skip":
                    forming.room.tokens = _longest_in_time(load, time_left, predict, self.budget - forming.tokens)
                continue
            forming.add(share)
            load = with_share
            self._narrow(forming)
        return forming.shares

    def _narrow(self, forming: Forming) -> None:
        """What would be skipped in any case need not be shown."""
        if self.on_misfit == "skip":
            forming.room.tokens = min(forming.room.tokens, self.budget - forming.tokens)
            forming.room.blocks = forming.free_blocks


def _longest_in_time(load: Load, seconds: float, predict: Predict, at_most: int) -> int:
    """Tokens, up to `at_most`, of the longest prompt that can join `load` in a pass of so many seconds.

    A share of as many tokens after others that are in the cache takes no less time, so a longer one never fits either.
    """
    return bisect_right(range(1, at_most + 1), seconds, key=lambda tokens: predict.seconds(load.plus((0, tokens))))


def _check_budget(budget: int) -> None:
    if budget < 1:
        raise ValueError(f"token budget must be at least 1, got {budget}")
