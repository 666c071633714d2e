"""An event loop on which time costs nothing: when nothing is ready, it jumps to the next timer's exact moment.

There are no threads on it. What would hand work to one, or take a reply from one, raises: such a run could not be
repeated byte for byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from heapq import heappop
from typing import Any, NoReturn


class Stalled(RuntimeError):
    """Nothing is ready and no timer is set: the event being waited for can never come."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Also a `Clock`: `now()` is the virtual time, which starts at 0.

    asyncio's own loop but for one turn of it, which has no file or socket to wait for.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]  # a heap
    _stopping: bool

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now

    def now(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, the timers of the next moment."""
        ready, scheduled = self._ready, self._scheduled
        if not ready and not self._stopping:
            while scheduled and scheduled[0].cancelled():
                heappop(scheduled)
            if not scheduled:
                raise Stalled("virtual time stands still: nothing is ready and no timer is set")
            self._now = max(self._now, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now:
            ready.append(heappop(scheduled))
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time has come."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("there are no threads in virtual time: run_in_executor is not available")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("there are no threads in virtual time: call_soon_threadsafe is not available")
