"""The Timeline's moments joined to intervals: what each drive and each request was doing, from when to when.

Traces and plots draw these. Nothing is decided here: an interval begins where an event says so and ends at the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine.timeline import TERMINAL, Event, Kind
from scheduling.request import Request


class Phase(StrEnum):
    """What a request is doing."""

    WAITING = "waiting"
    RUNNING = "running"  # in the cohort that an executor drives
    PARKED = "parked"  # in a cohort that pulled over
    HANDOVER = "hand-over"  # has its first token, not yet admitted by a decode instance
    DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class DriveInterval:
    """One stretch of a drive on its executor, or (parked) one gap between two stretches. Times in seconds."""

    instance: str
    drive: int
    kind: str  # "prefill" | "decode" | "both"
    requests: tuple[int, ...]  # ids, head first
    tokens: int
    part: int  # counts the stretches and gaps of the drive, from 0
    parked: bool
    start: float
    end: float
    until: Kind | None  # the event that ended it; None: still open when the Timeline was closed
    boundary: int | None = None  # gates passed when it parked: at the end of a stretch, at the start of a gap
    operator: str | None = None  # the last operator before that boundary


@dataclass(frozen=True, slots=True)
class RequestInterval:
    request: Request
    phase: Phase
    start: float
    end: float
    until: Kind | None


@dataclass(slots=True)
class _Drive:
    kind: str
    requests: tuple[int, ...]
    tokens: int
    since: float
    part: int = 0
    parked: bool = False
    boundary: int | None = None
    operator: str | None = None


@dataclass(slots=True)
class _Request:
    request: Request
    phase: Phase
    since: float


class Intervals:
    """A Timeline sink. Each interval goes to `on_drive` or `on_request` when it ends; empty ones are left out."""

    def __init__(
        self, on_drive: Callable[[DriveInterval], None], on_request: Callable[[RequestInterval], None]
    ) -> None:
        self._on_drive = on_drive
        self._on_request = on_request
        self._drives: dict[tuple[str, int], _Drive] = {}
        self._requests: dict[int, _Request] = {}
        self._latest = 0.0

    def __call__(self, event: Event) -> None:
        self._latest = max(self._latest, event.time)
        if event.request is not None:
            self._request_event(event, event.request)
        elif event.instance is not None and event.drive is not None:
            self._drive_event(event, event.instance, event.drive)

    def close(self) -> None:
        """End everything still open at the time of the latest event."""
        for (instance, number), drive in self._drives.items():
            self._end_drive(instance, number, drive, self._latest, None)
        for live in self._requests.values():
            self._end_request(live, self._latest, None)
        self._drives.clear()
        self._requests.clear()

    # -- requests

    def _request_event(self, event: Event, request: Request) -> None:
        match event.kind:
            case Kind.ARRIVED:
                self._requests[request.id] = _Request(request, Phase.WAITING, event.time)
            case Kind.FIRST_TOKEN:
                self._enter(request.id, Phase.HANDOVER, event)
            case Kind.DECODING:
                self._enter(request.id, Phase.DECODING, event)
            case Kind.RECOMPUTED:
                self._enter(request.id, Phase.WAITING, event)
            case kind if kind in TERMINAL and request.id in self._requests:
                self._end_request(self._requests.pop(request.id), event.time, kind)

    def _enter(self, request: int, phase: Phase, event: Event) -> None:
        live = self._requests.get(request)
        if live is not None and live.phase is not phase:
            self._end_request(live, event.time, event.kind)
            live.phase, live.since = phase, max(live.since, event.time)

    def _end_request(self, live: _Request, time: float, until: Kind | None) -> None:
        if time > live.since:
            self._on_request(RequestInterval(live.request, live.phase, live.since, time, until))

    # -- drives

    def _drive_event(self, event: Event, instance: str, number: int) -> None:
        key = (instance, number)
        if event.kind is Kind.STARTED:
            data = event.data
            drive = _Drive(data["phase"], tuple(data["requests"]), data["tokens"], event.time)
            self._drives[key] = drive
            self._move(drive, Phase.WAITING, Phase.RUNNING, event)
            return
        drive_or_none = self._drives.get(key)
        if drive_or_none is None:
            return
        drive = drive_or_none
        match event.kind:
            case Kind.PARKED:
                drive.boundary, drive.operator = event.data["boundary"], event.data["operator"]
                self._turn(instance, number, drive, event, parked=True)
                self._move(drive, Phase.RUNNING, Phase.PARKED, event)
            case Kind.RESUMED:
                self._turn(instance, number, drive, event, parked=False)
                drive.boundary = drive.operator = None
                self._move(drive, Phase.PARKED, Phase.RUNNING, event)
            case Kind.COMPLETED | Kind.DRIVE_FAILED | Kind.CLOSED:
                self._end_drive(instance, number, drive, event.time, event.kind)
                del self._drives[key]
                self._move(drive, Phase.RUNNING, Phase.WAITING, event)  # for its next slice, or its first token

    def _move(self, drive: _Drive, source: Phase, target: Phase, event: Event) -> None:
        """Members of the drive's cohort that are in `source` enter `target`; others have left, or are decoding."""
        for request in drive.requests:
            live = self._requests.get(request)
            if live is not None and live.phase is source:
                self._enter(request, target, event)

    def _turn(self, instance: str, number: int, drive: _Drive, event: Event, *, parked: bool) -> None:
        self._end_drive(instance, number, drive, event.time, event.kind)
        drive.part, drive.parked, drive.since = drive.part + 1, parked, max(drive.since, event.time)

    def _end_drive(self, instance: str, number: int, drive: _Drive, time: float, until: Kind | None) -> None:
        if time > drive.since:
            self._on_drive(
                DriveInterval(
                    instance=instance,
                    drive=number,
                    kind=drive.kind,
                    requests=drive.requests,
                    tokens=drive.tokens,
                    part=drive.part,
                    parked=drive.parked,
                    start=drive.since,
                    end=time,
                    until=until,
                    boundary=drive.boundary,
                    operator=drive.operator,
                )
            )
