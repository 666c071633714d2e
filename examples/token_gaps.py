"""All times between the tokens of requests, for percentiles over tokens rather than over requests."""

from __future__ import annotations

from engine.timeline import Event, Kind


class TokenGaps:
    """A Timeline sink. `seconds`: between two tokens of one request, of all requests, in order of time. For requests of
    one choice, from engines that record every token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._latest: dict[int, float] = {}

    def __call__(self, event: Event) -> None:
        if event.request is None or event.kind not in (Kind.FIRST_TOKEN, Kind.TOKEN):
            return
        if event.kind is Kind.TOKEN:
            self.seconds.append(event.time - self._latest[event.request.id])
        self._latest[event.request.id] = event.time
