"""A Timeline sink that keeps everything, for drawing a short run. Memory grows with the run: not for serving."""

from __future__ import annotations

from dataclasses import replace

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
        self._intervals = Intervals(self.drives.append, self._on_phase)

    def __call__(self, event: Event) -> None:
        request = event.request
        if request is not None and event.kind is Kind.ARRIVED:
            # A copy: through the engine's own request, a history would keep the engine's KV cache alive.
            self.requests[request.id] = Request(
                request.id, request.prompt, slo=request.slo, arrival=request.arrival, label=request.label
            )
        elif request is not None and event.kind is Kind.FIRST_TOKEN:
            self.first_tokens[request.id] = event.time
        self._intervals(event)

    def _on_phase(self, interval: RequestInterval) -> None:
        self.phases.append(replace(interval, request=self.requests[interval.request.id]))
