"""The prefill instance: one scheduler, one executor, one task.

    event -> tell the scheduler -> decide(now) -> carry the decision out

Events arrive in one inbox and are handled one at a time on the loop thread, which alone changes pools and tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine.clock import Clock
from engine.executor import Drive, Executor, Failed, Finished, Parked, Reply, abandon, park
from engine.forward import LanguageModel, forward
from engine.sampling import Draw, Sampled
from engine.timeline import Kind, Timeline
from kv.cache import KVCache
from kv.pool import Lease, Quota
from kv.table import BlockTable
from models.batch import Batch
from scheduling.cohort import Cohort
from scheduling.request import Request
from scheduling.scheduler import Decision, Scheduler


@dataclass(frozen=True, slots=True)
class Arrived:
    request: Request


@dataclass(frozen=True, slots=True)
class Gone:
    """The request has ended (aborted, refused, stopped): let go of what is held for it."""

    request: Request


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    pass


Event = Arrived | Gone | BlocksFreed | Reply


@dataclass(eq=False, slots=True)
class _Running:
    """A cohort on its way: its drive, and the lease on the blocks that the forward pass may still touch."""

    cohort: Cohort
    drive: Drive
    lease: Lease


class PrefillInstance:
    """`on_prefilled(request, table, sampled, time)` takes over a complete prompt and its blocks: one sampled first
    token for each of the request's n choices. `on_refused(request, why)` and `on_failed(request, error)` end a request
    that never gets that far."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        executor: Executor,
        model: LanguageModel,
        cache: KVCache,
        quota: Quota,
        clock: Clock,
        timeline: Timeline,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.executor = executor
        self.quota = quota
        self.on_prefilled: Callable[[Request, BlockTable, list[Sampled], float], None]
        self.on_refused: Callable[[Request, str], None]
        self.on_failed: Callable[[Request, str], None]
        self.late_signals = 0  # events about requests that were gone already: ignored, and counted
        self._model = model
        self._num_layers = model.config.num_layers
        self.cache = cache
        self._clock = clock
        self._timeline = timeline
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._tables: dict[int, BlockTable] = {}  # by request id
        self._drives: dict[int, _Running] = {}  # by drive id; running or parked
        executor.on_reply = self._inbox.put_nowait
        quota.on_freed.append(lambda: self.post(BlocksFreed()))

    def post(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    @property
    def idle(self) -> bool:
        return not self._drives and not self.scheduler.waiting and self._inbox.empty()

    async def run(self) -> None:
        """Handle events for ever: all that have come in, then one decision."""
        while True:
            self._handle(await self._inbox.get())
            while not self._inbox.empty():
                self._handle(self._inbox.get_nowait())
            self._report_progress()
            self._carry_out(self.scheduler.decide(self._clock.now()))

    # Events

    def _handle(self, event: Event) -> None:
        match event:
            case Arrived(request):
                if request.state.terminal:
                    self.late_signals += 1
                else:
                    self.scheduler.on_arrival(request)
            case Gone(request):
                self.scheduler.on_abort(request)
                table = self._tables.pop(request.id, None)
                if table is None:
                    self.late_signals += 1
                else:
                    table.free()
            case BlocksFreed():
                pass  # reason enough for a new decision
            case Finished(drive, time, sampled):
                self._on_finished(self._retire(drive), time, sampled)
            case Parked(drive, time):
                self._on_parked(self._drives[drive], time)
            case Failed(drive, time, error):
                self._on_failed(self._retire(drive), time, error)

    def _on_finished(self, done: _Running, time: float, sampled: list[Sampled]) -> None:
        cohort = done.cohort
        self._timeline.record(Kind.COMPLETED, instance=self.name, drive=cohort.id, time=time)
        draws = iter(sampled)
        first_tokens = {
            share.request.id: [next(draws) for _ in range(share.request.sampling.n)]
            for share in cohort.slice.shares
            if share.last
        }
        for request in self.scheduler.on_completion(cohort):
            table = self._tables.pop(request.id)
            if request.state.terminal:  # aborted while its last operators ran
                table.free()
            else:
                self.on_prefilled(request, table, first_tokens[request.id], time)

    def _on_parked(self, parked: _Running, time: float) -> None:
        gate = parked.drive.gate
        self._timeline.record(
            Kind.PARKED, instance=self.name, drive=parked.cohort.id, time=time, boundary=gate.passed, operator=gate.last
        )
        self.scheduler.on_parked(parked.cohort, self._done(parked.drive))

    def _on_failed(self, failed: _Running, time: float, error: str) -> None:
        self._timeline.record(Kind.DRIVE_FAILED, instance=self.name, drive=failed.cohort.id, time=time, error=error)
        for request in self.scheduler.on_failure(failed.cohort):
            self._tables.pop(request.id).free()
            self.on_failed(request, error)

    def _retire(self, drive: int) -> _Running:
        done = self._drives.pop(drive)
        done.lease.release()
        return done

    # Decisions

    def _report_progress(self) -> None:
        if self.scheduler.running is not None:
            self.scheduler.on_progress(self._done(self._drives[self.scheduler.running.id].drive))

    def _carry_out(self, decision: Decision) -> None:
        for request in decision.refuse:
            self.on_refused(request, "its TTFT target can no longer be met")
        for cohort in decision.close:
            closed = self._drives.pop(cohort.id)
            closed.drive.close()
            closed.lease.release()
            self._timeline.record(Kind.CLOSED, instance=self.name, drive=cohort.id)
        if decision.park is not None:
            self._timeline.record(Kind.PARK_REQUESTED, instance=self.name, drive=decision.park.id)
            # Leaving work that nobody wants is no preemption: the system's level does not apply to it.
            stop = abandon if decision.park.abandoned else park
            stop(self._drives[decision.park.id].drive)
        if decision.start is not None:
            self._start(decision.start)
        if decision.resume is not None:
            self._timeline.record(Kind.RESUMED, instance=self.name, drive=decision.resume.id)
            self.executor.resume(self._drives[decision.resume.id].drive)

    def _start(self, cohort: Cohort) -> None:
        shares = cohort.slice.shares
        for share in shares:
            request = share.request
            if not request.admitted:
                length = len(request.prompt)
                self._tables[request.id] = self.quota.allocate(length, grows_to=length + request.sampling.max_tokens)
                request.admitted = True
        tables = [self._tables[share.request.id] for share in shares]
        batch = Batch.build(
            self.cache,
            (
                (share.request.prompt[share.start : share.stop], share.start, table.blocks)
                for share, table in zip(shares, tables, strict=True)
            ),
        )
        complete = [i for i, share in enumerate(shares) if share.last]
        rows = [batch.spans[i].stop - 1 for i in complete]
        draws = [
            Draw(row, request.sampling, request.seed, index, len(request.prompt))
            for row, request in enumerate(shares[i].request for i in complete)
            for index in range(request.sampling.n)
        ]
        gate = self.executor.gate(self.scheduler.system.preempt)
        coroutine = forward(self._model, batch, gate, rows, draws)
        drive = Drive(cohort.id, coroutine, gate, rows=cohort.slice.tokens)
        self._drives[cohort.id] = _Running(cohort, drive, self.quota.pool.lease(tables))
        self._timeline.record(
            Kind.STARTED,
            instance=self.name,
            drive=cohort.id,
            phase="prefill",
            requests=tuple(share.request.id for share in shares),
            tokens=cohort.slice.tokens,
        )
        self.executor.start(drive)

    def _done(self, drive: Drive) -> float:
        return drive.gate.passed / (self._num_layers * len(self._model.operators))
