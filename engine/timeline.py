"""The life-cycle events of every request and drive, recorded once and streamed to sinks.

Metrics, traces, plots and tests all read this stream; nothing else keeps a second account of what happened.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from scheduling.request import Request


class Kind(StrEnum):
    """What happened. Request events carry `request`; drive events carry `instance` and `drive`."""

    # A request's life, in order.
    ARRIVED = "arrived"
    FIRST_TOKEN = "first_token"
    HANDOVER_WAIT = "handover_wait"  # prefilled, no decode instance has room yet
    DECODING = "decoding"  # admitted by a decode instance
    TOKEN = "token"  # data: index (which of n choices); the first token is a FIRST_TOKEN event only
    RECOMPUTED = "recomputed"  # its blocks were given up to an older request; its prefill starts over
    # All later tokens of a choice in one go, from a simulated decode instance; data: index, count,
    # stretches (engine/gaps.py).
    TOKENS = "tokens"
    FINISHED = "finished"  # terminal; data: reason "stop" | "length"
    ABORTED = "aborted"  # terminal
    FAILED = "failed"  # terminal; data: error
    REFUSED = "refused"  # terminal; data: error

    # One drive of an executor: one forward pass (a prefill slice or a decode step).
    # data: phase "prefill" | "decode" | "both"; requests (ids: those that prefill, head first, then those that decode);
    # rows (of each that prefills); tokens
    STARTED = "started"
    PARK_REQUESTED = "park_requested"
    PARKED = "parked"  # data: boundary (gates passed), operator (the last one)
    RESUMED = "resumed"
    COMPLETED = "completed"  # data: what was counted, if the engine was asked to count (engine/counters.py)
    DRIVE_FAILED = "drive_failed"  # data: error
    CLOSED = "closed"  # a parked drive whose requests have all gone


TERMINAL = frozenset({Kind.FINISHED, Kind.ABORTED, Kind.FAILED, Kind.REFUSED})


class Event(NamedTuple):
    time: float  # seconds on the engine's clock
    kind: Kind
    request: Request | None
    instance: str | None
    drive: int | None
    data: dict[str, Any]


Sink = Callable[[Event], None]


class Timeline:
    """Stamps events with the engine's clock and hands each to every sink, in order, on the loop thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._sinks: list[Sink] = []

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def remove(self, sink: Sink) -> None:
        self._sinks.remove(sink)

    def record(
        self,
        kind: Kind,
        *,
        request: Request | None = None,
        instance: str | None = None,
        drive: int | None = None,
        time: float | None = None,
        **data: Any,
    ) -> None:
        """Record one event, at `time` where the caller measured it on another thread, else now."""
        event = Event(self._now() if time is None else time, kind, request, instance, drive, data)
        for sink in self._sinks:
            sink(event)
