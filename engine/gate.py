"""The gate: what a forward pass awaits after each operator, and where it can be asked to pull over.

    out = attention(q, k, v)
    await gate.operator("attention")

Nobody asked the drive to park: the await returns at once, after one attribute read; no lock, no event loop. Somebody
did: the coroutine suspends right there, and its frame, with every activation in it, is the saved state (FlowPrefill,
section on operator-level preemption; here without a blocked thread).
"""

from __future__ import annotations

from collections.abc import Generator
from enum import IntEnum


class Preempt(IntEnum):
    """Where a gate may stop, from coarse to fine. Each level stops wherever the coarser ones do."""

    NEVER = 0
    SLICE = 1  # between slices; nothing inside a forward pass
    LAYER = 2
    HALF_LAYER = 3  # after attention's output projection and after the MLP
    OPERATOR = 4


# The last operator of a layer, of each family of MLP; and the last operator of the attention half.
_LAYER_ENDS = frozenset({"down_proj", "combine"})
_HALF_LAYER_ENDS = _LAYER_ENDS | {"o_proj"}


class Gate:
    """One per drive. The loop thread sets `park_requested`; the executor thread reads it at every boundary.

    `passed` counts the boundaries reached since the drive began, `last` names the operator just finished. Both are
    written by the executor thread and may be read by any other: they are a progress bar, not a lock.
    """

    __slots__ = ("last", "level", "park_requested", "passed")

    def __init__(self, level: Preempt = Preempt.OPERATOR) -> None:
        self.level = level
        self.park_requested = False
        self.passed = 0
        self.last = ""

    def operator(self, name: str) -> Gate:
        """Report that operator `name` is done. Await the result: `await gate.operator("o_proj")`."""
        self.passed += 1
        self.last = name
        return self

    def __await__(self) -> Generator[None]:
        if self.park_requested and self.may_stop():
            yield

    def may_stop(self) -> bool:
        """Whether the level lets the drive stop at the boundary it has just reached."""
        if self.level == Preempt.OPERATOR:
            return True
        if self.level == Preempt.HALF_LAYER:
            return self.last in _HALF_LAYER_ENDS
        return self.level == Preempt.LAYER and self.last in _LAYER_ENDS
