"""Prefill: carry out what the scheduler decides. `Prefills` keeps the books, `PrefillInstance` runs them on a device.

    event -> tell the scheduler -> decide(now) -> carry the decision out

Events arrive in one inbox and are handled one at a time on the loop thread, which alone changes pools and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.executor import Drive, Executor, Failed, Finished, Parked, Reply, abandon, park
from engine.inbox import Inbox, Left
from engine.sampling import Draw, Sampled
from engine.timeline import Kind, Timeline
from engine.work import Carried, Computed, Part, Work
from kv.pool import Lease, Quota
from kv.table import BlockTable
from scheduling.cohort import Cohort
from scheduling.plan import Share
from scheduling.request import Request
from scheduling.scheduler import Decision, Scheduler


@dataclass(frozen=True, slots=True)
class Arrived:
    request: Request


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Reason enough for a new decision."""


Event = Arrived | Left | BlocksFreed | Reply


@dataclass(eq=False, slots=True)
class Passage:
    """A cohort on its way through the layers: the blocks it may still touch, the hidden state it carries from one
    layer group to the next, and its present drive, if one is running or suspended."""

    cohort: Cohort
    lease: Lease
    blocks: tuple[tuple[int, ...], ...]  # of the cohort's shares: theirs until it is through, whoever leaves
    carried: Carried = field(default_factory=Carried)
    drive: Drive | None = None


class Prefills:
    """The scheduler's decisions as work, and results as events: everything about prefills but the device.

    `on_prefilled(request, table, sampled, time)` takes over a complete prompt and its blocks: one sampled first token
    for each of the request's n choices. `on_refused(request, why)` and `on_failed(request, error)` end a request that
    never gets that far.
    """

    def __init__(self, name: str, scheduler: Scheduler, quota: Quota, timeline: Timeline) -> None:
        self.name = name
        self.scheduler = scheduler
        self.quota = quota
        self.on_prefilled: Callable[[Request, BlockTable, tuple[Sampled, ...], float], None]
        self.on_refused: Callable[[Request, str], None]
        self.on_failed: Callable[[Request, str], None]
        self.late_signals = 0  # arrivals of requests that had ended already: ignored, and counted for /metrics
        self._timeline = timeline
        self._tables: dict[int, BlockTable] = {}  # by request id
        self._passages: dict[int, Passage] = {}  # by cohort id

    @property
    def idle(self) -> bool:
        return not self._passages and not self.scheduler.waiting

    # Events

    def arrive(self, request: Request) -> None:
        if request.state.terminal:
            self.late_signals += 1
        else:
            self.scheduler.on_arrival(request)

    def leave(self, request: Request) -> None:
        """The request was ended from outside. A forward pass that still needs its blocks has leased them."""
        self.scheduler.on_abort(request)
        if (table := self._tables.pop(request.id, None)) is not None:
            table.free()

    def finish_slice(self, passage: Passage, sampled: Iterator[tuple[Sampled, ...]], time: float) -> None:
        """The passage's slice is computed; `sampled` has the draws of each of its parts."""
        cohort = passage.cohort
        passage.drive = None
        first_tokens = {share.request.id: next(sampled) for share in cohort.shares}
        if cohort.last_slice:
            self._retire(passage)
        for request in self.scheduler.on_completion(cohort):
            table = self._tables.pop(request.id)
            self.on_prefilled(request, table, first_tokens[request.id], time)

    def fail_slice(self, passage: Passage, error: str, *, alone: bool = True) -> None:
        """The pass raised. `alone`: it computed nothing but this slice, so the fault lies there."""
        self._retire(passage)
        for request in self.scheduler.on_failure(passage.cohort, alone=alone):
            self._tables.pop(request.id).free()
            self.on_failed(request, error)

    def park(self, passage: Passage) -> None:
        """The passage's drive has pulled over."""
        assert passage.drive is not None
        self.scheduler.on_parked(passage.cohort, passage.drive.done)

    # Decisions

    def report_progress(self) -> None:
        """Tell the scheduler how far the running drive has come."""
        running = self.scheduler.running
        if running is not None and (drive := self._passages[running.id].drive) is not None:
            self.scheduler.on_progress(drive.done)

    def decide(self, now: float) -> Decision:
        """The scheduler's decision; its refusals and closings are done already."""
        self.report_progress()
        decision = self.scheduler.decide(now)
        for request in decision.refuse:
            self.on_refused(request, "its TTFT target can no longer be met")
        for cohort in decision.close:
            passage = self._passages[cohort.id]
            if passage.drive is not None:
                passage.drive.close()
                self._timeline.record(Kind.CLOSED, instance=self.name, drive=passage.drive.id)
            self._retire(passage)
        return decision

    def passage(self, cohort: Cohort) -> Passage:
        """The cohort's passage; begun now, with blocks for its newcomers, if this is its first slice."""
        if cohort.id not in self._passages:
            for share in cohort.shares:
                request = share.request
                if not request.admitted:
                    length = len(request.prompt)
                    grows_to = length + request.sampling.max_tokens
                    self._tables[request.id] = self.quota.allocate(length, grows_to=grows_to)
                    request.admitted = True
            tables = tuple(self._tables[share.request.id] for share in cohort.shares)
            blocks = tuple(table.blocks for table in tables)
            self._passages[cohort.id] = Passage(cohort, self.quota.pool.lease(tables), blocks)
        return self._passages[cohort.id]

    def parts(self, passage: Passage) -> tuple[Part, ...]:
        """The rows of the cohort's present slice; first tokens are drawn when it is the last slice of a last share."""
        return tuple(
            Part(
                share.request.prompt[share.start : share.stop],
                share.start,
                blocks,
                self._draws(share, passage.cohort),
            )
            for share, blocks in zip(passage.cohort.shares, passage.blocks, strict=True)
        )

    def _draws(self, share: Share, cohort: Cohort) -> tuple[Draw, ...]:
        """First tokens, one for each choice, where this slice ends a prompt; none if the request has had them."""
        if not (share.last and cohort.last_slice) or share.request.recomputes:
            return ()
        return first_draws(share.request)

    def _retire(self, passage: Passage) -> None:
        del self._passages[passage.cohort.id]
        passage.lease.release()


def first_draws(request: Request) -> tuple[Draw, ...]:
    """The first token of each choice."""
    position = len(request.prompt)
    return tuple(Draw(request.sampling, request.seed, index, position) for index in range(request.sampling.n))


class PrefillInstance(Inbox[Event]):
    """Prefills on an executor of their own."""

    def __init__(self, prefills: Prefills, executor: Executor, num_layers: int, timeline: Timeline) -> None:
        super().__init__()
        self.name = prefills.name
        self.prefills = prefills
        self.quota = prefills.quota
        self.executor = executor
        self._num_layers = num_layers
        self._timeline = timeline
        self._running: Passage | None = None  # whose drive the executor has
        self._ids = 0
        executor.on_reply = self.post
        self.quota.on_freed.append(self._on_freed)

    @property
    def idle(self) -> bool:
        return self.prefills.idle and self.quiet

    def submit(self, request: Request) -> None:
        self.post(Arrived(request))

    def release(self, request: Request) -> None:
        # At once, and not by way of the inbox: a reply that waits there must not find it among the living.
        self.prefills.leave(request)
        self.post(Left())

    def _on_freed(self) -> None:
        scheduler = self.prefills.scheduler
        if scheduler.waiting or scheduler.parked:  # else there is nothing to decide
            self.post(BlocksFreed())

    def handle(self, event: Event) -> None:
        match event:
            case Arrived(request):
                self.prefills.arrive(request)
            case Left() | BlocksFreed():
                pass
            case Finished(drive, time, Computed() as computed):
                self._timeline.record(Kind.COMPLETED, instance=self.name, drive=drive, time=time, **computed.counted)
                self.prefills.finish_slice(self._take(drive), iter(computed.prefill), time)
            case Failed(drive, time, error):
                self._timeline.record(Kind.DRIVE_FAILED, instance=self.name, drive=drive, time=time, error=error)
                self.prefills.fail_slice(self._take(drive), error)
            case Parked(drive, time):
                self._on_parked(drive, time)

    def act(self, now: float) -> None:
        decision = self.prefills.decide(now)
        if decision.park is not None:
            passage = self.prefills.passage(decision.park)
            assert passage.drive is not None
            self._timeline.record(Kind.PARK_REQUESTED, instance=self.name, drive=passage.drive.id)
            park(passage.drive)
        elif decision.start is not None:
            self._start(self.prefills.passage(decision.start))
        elif decision.resume is not None:
            passage = self.prefills.passage(decision.resume)
            if passage.drive is None:
                self._start(passage)  # the cohort's next layer group
            else:
                self._running = passage
                self._timeline.record(Kind.RESUMED, instance=self.name, drive=passage.drive.id)
                self.executor.resume(passage.drive)
        if self._running is not None and self._running.cohort.abandoned and self._running.drive is not None:
            # Leaving work that nobody wants is no preemption: the system's level does not apply to it.
            abandon(self._running.drive)

    def _start(self, passage: Passage) -> None:
        cohort = passage.cohort
        first, last = cohort.layers
        work = Work(self._num_layers, self.prefills.parts(passage), first=first, last=last, carried=passage.carried)
        drive = self.executor.prepare(self._ids, work, self.prefills.scheduler.system.preempt)
        self._ids += 1
        passage.drive = drive
        self._running = passage
        self._timeline.record(
            Kind.STARTED,
            instance=self.name,
            drive=drive.id,
            phase="prefill",
            requests=tuple(share.request.id for share in cohort.shares),
            rows=tuple(share.stop - share.start for share in cohort.shares),
            tokens=cohort.tokens,
            layers=(first, last),
        )
        self.executor.start(drive)

    def _on_parked(self, drive: int, time: float) -> None:
        passage = self._take(drive)
        assert passage.drive is not None
        gate = passage.drive.gate
        self._timeline.record(
            Kind.PARKED, instance=self.name, drive=drive, time=time, boundary=gate.passed, operator=gate.last
        )
        self.prefills.park(passage)

    def _take(self, drive: int) -> Passage:
        """The passage of the drive that has just replied; the executor is free."""
        passage, self._running = self._running, None
        assert passage is not None and passage.drive is not None and passage.drive.id == drive
        return passage
