"""The decode instance: continuous batching. One step gives every running choice its next token.

Admission is FCFS and reserves prompt + max_tokens, so a choice that has begun never runs out of blocks. Steps are never
parked. While a step runs, newcomers and leavers wait in the inbox; the next step sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from engine.executor import Drive, Executor, Failed, Finished, Parked, Reply
from engine.forward import LanguageModel, forward
from engine.output import Choice
from engine.sampling import Draw, Sampled
from engine.timeline import Kind, Timeline
from kv.cache import KVCache
from kv.pool import Lease, Quota
from kv.table import BlockTable
from kv.transfer import copy_blocks
from models.batch import Batch
from scheduling.preempt import Preempt
from scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Admitted:
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """Let go of the request's blocks. Unknown or already gone: no matter."""

    request: Request


Event = Admitted | Gone | Reply


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows that must be moved before the next step reads or writes them; the lease keeps their source as it is."""

    request: Request
    run: Callable[[], None]
    lease: Lease


@dataclass(frozen=True, slots=True)
class _Step:
    choices: list[Choice]
    copies: list[_Copy]
    lease: Lease


class DecodeInstance:
    """`on_token(choice, sampled, time)` takes each token and sets `choice.finish` when it was the last one.
    `on_failed(request, error)` ends a request whose forward pass raised."""

    def __init__(
        self,
        name: str,
        executor: Executor,
        model: LanguageModel,
        cache: KVCache,
        quota: Quota,
        timeline: Timeline,
        max_batch: int,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.name = name
        self.executor = executor
        self.quota = quota
        self.on_token: Callable[[Choice, Sampled, float], None]
        self.on_failed: Callable[[Request, str], None]
        self._model = model
        self.cache = cache
        self._timeline = timeline
        self._max_batch = max_batch
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._choices: list[Choice] = []  # in order of admission; the first `max_batch` take part in a step
        self._suspects: list[Choice] = []  # of a failed step: each is tried alone before anything else
        self._copies: list[_Copy] = []  # for the next step
        self._step: _Step | None = None
        self._ids = count()
        executor.on_reply = self._inbox.put_nowait

    @property
    def idle(self) -> bool:
        return self._step is None and not self._choices and self._inbox.empty()

    def post(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    # Admission, at hand-over

    def cost(self, request: Request, table: BlockTable) -> int:
        """Blocks this instance needs free to take over a prefilled request with all its choices."""
        tokens = len(request.prompt) + request.sampling.max_tokens
        whole = self.quota.pool.blocks_for(tokens)
        first = self.quota.cost_to_adopt(table, tokens) if self._same_pool(table) else whole
        return first + (request.sampling.n - 1) * (whole - len(request.prompt) // self.quota.block_size)

    def has_room(self, request: Request, table: BlockTable) -> bool:
        return self.cost(request, table) <= self.quota.free

    def admit(self, request: Request, table: BlockTable, source: KVCache, choices: list[Choice]) -> None:
        """Take over `table`, whose rows lie in `source`, and reserve all that `choices` may come to need.

        On one device the table changes owner and nothing is copied. From another device, the next step copies the
        prompt's rows first, and a lease keeps them until then. Raises OutOfBlocks unless `has_room`.
        """
        prompt = len(request.prompt)
        tokens = prompt + request.sampling.max_tokens
        if self._same_pool(table):
            self.quota.adopt(table, tokens)
        else:
            theirs, table = table, self.quota.allocate(tokens)
            copy = partial(copy_blocks, source, theirs.blocks, self.cache, table.blocks, prompt)
            self._copies.append(_Copy(request, copy, theirs.quota.pool.lease([theirs])))
            theirs.free()
        for choice in choices:
            choice.table = table if choice is choices[0] else table.fork(prompt, tokens)
        self.post(Admitted(tuple(choices)))

    def _same_pool(self, table: BlockTable) -> bool:
        return table.quota.pool is self.quota.pool

    # Events

    async def run(self) -> None:
        """Handle events for ever: all that have come in, then the next step if none is under way."""
        while True:
            self._handle(await self._inbox.get())
            while not self._inbox.empty():
                self._handle(self._inbox.get_nowait())
            if self._step is None and self._choices:
                self._start_step()

    def _handle(self, event: Event) -> None:
        match event:
            case Admitted(choices):
                for choice in choices:
                    if choice.request.state.terminal or choice.finish is not None:
                        self._free(choice)
                    else:
                        self._choices.append(choice)
            case Gone(request):
                for choice in [choice for choice in self._choices if choice.request is request]:
                    self._leave(choice)
                self._drop_copies(request)
            case Finished(drive, time, sampled):
                self._on_finished(drive, time, sampled)
            case Failed(drive, time, error):
                self._on_failed(drive, time, error)
            case Parked():
                raise AssertionError("a decode step was parked")

    def _on_finished(self, drive: int, time: float, sampled: list[Sampled]) -> None:
        self._timeline.record(Kind.COMPLETED, instance=self.name, drive=drive, time=time)
        step = self._retire()
        for copy in step.copies:
            copy.lease.release()
        for choice, token in zip(step.choices, sampled, strict=True):
            if choice.finish is None and not choice.request.state.terminal:
                self.on_token(choice, token, time)
            if choice.finish is not None:
                self._leave(choice)

    def _on_failed(self, drive: int, time: float, error: str) -> None:
        """One bad request does not take its mates with it: each member of the step is tried once more, alone."""
        self._timeline.record(Kind.DRIVE_FAILED, instance=self.name, drive=drive, time=time, error=error)
        step = self._retire()
        self._copies[:0] = step.copies
        for copy in step.copies:
            if copy.request.state.terminal:
                self._drop_copies(copy.request)
        if len(step.choices) > 1:
            self._suspects.extend(step.choices)
            return
        request = step.choices[0].request
        self.on_failed(request, error)
        self._handle(Gone(request))

    def _leave(self, choice: Choice) -> None:
        if choice in self._choices:
            self._choices.remove(choice)
        self._free(choice)

    def _free(self, choice: Choice) -> None:
        assert choice.table is not None
        choice.table.free()

    def _drop_copies(self, request: Request) -> None:
        """Copies not yet under way: their targets have been freed."""
        for copy in [copy for copy in self._copies if copy.request is request]:
            copy.lease.release()
            self._copies.remove(copy)

    def _retire(self) -> _Step:
        assert self._step is not None
        step, self._step = self._step, None
        step.lease.release()
        return step

    # The next step

    def _start_step(self) -> None:
        for choice in [choice for choice in self._choices if choice.finish is not None]:
            self._leave(choice)  # stopped from outside, by a stop string
        if not self._choices:
            return
        choices = self._choices[: self._max_batch]
        self._suspects = [choice for choice in self._suspects if choice in self._choices]
        if self._suspects:
            choices = [self._suspects.pop(0)]
        copies, self._copies = self._copies, []
        for choice in choices:
            copies.extend(self._copy_on_write(choice))
        tables = [choice.table for choice in choices if choice.table is not None]
        batch = Batch.build(
            self.cache,
            ((choice.tokens[-1:], choice.cached, table.blocks) for choice, table in zip(choices, tables, strict=True)),
        )
        draws = [Draw(row, c.request.sampling, c.request.seed, c.index, c.cached + 1) for row, c in enumerate(choices)]
        drive = next(self._ids)
        gate = self.executor.gate(Preempt.NEVER)
        before = [copy.run for copy in copies]
        coroutine = forward(self._model, batch, gate, range(len(choices)), draws, before)
        self._step = _Step(choices, copies, self.quota.pool.lease(tables))
        self._timeline.record(
            Kind.STARTED,
            instance=self.name,
            drive=drive,
            phase="decode",
            requests=tuple(choice.request.id for choice in choices),
            tokens=len(choices),
        )
        self.executor.start(Drive(drive, coroutine, gate, rows=len(choices)))

    def _copy_on_write(self, choice: Choice) -> list[_Copy]:
        """The copy of a block that this choice shares with its siblings and is about to write to, if there is one."""
        assert choice.table is not None
        lease = choice.table.quota.pool.lease([choice.table])
        pair = choice.table.writable(choice.cached)
        if pair is None:
            lease.release()
            return []
        return [_Copy(choice.request, partial(self.cache.copy_block, *pair), lease)]
