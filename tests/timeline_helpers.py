"""A hand-written stretch of time in which a long prefill pulls over for a short one, for tests of what people see."""

from __future__ import annotations

from engine.timeline import Kind, Sink, Timeline
from scheduling.request import SLO, Request, Sampling


class Recorder:
    """A Timeline whose clock the test sets."""

    def __init__(self, *sinks: Sink) -> None:
        self.time = 0.0
        self.timeline = Timeline(lambda: self.time)
        for sink in sinks:
            self.timeline.add(sink)

    def at(self, time: float, kind: Kind, request: Request | None = None, drive: int | None = None, **data: object):
        self.time = time
        instance = None if drive is None else "decode0" if drive >= 100 else "prefill0"
        self.timeline.record(kind, request=request, instance=instance, drive=drive, **data)


def make(number: int, label: str, tokens: int, arrival: float, *, n: int = 1, **slo: float) -> Request:
    return Request(number, [0] * tokens, sampling=Sampling(n=n), slo=SLO(**slo), arrival=arrival, label=label)


def pull_over(recorder: Recorder) -> tuple[Request, Request]:
    """A search prompt runs from 1.0; a text arrives at 2.0, runs from 2.25 to 2.75 and decodes; the search resumes."""
    search = make(0, "search", 4000, 1.0, ttft=5.0, tbt=0.5)
    text = make(1, "text", 100, 2.0, ttft=1.0, tbt=0.5)
    at = recorder.at
    at(1.0, Kind.ARRIVED, search)
    at(1.0, Kind.STARTED, drive=0, phase="prefill", requests=[0], tokens=4000)
    at(2.0, Kind.ARRIVED, text)
    at(2.0, Kind.PARK_REQUESTED, drive=0)
    at(2.25, Kind.PARKED, drive=0, boundary=42, operator="attention")
    at(2.25, Kind.STARTED, drive=1, phase="prefill", requests=[1], tokens=100)
    at(2.75, Kind.COMPLETED, drive=1)
    at(2.75, Kind.FIRST_TOKEN, text)
    at(2.75, Kind.RESUMED, drive=0)
    at(3.0, Kind.DECODING, text)
    at(3.0, Kind.STARTED, drive=100, phase="decode", requests=[1], tokens=1)
    at(3.25, Kind.COMPLETED, drive=100)
    at(3.25, Kind.TOKEN, text, index=0)
    at(3.25, Kind.FINISHED, text, reason="length")
    at(6.5, Kind.COMPLETED, drive=0)
    at(6.5, Kind.FIRST_TOKEN, search)
    at(6.5, Kind.HANDOVER_WAIT, search)
    at(7.0, Kind.DECODING, search)
    at(7.25, Kind.TOKEN, search, index=0)
    at(7.25, Kind.FINISHED, search, reason="stop")
    return search, text
