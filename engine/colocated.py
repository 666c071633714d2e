"""The co-located instance: prefills and decodes on one device, on one executor. How they share it is the placement.

One drive at a time. Whenever the device is free, `act` picks what runs next: a slice of prefill, a decode step, or both
in one pass. A step is never parked, and a pass that carries decodes is not either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engine import decode, prefill
from engine.decode import Decodes, Step
from engine.executor import Drive, Executor, Failed, Finished, Parked, abandon, park
from engine.inbox import Inbox, Left
from engine.output import Choice, LiveRequest
from engine.prefill import Passage, Prefills
from engine.timeline import Kind, Timeline
from engine.work import Carried, Computed, Work
from kv.cache import KVCache
from kv.table import BlockTable
from scheduling.placement import Exclusive, Interleave, Piggyback, RequestLevel
from scheduling.preempt import Preempt
from scheduling.request import Request


class StepDue:
    """The moment has come at which the next decode step must not wait any longer."""


Event = prefill.Event | decode.Event | StepDue


class ColocatedInstance(Inbox[Event]):
    def __init__(
        self,
        name: str,
        placement: Piggyback | Exclusive | Interleave | RequestLevel,
        prefills: Prefills,
        decodes: Decodes,
        executor: Executor,
        num_layers: int,
        timeline: Timeline,
        now: Callable[[], float],
    ) -> None:
        super().__init__()
        self.name = name
        self.prefills = prefills
        self.decodes = decodes
        self.quota = prefills.quota
        self.executor = executor
        self._placement = placement
        self._num_layers = num_layers
        self._timeline = timeline
        self._now = now
        self._drive: Drive | None = None  # running now
        self._passage: Passage | None = None  # whose slice the running drive computes
        self._step: Step | None = None  # whose decodes the running drive computes
        self._parking = False
        self._ids = 0
        self._step_owed = False  # Exclusive: a prefill has just run, and a decode step comes before the next
        self._step_seconds = 0.0  # how long the last decode step took
        self._step_ended = float("-inf")
        self._step_started = 0.0
        self._layer_seconds = 0.0  # how long one layer of the last prefill takes, as predicted
        self._alarm: asyncio.TimerHandle | None = None
        executor.on_reply = self.post
        self.quota.on_freed.append(lambda: self.post(prefill.BlocksFreed()))
        decodes.on_recompute = self._recompute

    # What the proxy asks

    @property
    def idle(self) -> bool:
        return self._drive is None and self.prefills.idle and self.decodes.idle and self.quiet

    def submit(self, request: Request) -> None:
        self.post(prefill.Arrived(request))

    def release(self, request: Request) -> None:
        self.prefills.leave(request)
        self.decodes.leave(request)
        self.post(Left())

    def has_room(self, request: Request, table: BlockTable) -> bool:
        return True  # who finds no block to grow into, gets one from a later request

    def admit(self, request: Request, table: BlockTable, source: KVCache, choices: Sequence[Choice]) -> None:
        """Begin to decode. The blocks stay where they are; if its forks find none, the request is computed again."""
        if self.decodes.cost(request, table) > self.quota.free:
            table.free()
            self._recompute(request)
        else:
            self.decodes.reserve(request, table, source, choices)
            self.decodes.admit(choices)

    def _recompute(self, request: Request) -> None:
        """A request has given its blocks up: it waits for a prefill again, at the place its arrival gives it."""
        request.computed = 0
        request.admitted = False
        request.recomputes += 1
        request.blocks_beside = self._blocks_beside(request)
        self._timeline.record(Kind.RECOMPUTED, request=request, instance=self.name)
        self.prefills.arrive(request)

    def _blocks_beside(self, request: Request) -> int:
        """Blocks that the request's choices need beside the prompt's as soon as they go on."""
        assert isinstance(request, LiveRequest)
        pool, prompt = self.quota.pool, len(request.prompt)
        lengths = [choice.length for choice in request.choices if choice.finish is None]
        shared = (len(lengths) - 1) * (prompt // pool.block_size)  # the prompt's full blocks are there once
        return sum(map(pool.blocks_for, lengths)) - shared - pool.blocks_for(prompt)

    # Events

    def handle(self, event: Event) -> None:
        match event:
            case prefill.Arrived(request):
                self.prefills.arrive(request)
            case Finished(drive, time, Computed() as computed):
                self._timeline.record(Kind.COMPLETED, instance=self.name, drive=drive, time=time, **computed.counted)
                passage, step = self._take()
                if step is not None:
                    self._on_step_ended(time)
                    self.decodes.finish_step(step, computed, time)
                if passage is not None:
                    self._step_owed = True
                    self.prefills.finish_slice(passage, iter(computed.prefill), time)
            case Failed(drive, time, error):
                self._timeline.record(Kind.DRIVE_FAILED, instance=self.name, drive=drive, time=time, error=error)
                passage, step = self._take()
                if step is not None:
                    self._on_step_ended(time)
                    self.decodes.fail_step(step, error, alone=passage is None)
                if passage is not None:
                    self.prefills.fail_slice(passage, error, alone=step is None)
            case Parked(drive, time):
                passage, _ = self._take()
                assert passage is not None and passage.drive is not None
                gate = passage.drive.gate
                self._timeline.record(
                    Kind.PARKED, instance=self.name, drive=drive, time=time, boundary=gate.passed, operator=gate.last
                )
                self._step_owed = True
                self.prefills.park(passage)
            case Left() | prefill.BlocksFreed() | StepDue():
                pass

    def _take(self) -> tuple[Passage | None, Step | None]:
        passage, step = self._passage, self._step
        self._drive = self._passage = self._step = None
        self._parking = False
        return passage, step

    def _on_step_ended(self, time: float) -> None:
        self._step_seconds = time - self._step_started
        self._step_ended = time

    # What runs next

    def act(self, now: float) -> None:
        self.prefills.scheduler.decode_rows = self.decodes.running
        match self._placement:
            case Piggyback():
                self._piggyback(now)
            case Exclusive(decode_between):
                self._exclusive(now, decode_between)
            case Interleave() as interleave:
                self._interleave(now, interleave)
            case RequestLevel():
                self._request_level(now)

    def _piggyback(self, now: float) -> None:
        if self._drive is not None:
            self._park_for_a_newcomer(now)
            return
        apart = self.decodes.investigating
        step = self.decodes.next_step()  # decodes first: they take the blocks that they need
        passage = None if apart and step is not None else self._next_slice(now)  # no step: the suspects have left
        if passage is not None and passage.cohort.head.alone and step is not None:
            self.decodes.put_back(step)
            step = None
        self._run(passage, step)

    def _request_level(self, now: float) -> None:
        if self._drive is not None:
            self._park_for_a_newcomer(now)
            return
        step = self.decodes.next_step()
        self._run(None if step else self._next_slice(now), step)

    def _exclusive(self, now: float, decode_between: bool) -> None:
        if self._drive is not None:
            self._park_for_a_newcomer(now)
            return
        step = self.decodes.next_step() if decode_between and self._step_owed else None
        self._step_owed = False
        passage = None if step else self._next_slice(now)
        if passage is None and step is None:
            step = self.decodes.next_step()
        self._run(passage, step)

    def _interleave(self, now: float, interleave: Interleave) -> None:
        due = self._step_due(interleave)
        if self._drive is None:
            step = self.decodes.next_step() if due <= now else None
            passage = None if step else self._next_slice(now)
            if passage is None and step is None:
                step = self.decodes.next_step()
            self._run(passage, step)
        elif self._passage is not None and not self._parking and due <= now and self._gives_way(interleave, now):
            self._park()
        else:
            self._park_for_a_newcomer(now)
        if self._passage is not None and not self._parking:
            delay = self._step_due(interleave) - now
            # Overdue, and the prefill goes on all the same: it is asked again about a step's time later.
            self._set_alarm(delay if delay > 0 else max(self._step_seconds, interleave.quantum))

    def _step_due(self, interleave: Interleave) -> float:
        """When a prefill must be asked to pull over for the next decode step, not before it has had its quantum. It may
        be a whole layer away from where it can."""
        due = self.decodes.next_token_due(interleave.patience) - self._step_seconds - self._layer_seconds
        return max(due, self._step_ended + interleave.quantum)

    def _gives_way(self, interleave: Interleave, now: float) -> bool:
        """Whether the running prefill is parked for a step that is due."""
        if interleave.yields == "ttft":
            return True
        cohort = self._passage.cohort if self._passage else None
        if cohort is None or cohort.abandoned:
            return True
        self.prefills.report_progress()
        slack = cohort.head.deadline - now - cohort.remaining
        return not 0 < slack < self._step_seconds  # in time now, late after the step

    def _set_alarm(self, delay: float) -> None:
        """Wake up when the step is due. The timer only wakes; `act` reads the clock."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if delay < float("inf"):
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(delay, 0.0005), lambda: self.post(StepDue()))

    def _next_slice(self, now: float) -> Passage | None:
        """The scheduler's choice, while the device is free."""
        decision = self.prefills.decide(now)
        assert decision.park is None
        cohort = decision.start or decision.resume
        return None if cohort is None else self.prefills.passage(cohort)

    def _park_for_a_newcomer(self, now: float) -> None:
        """While a prefill runs alone, the scheduler may want it to pull over for a more urgent one."""
        if self._drive is None or self._passage is None or self._step is not None:
            return
        if not self._parking:
            decision = self.prefills.decide(now)
            assert decision.start is None and decision.resume is None
            if decision.park is not None:
                self._park()
        if self._passage.cohort.abandoned:
            abandon(self._drive)  # no preemption, so the system's level does not apply

    def _park(self) -> None:
        assert self._drive is not None and self._passage is not None
        self._parking = True
        self._timeline.record(Kind.PARK_REQUESTED, instance=self.name, drive=self._drive.id)
        self.prefills.scheduler.on_park_requested()
        park(self._drive)

    def _run(self, passage: Passage | None, step: Step | None) -> None:
        """One pass over a slice of prefill, a decode step, or both; or the rest of one that was parked."""
        self._passage, self._step = passage, step
        if passage is not None:
            self._layer_seconds = passage.cohort.predicted / self._num_layers
        if step is not None:
            self._step_started = self._now()
        if passage is not None and passage.drive is not None:
            self._drive = passage.drive
            self._timeline.record(Kind.RESUMED, instance=self.name, drive=passage.drive.id)
            self.executor.resume(passage.drive)
        elif passage is not None or step is not None:
            self._drive = self._start(passage, step)

    def _start(self, passage: Passage | None, step: Step | None) -> Drive:
        first, last = passage.cohort.layers if passage else (0, 0)
        work = Work(
            self._num_layers,
            prefill=self.prefills.parts(passage) if passage else (),
            decode=step.parts if step else (),
            first=first,
            last=last,
            carried=passage.carried if passage else Carried(),
            before=step.moves if step else (),
        )
        level = Preempt.NEVER if step else self.prefills.scheduler.system.preempt
        drive = self.executor.prepare(self._ids, work, level)
        self._ids += 1
        prefilled = tuple(share.request.id for share in passage.cohort.shares) if passage else ()
        decoded = tuple(choice.request.id for choice in step.choices) if step else ()
        if passage is not None and step is None:
            passage.drive = drive  # it may be parked, and resumed later
        self._timeline.record(
            Kind.STARTED,
            instance=self.name,
            drive=drive.id,
            phase="both" if passage and step else "prefill" if passage else "decode",
            requests=prefilled + decoded,
            rows=tuple(len(part.tokens) for part in work.prefill),
            decodes=len(decoded),
            tokens=work.rows,
            layers=(first, last),
        )
        self.executor.start(drive)
        return drive
