"""A scripted engine, and the real HTTP server before it on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import uvicorn
from text_helpers import EOS

from engine.errors import EngineStopped, Refused, RequestFailed
from engine.output import LiveRequest, Output
from engine.timeline import Kind, Timeline
from scheduling.request import SLO, Sampling
from server import Service, create_app


class FakeEngine:
    """Says `script` in answer to everything, a byte a token; what a test wants to know is in `submitted`, `aborted` and
    `stopped`."""

    max_model_len = 100
    error: str | None = None

    def __init__(self) -> None:
        self.timeline = Timeline(time.perf_counter)
        prefills, quota = SimpleNamespace(late_signals=2), SimpleNamespace(used=3, limit=50)
        self.prefill = [SimpleNamespace(name="prefill-0", prefills=prefills, quota=quota)]
        self.decode = [SimpleNamespace(name="decode-0", quota=SimpleNamespace(used=0, limit=70))]
        self.instances = [*self.prefill, *self.decode]
        self.accepting = True
        self._ids = count()  # never used twice: an earlier call's late end must not abort a later request
        self.reset()

    def reset(self) -> None:
        self.script = b"Hello"
        self.fail_after: int | None = None  # tokens; then the forward pass raises
        self.hang_after: int | None = None  # tokens; then nothing comes, until the request is aborted
        self.submitted: list[LiveRequest] = []
        self.aborted: list[int] = []  # request ids
        self.stopped: list[tuple[int, int]] = []  # (request id, choice)

    def submit(
        self, prompt: list[int], *, sampling: Sampling | None = None, slo: SLO | None = None, label: str = ""
    ) -> LiveRequest:
        if not self.accepting:
            raise EngineStopped("the engine is not running")
        if len(prompt) >= self.max_model_len:
            raise Refused(f"the prompt has {len(prompt)} tokens, and the context has {self.max_model_len}")
        request = LiveRequest(next(self._ids), prompt, sampling or Sampling(), slo or SLO(), label=label)
        self.submitted.append(request)
        self.timeline.record(Kind.ARRIVED, request=request)
        return request

    async def stream(self, request: LiveRequest) -> AsyncIterator[Output]:
        sampling = request.sampling
        tokens = [*self.script, EOS][: sampling.max_tokens]
        for number, token in enumerate(tokens):
            if number == self.fail_after:
                raise RequestFailed("ValueError: the model gave NaN logits")
            while number == self.hang_after and request.id not in self.aborted:
                await asyncio.sleep(0.001)
            for index in range(sampling.n):
                if request.id in self.aborted:
                    yield Output(index, finish="abort")
                    continue
                if (request.id, index) in self.stopped:
                    continue
                finish = "stop" if token == EOS else "length" if number + 1 == sampling.max_tokens else None
                top = tuple((ord("a") + rank, -1.0 - rank) for rank in range(sampling.logprobs or 0))
                yield Output(index, token, None if sampling.logprobs is None else -0.5, top, finish)
            await asyncio.sleep(0)

    def abort(self, request_id: int) -> bool:
        self.aborted.append(request_id)
        return True

    def stop_choice(self, request: LiveRequest, index: int) -> None:
        self.stopped.append((request.id, index))


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """The address of a server on a free port of this machine."""
    config = uvicorn.Config(create_app(service), port=0, lifespan="off", log_level="error", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        [socket] = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(true: Callable[[], bool]) -> None:
    """pytest's own time limit ends a wait for something that never comes."""
    while not true():
        time.sleep(0.002)
