"""One contract, three executors: on threads, stepping on virtual time, and simulated by cost.

Whatever holds here is all that the instances rely on; engine/executor.py states it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch

from engine.clock import LiveClock
from engine.executor import Drive, Executor, Failed, Finished, Forwards, Parked, Reply, ThreadExecutor, abandon, park
from engine.fake import OPERATORS, FakeModel
from engine.gate import Gate
from engine.hardware import DEVICES
from engine.roofline import Roofline
from engine.sampling import Draw
from engine.simulated import SimulatedExecutor
from engine.stepping import SteppingExecutor
from engine.virtual import VirtualLoop
from engine.work import Computed, Part, Repeated, Stretch, Work
from kv.cache import KVCache
from models.batch import Batch
from models.costs import Volume, model_costs
from scheduling.preempt import Preempt
from scheduling.request import Sampling

LAYERS = 4
BOUNDARIES = LAYERS * len(OPERATORS)
DRAW = (Draw(Sampling(), 0, 0, 0),)
LEVELS = (Preempt.NEVER, Preempt.SLICE, Preempt.LAYER, Preempt.HALF_LAYER, Preempt.OPERATOR)


class SlowModel(FakeModel):
    """Gives a test on threads the time to act: each operator takes two milliseconds."""

    async def run_layers(self, x: torch.Tensor, first: int, last: int, batch: Batch, gate: Gate) -> torch.Tensor:
        return await super().run_layers(x, first, last, batch, SlowGate(gate))  # type: ignore[arg-type]


class SlowGate:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def operator(self, name: str) -> Awaitable[None]:
        time.sleep(0.002)
        return self._gate.operator(name)


class Rig:
    """An executor of one kind, inside its event loop, whose replies are collected."""

    def __init__(self, kind: str) -> None:
        self.exact = kind != "thread"  # nothing happens between what the test sees and what it does
        self.model = SlowModel(num_layers=LAYERS, fail_on=999) if kind == "thread" else FakeModel(fail_on=999)
        self.forwards = Forwards(self.model, KVCache(LAYERS, 64, 16, 1, 2, torch.float32))
        self.loop = asyncio.get_running_loop()
        self.executor = self._executor(kind)
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self.executor.on_reply = self.replies.put_nowait
        self._ids = 0

    def _executor(self, kind: str) -> Executor:
        if kind == "thread":
            return ThreadExecutor("contract", LiveClock(), self.forwards)
        assert isinstance(self.loop, VirtualLoop)
        if kind == "stepping":
            return SteppingExecutor(self.loop, self.forwards, lambda operator, rows: 0.002)
        return SimulatedExecutor(self.loop, Roofline(model_costs(self.model.config), DEVICES["a100-80g"]))

    def prefill(self, preempt: Preempt, *prompts: int, draws: tuple[Draw, ...] = DRAW, token: int = 1) -> Drive:
        """A prefill of prompts of these lengths, in blocks of their own."""
        parts = tuple(
            Part([token] * tokens, 0, tuple(range(4 * i, 4 * i + 4)), draws) for i, tokens in enumerate(prompts)
        )
        return self.prepare(Work(LAYERS, parts, last=LAYERS), preempt)

    def prepare(self, work: Work, preempt: Preempt) -> Drive:
        self._ids += 1
        return self.executor.prepare(self._ids, work, preempt)

    async def reply(self) -> Reply:
        return await asyncio.wait_for(self.replies.get(), 10)

    async def until(self, drive: Drive, boundary: int) -> None:
        """Wait until the drive has passed so many boundaries, and is not far behind them."""
        while drive.done < boundary / BOUNDARIES:
            await asyncio.sleep(0.000_01)

    async def no_more(self) -> None:
        """Nothing else comes, however long one waits."""
        await asyncio.sleep(0.02)
        assert self.replies.empty()


Check = Callable[[Rig], Coroutine[Any, Any, None]]


@pytest.fixture(params=["thread", "stepping", "simulated"])
def run(request: pytest.FixtureRequest) -> Callable[[Check], None]:
    """Runs a check on an executor of each kind in turn."""

    async def main(check: Check) -> None:
        rig = Rig(request.param)
        await rig.executor.ready()
        await check(rig)
        await rig.no_more()
        await rig.executor.close()

    def runner(check: Check) -> None:
        if request.param == "thread":
            asyncio.run(main(check))
        else:
            loop = VirtualLoop()
            loop.run_until_complete(main(check))
            loop.close()

    runner.kind = request.param  # type: ignore[attr-defined]
    return runner


def test_a_start_has_one_reply_with_the_draws_of_every_part(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        drive = rig.prefill(Preempt.OPERATOR, 5, 40, draws=DRAW * 2)
        assert drive.done == 0
        rig.executor.start(drive)
        reply = await rig.reply()
        assert isinstance(reply, Finished) and reply.drive == drive.id
        computed = reply.value
        assert isinstance(computed, Computed)
        assert [len(draws) for draws in computed.prefill] == [2, 2] and not computed.decode
        assert drive.gate.passed == drive.boundaries == BOUNDARIES and drive.done == 1

    run(check)


def test_parts_that_draw_nothing_get_nothing(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        rig.executor.start(rig.prefill(Preempt.OPERATOR, 5, draws=()))
        reply = await rig.reply()
        assert isinstance(reply, Finished) and reply.value.prefill == ((),)

    run(check)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
def test_a_park_stops_where_the_level_allows_or_not_at_all(run: Callable[[Check], None], level: Preempt) -> None:
    async def check(rig: Rig) -> None:
        drive = rig.prefill(level, 30)
        rig.executor.start(drive)
        await rig.until(drive, 6)
        park(drive)
        reply = await rig.reply()
        if not level.inside_a_forward:
            assert isinstance(reply, Finished)
            return
        assert isinstance(reply, Parked) and reply.drive == drive.id
        assert level.stops_at(drive.gate.last)
        assert drive.gate.last == OPERATORS[(drive.gate.passed - 1) % len(OPERATORS)]
        assert drive.gate.passed >= 7
        if rig.exact:
            expected = {Preempt.LAYER: 10, Preempt.HALF_LAYER: 8, Preempt.OPERATOR: 7}
            assert drive.gate.passed == expected[level]
        assert drive.done == drive.gate.passed / BOUNDARIES
        await rig.no_more()
        rig.executor.resume(drive)
        assert isinstance(await rig.reply(), Finished)

    run(check)


def test_each_park_comes_further_until_the_work_is_done(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        drive = rig.prefill(Preempt.OPERATOR, 30)
        rig.executor.start(drive)
        seen = [0]
        while True:
            park(drive)
            if isinstance(await rig.reply(), Finished):
                break
            seen.append(drive.gate.passed)
            rig.executor.resume(drive)
        assert seen == list(range(BOUNDARIES + 1))  # every boundary in turn, the last one included

    run(check)


def test_a_parked_drive_stands_still_while_another_runs(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        long, short = rig.prefill(Preempt.OPERATOR, 60), rig.prefill(Preempt.OPERATOR, 3)
        rig.executor.start(long)
        await rig.until(long, 4)
        park(long)
        assert isinstance(await rig.reply(), Parked)
        done = long.done
        rig.executor.start(short)
        finished = await rig.reply()
        assert isinstance(finished, Finished) and finished.drive == short.id
        assert long.done == done < 1
        rig.executor.resume(long)
        finished = await rig.reply()
        assert isinstance(finished, Finished) and finished.drive == long.id

    run(check)


def test_progress_never_goes_back(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        drive = rig.prefill(Preempt.OPERATOR, 30)
        rig.executor.start(drive)
        seen = [drive.done]
        while rig.replies.empty():
            await asyncio.sleep(0.000_05)
            seen.append(drive.done)
        assert isinstance(await rig.reply(), Finished)
        assert seen == sorted(seen) and seen[0] < 0.3 and seen[-1] == 1
        assert len(set(seen)) > 5

    run(check)


def test_an_abandoned_drive_stops_at_the_next_boundary_whatever_its_level(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        drive = rig.prefill(Preempt.NEVER, 30)
        rig.executor.start(drive)
        await rig.until(drive, 6)
        abandon(drive)
        assert isinstance(await rig.reply(), Parked)
        assert drive.gate.passed == 7 if rig.exact else 7 <= drive.gate.passed < BOUNDARIES
        drive.close()

    run(check)


def test_a_request_that_comes_too_late_is_answered_by_the_end(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        drive = rig.prefill(Preempt.LAYER, 30)
        rig.executor.start(drive)
        await rig.until(drive, BOUNDARIES - 3)
        park(drive)
        reply = await rig.reply()
        if isinstance(reply, Parked):
            assert drive.gate.passed == BOUNDARIES  # only the head is left
            rig.executor.resume(drive)
            reply = await rig.reply()
        assert isinstance(reply, Finished)
        park(drive)  # nobody is there to hear it

    run(check)


def test_a_decode_step_gives_each_part_its_token(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        prefill = rig.prefill(Preempt.NEVER, 5, 6)
        rig.executor.start(prefill)
        await rig.reply()
        decode = tuple(Part([1], 5 + i, tuple(range(4 * i, 4 * i + 4)), DRAW) for i in range(2))
        rig.executor.start(rig.prepare(Work(LAYERS, decode=decode), Preempt.SLICE))
        reply = await rig.reply()
        assert isinstance(reply, Finished)
        assert not reply.value.prefill and [len(draws) for draws in reply.value.decode] == [1, 1]
        assert reply.value.stretch is None

    run(check)


def test_repeated_steps_end_with_the_last_or_with_the_one_under_way(run: Callable[[Check], None]) -> None:
    if run.kind != "simulated":  # type: ignore[attr-defined]
        pytest.skip("it looks at every token, and so runs one step at a time: `repeats` is false")

    async def check(rig: Rig) -> None:
        assert rig.executor.repeats
        ten = Repeated(Volume(rows=3, pairs=300, keys=300, sequences=3, drawn=3), steps=10)

        async def steps(wait: float | None) -> Stretch:
            drive = rig.prepare(Work(LAYERS, repeated=ten), Preempt.SLICE)
            began = rig.loop.time()
            rig.executor.start(drive)
            if wait is not None:
                await asyncio.sleep(wait)
                park(drive)
            reply = await rig.reply()
            assert isinstance(reply, Finished) and reply.value.stretch is not None
            first, last, count = reply.value.stretch
            assert reply.time == last
            return Stretch(first - began, last - began, count)

        whole = await steps(None)
        assert whole.steps == 10
        step = whole.first
        assert await steps(0.5 * step) == pytest.approx((step, step, 1))
        first, last, count = await steps(3.5 * step)
        assert count == 4 and first == pytest.approx(step) and 3.5 * step < last < 4.5 * step

    run(check)


def test_a_pass_of_decodes_and_prefills_gives_both_their_draws(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        rig.executor.start(rig.prefill(Preempt.NEVER, 5))
        await rig.reply()
        decode = Part([1], 5, (0, 1, 2, 3), DRAW)
        new = Part([1] * 9, 0, (8, 9), DRAW)
        drive = rig.prepare(Work(LAYERS, (new,), (decode,), first=0, last=LAYERS), Preempt.SLICE)
        rig.executor.start(drive)
        reply = await rig.reply()
        assert isinstance(reply, Finished)
        assert [len(draws) for draws in (*reply.value.prefill, *reply.value.decode)] == [1, 1]
        assert drive.boundaries == BOUNDARIES

    run(check)


def test_a_layer_group_is_as_long_as_its_layers(run: Callable[[Check], None]) -> None:
    async def check(rig: Rig) -> None:
        work = Work(LAYERS, (Part([1] * 9, 0, (0, 1), ()),), first=0, last=3)
        drive = rig.prepare(work, Preempt.SLICE)
        assert drive.boundaries == 3 * len(OPERATORS)
        rig.executor.start(drive)
        assert isinstance(await rig.reply(), Finished) and drive.gate.passed == drive.boundaries

    run(check)


def test_a_failure_is_a_reply_with_the_error_as_text(run: Callable[[Check], None]) -> None:
    if run.kind == "simulated":  # type: ignore[attr-defined]
        pytest.skip("a simulated forward pass cannot fail: it computes nothing")

    async def check(rig: Rig) -> None:
        drive = rig.prefill(Preempt.OPERATOR, 5, token=999)
        rig.executor.start(drive)
        reply = await rig.reply()
        assert isinstance(reply, Failed) and reply.drive == drive.id
        assert "asked to fail on token 999" in reply.error

    run(check)
