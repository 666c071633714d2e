"""All times between the tokens of requests, for percentiles over tokens rather than over requests."""

from __future__ import annotations

import numpy as np

from engine.timeline import Event, Kind


class TokenGaps:
    """A Timeline sink. `seconds`: between two tokens of one request, of all requests. For requests of one choice."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._latest: dict[int, float] = {}

    def __call__(self, event: Event) -> None:
        if event.request is None or event.kind not in (Kind.FIRST_TOKEN, Kind.TOKEN, Kind.TOKENS):
            return
        request, last = event.request.id, event.time
        if event.kind is Kind.TOKEN:
            self.seconds.append(last - self._latest[request])
        elif event.kind is Kind.TOKENS:  # stretches of evenly spaced ones (engine/gaps.py)
            times = np.concatenate([np.linspace(first, last, int(n)) for first, last, n in event.data["stretches"]])
            self.seconds += np.diff(times, prepend=self._latest[request]).tolist()
            last = float(times[-1])
        self._latest[request] = last
