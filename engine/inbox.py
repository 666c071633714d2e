"""An instance's one task: take in all events that have come, then act once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from engine.clock import Clock

Event = TypeVar("Event")


class Inbox(Generic[Event]):
    """What the instances share. A subclass says what an event changes (`handle`) and what follows from it (`act`)."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    @property
    def quiet(self) -> bool:
        """Whether all events have been handled."""
        return self._events.empty()

    async def run(self, clock: Clock) -> None:
        """For ever. There is no timer and no polling: nothing happens without an event."""
        while True:
            self.handle(await self._events.get())
            while not self._events.empty():
                self.handle(self._events.get_nowait())
            self.act(clock.now())

    def handle(self, event: Event) -> None:
        raise NotImplementedError

    def act(self, now: float) -> None:
        raise NotImplementedError
