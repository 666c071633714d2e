"""Decode: continuous batching. One step gives every running choice its next token.

Admission is FCFS. On an instance of their own decodes reserve prompt + max_tokens at admission, so a choice that has
begun never runs out of blocks; beside prefills they take blocks as they grow. `Decodes` keeps the books,
`DecodeInstance` runs the steps. While a step runs, newcomers and leavers wait in the inbox; the next step sees them.
Steps are never parked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.executor import Drive, Executor, Failed, Finished, Parked, Reply, park
from engine.inbox import Inbox, Left
from engine.output import Choice
from engine.sampling import Sampled
from engine.timeline import Kind, Timeline
from engine.work import Computed, Move, Part, Repeated, Work
from kv.cache import KVCache
from kv.pool import Lease, Quota
from kv.table import BlockTable
from kv.transfer import copy_blocks
from scheduling.preempt import Preempt
from scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Admitted:
    choices: tuple[Choice, ...]


Event = Admitted | Left | Reply


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows that must be moved before the next step reads or writes them; the lease keeps their source as it is."""

    request: Request
    move: Move
    lease: Lease


@dataclass(frozen=True, slots=True)
class Step:
    """One token for each of `choices`, after `copies`; or, in a simulation, as many as `repeated` says."""

    choices: Sequence[Choice]
    copies: Sequence[Copy]
    parts: tuple[Part, ...] = ()
    repeated: Repeated | None = None

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(copy.move for copy in self.copies)


class Decodes:
    """Choices from admission to their last token: everything about decodes but the device.

    `on_token(choice, sampled, time)` takes each token and sets `choice.finish` when it was the last one.
    `on_failed(request, error)` ends a request whose forward pass raised.

    Where blocks are not reserved (`reserving` false) and a choice finds none to grow into, the latest request gives its
    blocks up and is computed again later: `on_recompute(request)`. The oldest is never the one, so some always go on.
    """

    def __init__(self, cache: KVCache, quota: Quota, max_batch: int, *, reserving: bool = True) -> None:
        self.quota = quota
        self.reserving = reserving
        self.on_recompute: Callable[[Request], None]
        self.on_token: Callable[[Choice, Sampled, float], None]
        self.on_failed: Callable[[Request, str], None]
        self._cache = cache
        self._max_batch = max_batch
        self._choices: list[Choice] = []  # in order of admission; the first `max_batch` take part in a step
        self._suspects: list[Choice] = []  # of a failed step: each is tried alone before anything else
        self._copies: list[Copy] = []  # for the next step
        self._stepping: Step | None = None  # running now, or about to
        self._leaving: list[Choice] = []  # have left, but the running step may still touch their blocks

    @property
    def idle(self) -> bool:
        return not self._choices

    @property
    def running(self) -> int:
        """Choices that take part in a step."""
        return min(len(self._choices), self._max_batch)

    @property
    def investigating(self) -> bool:
        """Whether the next step tries a member of a failed one: nothing else may share its pass."""
        return bool(self._suspects)

    def next_token_due(self, patience: float) -> float:
        """The moment by which some choice must have its next token, in seconds on the engine's clock.

        Those without a TBT target wait `patience` seconds after their last. Infinite if there is nothing to decode.
        """
        return min((c.token_at + (c.request.slo.tbt or patience) for c in self._choices), default=float("inf"))

    # Admission, at hand-over

    def cost(self, request: Request, table: BlockTable) -> int:
        """Blocks that must be free to take over a prefilled request with all its choices."""
        tokens = len(request.prompt) + (request.sampling.max_tokens if self.reserving else 0)
        whole = self.quota.pool.blocks_for(tokens)
        first = self.quota.cost_to_adopt(table, tokens) if self._same_pool(table) else whole
        return first + (request.sampling.n - 1) * (whole - len(request.prompt) // self.quota.block_size)

    def reserve(self, request: Request, table: BlockTable, source: KVCache, choices: Sequence[Choice]) -> None:
        """Take over `table`, whose rows lie in `source`, and reserve all that `choices` may come to need.

        On one device the table changes owner and nothing is copied. From another device, the next step copies the
        prompt's rows first, and a lease keeps them until then. Raises OutOfBlocks if the quota has less than `cost`.
        """
        prompt = len(request.prompt)
        tokens = prompt + (request.sampling.max_tokens if self.reserving else 0)
        if self._same_pool(table):
            self.quota.adopt(table, tokens)
        else:
            theirs, table = table, self.quota.allocate(tokens)
            copy = Move(partial(copy_blocks, source, theirs.blocks, self._cache, table.blocks, prompt), prompt)
            self._copies.append(Copy(request, copy, theirs.quota.pool.lease([theirs])))
            theirs.free()
        for choice in choices:
            choice.table = table if choice is choices[0] else table.fork(prompt, tokens)
            choice.cached = prompt

    def _same_pool(self, table: BlockTable) -> bool:
        return table.quota.pool is self.quota.pool

    # Comings and goings

    def admit(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            if choice.request.state.terminal or choice.finish is not None:
                choice.free()
            else:
                self._choices.append(choice)

    def leave(self, request: Request) -> None:
        for choice in [choice for choice in self._choices if choice.request is request]:
            self._remove(choice)
        self._drop_copies(request)

    def _remove(self, choice: Choice) -> None:
        if choice in self._choices:
            self._choices.remove(choice)
        step = self._stepping
        if step is not None and (choice in step.choices or any(c.request is choice.request for c in step.copies)):
            self._leaving.append(choice)
        else:
            choice.free()

    def _drop_copies(self, request: Request) -> None:
        """Copies not yet under way: their targets have been freed."""
        for copy in [copy for copy in self._copies if copy.request is request]:
            copy.lease.release()
            self._copies.remove(copy)

    # Steps

    def next_step(self) -> Step | None:
        """The next step's work; None if there is nothing to decode."""
        for choice in [choice for choice in self._choices if choice.finish is not None]:
            self._remove(choice)  # stopped from outside, by a stop string
        self._suspects = [choice for choice in self._suspects if choice in self._choices]
        candidates = [self._suspects.pop(0)] if self._suspects else self._choices
        choices = candidates[: self._max_batch] if self.reserving else self._grown(candidates)
        if not choices:
            return None
        copies, self._copies = self._copies, []
        for choice in choices:
            copies.extend(self._copy_on_write(choice))
        parts = tuple(Part(c.pending, c.cached, c.held.blocks, (c.next_draw,)) for c in choices)
        self._stepping = Step(choices, copies, parts)
        return self._stepping

    def put_back(self, step: Step) -> None:
        """The step is not run after all."""
        self._end_step()
        self._copies[:0] = step.copies

    def finish_step(self, step: Step, computed: Computed, time: float) -> None:
        """`time`: when it was done."""
        self._end_step()
        for copy in step.copies:
            copy.lease.release()
        for choice, (token,) in zip(step.choices, computed.decode, strict=True):
            choice.cached = choice.length
            choice.token_at = time
            if choice.finish is None and not choice.request.state.terminal:
                self.on_token(choice, token, time)
            if choice.finish is not None:
                self._remove(choice)

    def _end_step(self) -> None:
        self._stepping = None
        for choice in self._leaving:
            choice.free()
        self._leaving.clear()

    def fail_step(self, step: Step, error: str, *, alone: bool = True) -> None:
        """One bad request does not take its mates with it: each member of the step is tried once more, alone.

        `alone`: the pass computed nothing but this step.
        """
        self._end_step()
        self._copies[:0] = step.copies
        for copy in step.copies:
            if copy.request.state.terminal:
                self._drop_copies(copy.request)
        if len(step.choices) > 1 or not alone:
            self._suspects.extend(step.choices)
        else:
            request = step.choices[0].request
            self.on_failed(request, error)
            self.leave(request)

    def _grown(self, candidates: Sequence[Choice]) -> list[Choice]:
        """The first `max_batch` that find room. Who finds none leaves the place in the batch to others: an older
        request may stand behind, and is the one that never has to wait."""
        grown: list[Choice] = []
        for choice in tuple(candidates):
            if len(grown) == self._max_batch:
                break
            if choice in self._choices and self._grow(choice):
                grown.append(choice)
        return [choice for choice in grown if choice in self._choices]  # growing may have cost others theirs

    def _grow(self, choice: Choice) -> bool:
        """Room for the rows of the next step, at the expense of later requests if need be. False: not now."""
        while not choice.held.can_extend(choice.length):
            later = [other.request for other in self._choices if _age(other.request) > _age(choice.request)]
            if not later:
                return False  # the prefills hold the blocks; they will be done some time
            victim = max(later, key=_age)
            self.leave(victim)
            self.on_recompute(victim)
        choice.held.extend(choice.length)
        return True

    def _copy_on_write(self, choice: Choice) -> list[Copy]:
        """The copy of a block that this choice shares with its siblings and is about to write to, if there is one."""
        if not choice.held.copies_on_write:
            return []
        lease = self.quota.pool.lease([choice.held])
        pair = choice.held.writable(choice.cached)
        if pair is None:
            lease.release()
            return []
        return [Copy(choice.request, Move(partial(self._cache.copy_block, *pair)), lease)]


def _age(request: Request) -> tuple[float, int]:
    """Smaller for the older; never the same for two."""
    return request.arrival, request.id


class DecodeInstance(Inbox[Event]):
    """Decode steps on an executor of their own, one after the other."""

    def __init__(self, name: str, decodes: Decodes, executor: Executor, num_layers: int, timeline: Timeline) -> None:
        super().__init__()
        self.name = name
        self.decodes = decodes
        self.quota = decodes.quota
        self.executor = executor
        self._num_layers = num_layers
        self._timeline = timeline
        self._step: Step | None = None
        self._drive: Drive | None = None
        self._ids = 0
        executor.on_reply = self.post

    @property
    def idle(self) -> bool:
        return self._step is None and self.decodes.idle and self.quiet

    def release(self, request: Request) -> None:
        self.decodes.leave(request)
        self.post(Left())

    def has_room(self, request: Request, table: BlockTable) -> bool:
        return self.decodes.cost(request, table) <= self.quota.free

    def admit(self, request: Request, table: BlockTable, source: KVCache, choices: Sequence[Choice]) -> None:
        """Take over a prefilled request; its blocks belong to this instance at once."""
        self.decodes.reserve(request, table, source, choices)
        self.post(Admitted(tuple(choices)))

    def handle(self, event: Event) -> None:
        match event:
            case Admitted(choices):
                self.decodes.admit(choices)
            case Left():
                pass
            case Finished(drive, time, Computed() as computed):
                self._timeline.record(Kind.COMPLETED, instance=self.name, drive=drive, time=time, **computed.counted)
                self.decodes.finish_step(self._take_step(), computed, time)
            case Failed(drive, time, error):
                self._timeline.record(Kind.DRIVE_FAILED, instance=self.name, drive=drive, time=time, error=error)
                self.decodes.fail_step(self._take_step(), error)
            case Parked():
                raise AssertionError("a decode step was parked")

    def act(self, now: float) -> None:
        if self._step is not None:
            if self._step.repeated is not None:  # somebody has come or left: let the step under way be the last
                assert self._drive is not None
                park(self._drive)
            return
        if (step := self.decodes.next_step()) is None:
            return
        work = Work(self._num_layers, decode=step.parts, repeated=step.repeated, before=step.moves)
        drive = self.executor.prepare(self._ids, work, Preempt.SLICE)
        self._step, self._drive = step, drive
        self._ids += 1
        self._timeline.record(
            Kind.STARTED,
            instance=self.name,
            drive=drive.id,
            phase="decode",
            requests=tuple([choice.request.id for choice in step.choices]),
            tokens=len(step.choices),
        )
        self.executor.start(drive)

    def _take_step(self) -> Step:
        assert self._step is not None
        step, self._step = self._step, None
        return step
