"""An instance's one task: take in all events that have come, then act once."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from engine.clock import Clock

Event = TypeVar("Event")


class Left:
    """A request was ended from outside, and what was held for it is let go of already: reason for a new decision."""


class Inbox(Generic[Event]):
    """What the instances share. A subclass says what an event changes (`handle`) and what follows from it (`act`)."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._posted = asyncio.Event()

    def post(self, event: Event) -> None:
        self._events.append(event)
        self._posted.set()

    @property
    def quiet(self) -> bool:
        """Whether all events have been handled."""
        return not self._events

    async def run(self, clock: Clock) -> None:
        """For ever. There is no timer and no polling: nothing happens without an event."""
        while True:
            await self._posted.wait()
            while self._events:
                self.handle(self._events.popleft())
            self._posted.clear()
            self.act(clock.now())

    def handle(self, event: Event) -> None:
        raise NotImplementedError

    def act(self, now: float) -> None:
        raise NotImplementedError
