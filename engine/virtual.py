"""An event loop on which time costs nothing: when nothing is ready, it jumps to the next timer's exact moment.
(Timers within asyncio's resolution, a nanosecond, fire together, in order.)

There are no threads on it. What would hand work to one, or take a reply from one, raises: such a run could not be
repeated byte for byte.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any, NoReturn


class Stalled(RuntimeError):
    """Nothing is ready and no timer is set: the event being waited for can never come."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also a `Clock`: `now()` is the virtual time, which starts at 0."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def now(self) -> float:
        return self._now

    def jump(self) -> None:
        """Move to the next timer. Reads the base loop's timer heap, since `select` is told a rounded difference."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._now = max(self._now, timers[0].when())

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("there are no threads in virtual time: run_in_executor is not available")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("there are no threads in virtual time: call_soon_threadsafe is not available")


class _JumpingSelector(selectors.BaseSelector):
    """Watches nothing. Asked to wait, it makes the loop jump instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("virtual time stands still: nothing is ready and no timer is set")
        if timeout > 0:
            self._loop.jump()
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, -1, events, data)  # the loop's own wake-up pipe, of no use here

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, -1, 0, None)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}
