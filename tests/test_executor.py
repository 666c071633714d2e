"""The executor on real threads: one reply to each start, resume and park; threads as asked; errors as text."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from engine.clock import LiveClock
from engine.executor import Drive, Failed, Finished, Forwards, Parked, Reply, ThreadExecutor, abandon, park
from engine.fake import FakeModel
from engine.gate import Gate
from kv.cache import KVCache
from scheduling.preempt import Preempt

LAYER = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")


def forwards() -> Forwards:
    return Forwards(FakeModel(), KVCache(1, 1, 1, 1, 1, torch.float32))


class Hold:
    """A forward pass of `layers` layers that waits at a boundary until the test lets it go on."""

    def __init__(self, gate: Gate, layers: int = 2, hold_after: int = 3) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._gate, self._layers, self._hold_after = gate, layers, hold_after

    async def run(self) -> str:
        for _ in range(self._layers):
            for operator in LAYER:
                if self._gate.passed == self._hold_after:
                    self.reached.set()
                    assert self.go_on.wait(10)
                await self._gate.operator(operator)
        return "done"


class Rig:
    """An executor whose replies are collected."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    async def __aenter__(self) -> Rig:
        self.executor = ThreadExecutor("test", LiveClock(), forwards(), threads=self.threads)
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self.executor.on_reply = self.replies.put_nowait
        await self.executor.ready()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.executor.close()
        assert self.replies.empty()

    async def reply(self) -> Reply:
        return await asyncio.wait_for(self.replies.get(), 10)

    def start(self, coroutine: Coroutine[Any, None, Any], gate: Gate | None = None) -> Drive:
        drive = Drive(7, coroutine, gate or self.executor.gate(Preempt.OPERATOR))
        self.executor.start(drive)
        return drive


@pytest.mark.parametrize(
    ("level", "operator", "boundary"),
    [
        (Preempt.OPERATOR, "gate_up_proj", 4),
        (Preempt.HALF_LAYER, "down_proj", 5),
        (Preempt.LAYER, "down_proj", 5),
        (Preempt.SLICE, "down_proj", 10),
        (Preempt.NEVER, "down_proj", 10),
    ],
)
def test_a_park_request_stops_at_the_next_boundary_of_the_level(level: Preempt, operator: str, boundary: int) -> None:
    async def main() -> None:
        async with Rig() as rig:
            gate = rig.executor.gate(level)
            hold = Hold(gate)
            drive = rig.start(hold.run(), gate)
            await asyncio.to_thread(hold.reached.wait, 10)
            park(drive)
            hold.go_on.set()
            reply = await rig.reply()
            assert (gate.last, gate.passed) == (operator, boundary)
            if boundary == 10:  # nowhere to stop: it finished, and that is the one reply to the park
                assert isinstance(reply, Finished) and reply.value == "done"
                return
            assert isinstance(reply, Parked) and reply.drive == 7
            rig.executor.resume(drive)
            last = await rig.reply()
            assert isinstance(last, Finished) and last.value == "done" and gate.passed == 10

    asyncio.run(main())


def test_an_abandoned_drive_stops_at_the_next_boundary_whatever_its_level() -> None:
    async def main() -> None:
        async with Rig() as rig:
            gate = rig.executor.gate(Preempt.NEVER)
            hold = Hold(gate)
            drive = rig.start(hold.run(), gate)
            await asyncio.to_thread(hold.reached.wait, 10)
            abandon(drive)
            hold.go_on.set()
            assert isinstance(await rig.reply(), Parked)
            assert gate.passed == 4
            drive.close()

    asyncio.run(main())


def test_a_failed_forward_replies_with_text_and_keeps_nothing_alive() -> None:
    class Activation:
        pass

    async def main() -> None:
        async with Rig() as rig:
            alive: list[weakref.ref[Activation]] = []

            async def forward() -> None:
                activation = Activation()
                alive.append(weakref.ref(activation))
                raise ZeroDivisionError("no such layer")

            rig.start(forward())
            reply = await rig.reply()
            assert isinstance(reply, Failed) and "ZeroDivisionError: no such layer" in reply.error
            gc.collect()
            await asyncio.sleep(0)
            assert alive[0]() is None

    asyncio.run(main())


def test_the_thread_has_its_own_thread_count_and_inference_mode() -> None:
    async def main() -> None:
        loop_threads = torch.get_num_threads()
        asked = loop_threads + 1  # the tests' own threads have another number
        async with Rig(asked) as rig:

            async def forward() -> tuple[int, bool, str]:
                return torch.get_num_threads(), torch.is_inference_mode_enabled(), threading.current_thread().name

            rig.start(forward())
            reply = await rig.reply()
            assert isinstance(reply, Finished) and reply.value == (asked, True, "test")
        assert torch.get_num_threads() == loop_threads and not torch.is_inference_mode_enabled()

    asyncio.run(main())


def test_thread_counts_below_one_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
            ThreadExecutor("x", LiveClock(), forwards(), threads=0)

    asyncio.run(main())


@pytest.mark.parametrize("raised", [SystemExit("died"), asyncio.CancelledError()])
def test_a_forward_that_raises_what_is_no_exception_fails_like_any_other(raised: BaseException) -> None:
    async def main() -> None:
        async with Rig() as rig:

            async def forward() -> None:
                raise raised

            rig.start(forward())
            assert isinstance(await rig.reply(), Failed)

            async def next_one() -> str:
                return "alive"

            rig.start(next_one())
            reply = await rig.reply()
            assert isinstance(reply, Finished) and reply.value == "alive"

    asyncio.run(main())
