"""Drives coroutines by hand on one thread: start, park, resume; exactly one reply to each start, resume and park.

    prefill.send(None)      runs until the forward pass is done, or until a gate suspends it

The event loop never awaits a forward pass; it hears of it through `call_soon_threadsafe`, and stays free meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch

from engine.clock import Clock
from engine.counting import Counting
from engine.forward import LanguageModel, forward
from engine.gate import Gate
from engine.work import Work
from kv.cache import KVCache
from scheduling.preempt import Preempt


@dataclass(frozen=True, slots=True)
class Finished:
    drive: int
    time: float  # on the engine's clock, taken on the executor thread
    value: Any


@dataclass(frozen=True, slots=True)
class Parked:
    drive: int
    time: float


@dataclass(frozen=True, slots=True)
class Failed:
    """`error` is formatted text: a live traceback would keep every activation of the forward pass alive."""

    drive: int
    time: float
    error: str


Reply = Finished | Parked | Failed
OnReply = Callable[[Reply], None]


@dataclass(eq=False, slots=True)
class Drive:
    """One forward pass on its way: the coroutine is the saved state, the gate its one handle.

    `boundaries`: gates that it passes in all. In a simulation there is no coroutine.
    """

    id: int
    coroutine: Coroutine[Any, None, Any] | None
    gate: Gate
    boundaries: int = 1
    work: Work | None = None

    @property
    def done(self) -> float:
        """The fraction of its operators that have been computed."""
        return self.gate.passed / self.boundaries

    def close(self) -> None:
        """Drop a parked drive's state. Never call this while it runs."""
        if self.coroutine is not None:
            self.coroutine.close()


class Executor(Protocol):
    """One device's thread of work. Called on the loop thread; `on_reply` is called there too.

    `repeats`: whether it runs repeated decode steps in one go. Only a simulation can: it need not look at tokens.
    """

    on_reply: OnReply
    repeats: bool

    def prepare(self, drive: int, work: Work, preempt: Preempt) -> Drive:
        """A drive over `work` that may be parked at the level `preempt`; nothing runs yet."""
        ...

    def start(self, drive: Drive) -> None: ...

    def resume(self, drive: Drive) -> None: ...

    async def ready(self) -> None:
        """Wait until drives can start; raises what stands in the way."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Forwards:
    """Turns work into forward passes of one model on one device's cache. `counting`: to count what they read."""

    model: LanguageModel
    cache: KVCache
    counting: Counting | None = None

    def drive(self, drive: int, work: Work, gate: Gate) -> Drive:
        crossed = range(work.first_crossed, work.first_crossed + work.layers_crossed)
        boundaries = sum(len(self.model.layer_operators(layer)) for layer in crossed)
        return Drive(drive, forward(self.model, self.cache, work, gate, self.counting), gate, boundaries, work)


def park(drive: Drive) -> None:
    """Ask a running drive to pull over where its level allows. It may finish first: either way one reply comes."""
    drive.gate.park_requested = True


def abandon(drive: Drive) -> None:
    """Ask a drive whose results nobody wants to stop at the very next boundary, whatever its level."""
    drive.gate.level = Preempt.OPERATOR
    drive.gate.park_requested = True


def drive_on(drive: Drive, clock: Clock) -> Reply:
    """Run until done or suspended. On the executor's thread."""
    assert drive.coroutine is not None
    try:
        drive.coroutine.send(None)
    except StopIteration as done:
        return Finished(drive.id, clock.now(), done.value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit and the like: a thread that dies of one would answer nobody
        text = "".join(traceback.format_exception(error)).strip()
        return Failed(drive.id, clock.now(), text)
    return Parked(drive.id, clock.now())


class ThreadExecutor:
    """The live executor: one thread with its own share of the cores, and on CUDA its own stream."""

    repeats = False

    def __init__(self, name: str, clock: Clock, forwards: Forwards, *, threads: int = 1, run_ahead: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"executor {name}: threads must be at least 1, got {threads}")
        self.on_reply: OnReply = lambda reply: None
        self._forwards = forwards
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._threads = threads
        self._device = forwards.model.device
        self._run_ahead = run_ahead
        self._inbox: SimpleQueue[Drive | None] = SimpleQueue()
        self._ready = self._loop.create_future()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def prepare(self, drive: int, work: Work, preempt: Preempt) -> Drive:
        return self._forwards.drive(drive, work, self.gate(preempt))

    def gate(self, preempt: Preempt) -> Gate:
        """A new gate, of the kind that bounds this device's queue."""
        if self._device.type == "cuda":
            from engine.cuda import CudaGate

            return CudaGate(preempt, self._run_ahead)
        return Gate(preempt)

    def start(self, drive: Drive) -> None:
        self._inbox.put(drive)

    def resume(self, drive: Drive) -> None:
        drive.gate.park_requested = False
        self._inbox.put(drive)

    async def ready(self) -> None:
        """Wait until the thread is set up; raises what went wrong there."""
        await self._ready

    async def close(self) -> None:
        """Let the thread end after what it is doing. The caller has parked or awaited its drives."""
        self._inbox.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.001)

    def _run(self) -> None:
        try:
            stream = self._set_up()
        except Exception as error:
            self._post(self._ready.set_exception, error)
            return
        self._post(self._ready.set_result, None)
        # Entered once and for all: thread-local modes opened inside a forward pass would leak through a park.
        with torch.inference_mode(), torch.cuda.stream(stream):
            while (drive := self._inbox.get()) is not None:
                self._post(self.on_reply, drive_on(drive, self._clock))
                del drive  # a finished forward must not live on in this frame

    def _set_up(self) -> Any:
        # set_num_threads acts for the calling thread only, and only once that thread has run an operator.
        torch.zeros(1).add_(1)
        torch.set_num_threads(self._threads)
        if torch.get_num_threads() != self._threads:
            raise RuntimeError(f"asked for {self._threads} threads, torch runs {torch.get_num_threads()}")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return None

    def _post(self, callback: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has gone: nobody is left to hear of it
            self._loop.call_soon_threadsafe(callback, *args)
