"""An executor without threads: it drives the same coroutines, and lets virtual time pass at each boundary.

On a `VirtualLoop` a whole run is deterministic and takes milliseconds. Lessons and tests use it through `Lab`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

import torch

from engine.executor import Drive, Forwards, OnReply, Parked, drive_on
from engine.gate import Gate
from engine.virtual import VirtualLoop
from engine.work import Work
from scheduling.preempt import Preempt

Cost = Callable[[str, int], float]  # (operator, rows) -> seconds


class SteppingGate(Gate):
    """Suspends at every boundary, so that its executor can let the operator's time pass.

    The boundary counts as passed, and the drive may be parked at it, when that time is over. `layers`: how many have
    been crossed; dense and sparse ones differ in their operators.
    """

    layers = 0

    def operator(self, name: str) -> Gate:
        self.last = name
        return self

    def __await__(self) -> Generator[None]:
        yield


class SteppingExecutor:
    """`cost(operator, rows)` says how many virtual seconds an operator takes."""

    repeats = False

    def __init__(self, loop: VirtualLoop, forwards: Forwards, cost: Cost) -> None:
        self.on_reply: OnReply = lambda reply: None
        self._forwards = forwards
        self._loop = loop
        self._cost = cost

    def prepare(self, drive: int, work: Work, preempt: Preempt) -> Drive:
        return self._forwards.drive(drive, work, SteppingGate(preempt))

    def start(self, drive: Drive) -> None:
        self._loop.call_soon(self._step, drive)

    def resume(self, drive: Drive) -> None:
        drive.gate.park_requested = False
        self._loop.call_soon(self._step, drive)

    async def ready(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)

    def _step(self, drive: Drive) -> None:
        """Run one operator, and hear what became of it once its time has passed."""
        assert drive.work is not None and isinstance(drive.gate, SteppingGate)
        with torch.inference_mode():
            reply = drive_on(drive, self._loop)
        if isinstance(reply, Parked):
            rows = drive.work.rows_in(drive.work.first_crossed + drive.gate.layers)
            self._loop.call_later(self._cost(drive.gate.last, rows), self._at_boundary, drive)
        else:
            self.on_reply(reply)

    def _at_boundary(self, drive: Drive) -> None:
        gate = drive.gate
        assert isinstance(gate, SteppingGate)
        gate.passed += 1
        gate.layers += Preempt.LAYER.stops_at(gate.last)
        if gate.park_requested and gate.level.stops_at(gate.last):
            self.on_reply(Parked(drive.id, self._loop.now()))
        else:
            self._step(drive)
