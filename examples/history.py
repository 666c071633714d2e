"""A Timeline sink that keeps everything, for drawing a short run. Memory grows with the run: not for serving."""

from __future__ import annotations

from engine.intervals import DriveInterval, Intervals, RequestInterval
from engine.timeline import Event, Kind
from scheduling.request import Request


class History:
    """`drives` and `phases` in order of their ends; `requests`, and the moments of their `first_tokens`, by id."""

    def __init__(self) -> None:
        self.drives: list[DriveInterval] = []
        self.phases: list[RequestInterval] = []
        self.requests: dict[int, Request] = {}
        self.first_tokens: dict[int, float] = {}
        self._intervals = Intervals(self.drives.append, self.phases.append)

    def __call__(self, event: Event) -> None:
        self._intervals(event)
        if event.request is not None:
            if event.kind is Kind.ARRIVED:
                self.requests[event.request.id] = event.request
            elif event.kind is Kind.FIRST_TOKEN:
                self.first_tokens[event.request.id] = event.time
