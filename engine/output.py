"""What a client of the engine receives, and the engine's own side of a request: its choices and its outputs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from engine.sampling import Draw
from kv.table import BlockTable
from scheduling.request import Request

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Output:
    """One token of one choice, or the end of one choice, or both. `token` is None where only the end is told."""

    index: int
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None


@dataclass(eq=False, slots=True)
class Choice:
    """One of the n continuations of a request: its tokens so far, and the blocks that hold its K and V.

    `cached`: tokens of prompt and output whose K and V are in the cache. The next decode step computes the others: the
    last token, or all of them after the blocks had to be given up and the prompt was computed once more.
    """

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    token_at: float = 0.0  # when it got its last token, in seconds on the engine's clock
    table: BlockTable | None = None
    finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def pending(self) -> list[int]:
        """Tokens that the next decode step computes; from the last one's logits the next token is drawn."""
        return self.tokens[self.cached - len(self.request.prompt) :]

    @property
    def held(self) -> BlockTable:
        """Its block table. Only for choices that a decode instance has taken over."""
        assert self.table is not None
        return self.table

    @property
    def next_draw(self) -> Draw:
        return Draw(self.request.sampling, self.request.seed, self.index, self.length)

    def free(self) -> None:
        self.held.free()


@dataclass(eq=False, repr=False, slots=True)
class LiveRequest(Request):
    """A request as the engine keeps it. `outputs` ends with None, or with the exception that ended the request;
    there are none where nobody will read them."""

    choices: list[Choice] = field(default_factory=list)
    outputs: asyncio.Queue[Output | Exception | None] | None = None

    def tell(self, output: Output | Exception | None) -> None:
        if self.outputs is not None:
            self.outputs.put_nowait(output)
