"""Decodes that a simulation takes many steps further in one go.

A convoy goes on step after step until the first of its choices has all its tokens, or somebody comes or leaves; each
such stretch is one drive. The books follow the comers and leavers, not choices times steps: a choice is told of its
tokens when it has the last of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from engine.decode import Decodes, Step
from engine.gaps import Stretches
from engine.output import Choice
from engine.work import Computed, Repeated
from kv.cache import KVCache
from kv.pool import Quota
from models.costs import Volume


class _Joined(NamedTuple):
    """How far the convoy had come when a choice joined it, in steps and in numbers of its `_stretches`; and the
    choice's tokens then, prompt and output."""

    steps: int
    numbers: int
    length: int


class Convoy(Decodes):
    """`on_tokens(choice, count, stretches)` takes all tokens of a choice but its first, and finishes it.

    Simulated tokens end nothing before `max_tokens`, their forward passes do not fail, and their blocks are reserved.
    """

    def __init__(self, cache: KVCache, quota: Quota, max_batch: int) -> None:
        super().__init__(cache, quota, max_batch)
        self.on_tokens: Callable[[Choice, int, Stretches], None]
        self._members: dict[Choice, _Joined] = {}  # the first `max_batch` of the choices, in order of joining
        self._ends: list[tuple[int, int, Choice]] = []  # heap of (steps by then, a tie-breaker, who); some have left
        self._steps = 0  # done so far
        self._stretches = array("d")  # three numbers each, as in engine/gaps.py
        self._forgotten = 0  # numbers dropped from the front: stretches that no member has been through
        self._length = 0  # tokens of all members

    def next_step(self) -> Step | None:
        copies, self._copies = self._copies, []
        for choice in self._choices[len(self._members) : self._max_batch]:
            self._join(choice)
            copies += self._copy_on_write(choice)
        if not self._members:
            return None
        while self._ends[0][2] not in self._members:
            heappop(self._ends)
        rows = len(self._members)
        volume = Volume(rows, pairs=self._length, keys=self._length, sequences=rows, drawn=rows)
        repeated = Repeated(volume, self._ends[0][0] - self._steps)
        self._stepping = Step(self._choices[:rows], copies, repeated=repeated)
        return self._stepping

    def finish_step(self, step: Step, computed: Computed, time: float) -> None:
        stretch = computed.stretch
        assert stretch is not None
        self._end_step()
        for copy in step.copies:
            copy.lease.release()
        self._steps += stretch.steps
        self._length += stretch.steps * len(self._members)
        self._stretches.extend(stretch)
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, choice = heappop(self._ends)
            if choice in self._members:
                self._finish(choice, time)
        self._forget()

    def _join(self, choice: Choice) -> None:
        numbers = self._forgotten + len(self._stretches)
        self._members[choice] = _Joined(self._steps, numbers, choice.length)
        self._length += choice.length
        end = self._steps + choice.request.sampling.max_tokens - len(choice.tokens)
        heappush(self._ends, (end, choice.request.id * choice.request.sampling.n + choice.index, choice))

    def _finish(self, choice: Choice, time: float) -> None:
        joined = self._members[choice]
        count = self._steps - joined.steps
        choice.cached = joined.length + count - 1  # all but the last token
        choice.token_at = time
        stretches = np.array(self._stretches[joined.numbers - self._forgotten :])
        self.on_tokens(choice, count, stretches.reshape(-1, 3))
        self._remove(choice)

    def _remove(self, choice: Choice) -> None:
        joined = self._members.pop(choice, None)
        if joined is not None:
            self._length -= joined.length + self._steps - joined.steps
        super()._remove(choice)

    def _forget(self) -> None:
        """Drop the stretches before the oldest member's time, once they are more than those that are needed."""
        now = self._forgotten + len(self._stretches)
        oldest = next(iter(self._members.values())).numbers if self._members else now
        if oldest - self._forgotten > now - oldest:
            del self._stretches[: oldest - self._forgotten]
            self._forgotten = oldest
