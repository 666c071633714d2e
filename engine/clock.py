"""The one source of time. Live it is the performance counter; in virtual time it is whatever the loop says."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment; never goes back; callable from any thread."""
        ...


class LiveClock:
    """`perf_counter`, and not the event loop's own time, which counts whole milliseconds under uvloop."""

    def now(self) -> float:
        return time.perf_counter()
