"""The proxy stands before the instances: prefills go round robin, hand-overs to a decode instance with room.

Where no decode instance has room the request waits, first come first served, with its blocks where they are: the
prefill side fills up and takes no more. That is the back-pressure; nothing is lost and nothing is copied twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

from engine.output import Choice
from kv.cache import KVCache
from kv.pool import Quota
from kv.table import BlockTable
from scheduling.request import Request, State


class Instance(Protocol):
    """What every instance offers."""

    @property
    def name(self) -> str: ...

    def release(self, request: Request) -> None:
        """The request was ended from outside: let go of what is held for it."""
        ...


class TakesPrefills(Instance, Protocol):
    def submit(self, request: Request) -> None: ...


class TakesDecodes(Instance, Protocol):
    @property
    def quota(self) -> Quota: ...

    def has_room(self, request: Request, table: BlockTable) -> bool: ...

    def admit(self, request: Request, table: BlockTable, source: KVCache, choices: Sequence[Choice]) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class Handover:
    """A complete prompt on its way to a decode instance. `choices` have their first token each."""

    request: Request
    table: BlockTable
    source: KVCache
    choices: list[Choice]


class Proxy:
    """`on_wait(request)` and `on_admitted(request, instance name)` tell of the two ends of a hand-over.

    `colocated`: an instance that prefills also decodes what it has prefilled.
    """

    def __init__(
        self, prefills: Sequence[TakesPrefills], decodes: Sequence[TakesDecodes], *, colocated: bool = False
    ) -> None:
        self.on_wait: Callable[[Request], None]
        self.on_admitted: Callable[[Request, str], None]
        self._decodes = decodes
        self._colocated = colocated
        self._next_prefill = cycle(prefills)
        self._next_decode = cycle(range(len(decodes)))
        self._where: dict[int, Instance] = {}  # by request id
        self._waiting: deque[Handover] = deque()
        for instance in decodes:
            instance.quota.on_freed.append(self._hand_over_waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting

    def submit(self, request: Request) -> None:
        instance = next(self._next_prefill)
        self._where[request.id] = instance
        instance.submit(request)

    def hand_over(self, handover: Handover) -> None:
        origin = self._where.pop(handover.request.id)
        handover.request.state = State.HANDOVER
        if self._colocated:
            self._admit(handover, next(decode for decode in self._decodes if decode is origin))
            return
        self._waiting.append(handover)
        self._hand_over_waiting()
        if handover in self._waiting:
            self.on_wait(handover.request)

    def forget(self, request: Request) -> None:
        """The request has ended by itself, and its blocks are being freed."""
        self._where.pop(request.id, None)

    def release(self, request: Request) -> None:
        """The request was ended from outside: whoever holds blocks for it lets go of them."""
        instance = self._where.pop(request.id, None)
        if instance is not None:
            instance.release(request)
        for handover in [handover for handover in self._waiting if handover.request is request]:
            self._waiting.remove(handover)
            handover.table.free()

    def _hand_over_waiting(self) -> None:
        """FCFS: the first that finds no room keeps the others waiting, so that a large one is not starved."""
        while self._waiting and (instance := self._with_room(self._waiting[0])) is not None:
            self._admit(self._waiting.popleft(), instance)

    def _admit(self, handover: Handover, instance: TakesDecodes) -> None:
        self._where[handover.request.id] = instance
        self.on_admitted(handover.request, instance.name)
        instance.admit(handover.request, handover.table, handover.source, handover.choices)

    def _with_room(self, handover: Handover) -> TakesDecodes | None:
        for _ in self._decodes:
            instance = self._decodes[next(self._next_decode)]
            if instance.has_room(handover.request, handover.table):
                return instance
        return None
