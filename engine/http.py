"""What generation over HTTP needs beyond Starlette and uvicorn: to notice who leaves, event streams, a drain."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.generation import Generation

Result = TypeVar("Result")

TELL_SECONDS = 2.0  # for clients to take in that their call was ended by the server


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, but cancel it and raise ClientDisconnect as soon as the client has left. The body must be read.

    Whichever way it ends, the work has come to its end, its clean-up included, when this returns.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. `on_end` is called once, however it ends: sent to the last byte, or the client has left."""

    def __init__(self, events: AsyncIterator[dict[str, Any] | str], on_end: Callable[[], None]) -> None:
        """An event is an object, sent as JSON, or a text, sent as it is."""
        super().__init__(
            (_as_data(event) async for event in events),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await unless_gone(receive, self.stream_response(send))
        finally:
            self._on_end()


def _as_data(event: dict[str, Any] | str) -> str:
    text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n"


class Calls:
    """The calls that are under way, and whether new ones are taken."""

    def __init__(self) -> None:
        self.draining = False
        self._preparing = 0
        self._running: dict[Generation, None] = {}  # a set that keeps its order

    @property
    def idle(self) -> bool:
        return not self._running and not self._preparing

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around what comes before `begin`: a call whose prompt is being tokenised is under way, too."""
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    def begin(self, generation: Generation) -> None:
        self._running[generation] = None

    def end(self, generation: Generation) -> None:
        """What has not finished is aborted."""
        generation.close()
        self._running.pop(generation, None)

    def abort_all(self) -> None:
        """Each client is told; each call then ends as it does on any error."""
        for generation in self._running:
            generation.close()


class DrainingServer(uvicorn.Server):
    """uvicorn with a drain. The first SIGTERM or SIGINT: new calls are refused, and those under way have
    `drain_seconds` to finish. The second: they end at once."""

    def __init__(self, app: ASGIApp, calls: Calls, drain_seconds: float) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,  # for clients that do not fetch their last bytes
        )
        super().__init__(config)
        self._calls = calls
        self._drain_seconds = drain_seconds
        self._give_up = 0.0  # when calls under way are ended; time.monotonic()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._give_up = time.monotonic() + (0.0 if self._calls.draining else self._drain_seconds)
        self._calls.draining = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second, and ends the server when it is true."""
        if self._calls.draining:
            overdue = time.monotonic() - self._give_up
            if overdue >= 0:
                self._calls.abort_all()
            # Who reads nothing cannot be told that it is over; after a while the connection is cut all the same.
            self.should_exit = self.should_exit or self._calls.idle or overdue >= TELL_SECONDS
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """Take the port without listening yet: better to fail now than after the model has been loaded. ValueError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error}") from error
    return listener


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
