"""The gate: what a forward pass awaits after each operator, and where it can be asked to pull over.

    out = attention(q, k, v)
    await gate.operator("attention")

Nobody asked the drive to park: the await returns at once, after one attribute read; no lock, no event loop. Somebody
did: the coroutine suspends right there, and its frame, with every activation in it, is the saved state. This is
FlowPrefill's operator-level preemption without a blocked thread behind each suspended prefill.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from scheduling.preempt import Preempt


class Gate:
    """One per drive. The loop thread sets `park_requested`; the executor thread reads it at every boundary.

    `passed` counts the boundaries reached since the drive began, `last` names the operator just finished. Both are
    written by the executor thread and may be read by any other: they are a progress bar, not a lock.

    `routed`: None, or a list to which every mixture of experts of the pass appends the ends of its groups of rows,
    int32 [experts], from which the experts that it used can be counted (engine/counters.py).
    """

    __slots__ = ("last", "level", "park_requested", "passed", "routed")

    def __init__(self, level: Preempt = Preempt.OPERATOR) -> None:
        self.level = level
        self.park_requested = False
        self.passed = 0
        self.last = ""
        self.routed: list[torch.Tensor] | None = None

    def operator(self, name: str) -> Gate:
        """Report that operator `name` is done. Await what comes back: `await gate.operator("o_proj")`."""
        self.passed += 1
        self.last = name
        return self

    def __await__(self) -> Generator[None]:
        if self.park_requested and self.level.stops_at(self.last):
            yield

    def drain(self) -> None:
        """Wait until the device has done everything this drive queued. Nothing to wait for on a CPU."""
