"""The proxy stands before the instances: prefills go round robin, hand-overs to a decode instance with room.

Where no decode instance has room the request waits, first come first served, with its blocks where they are: the
prefill side fills up and takes no more. That is the back-pressure; nothing is lost and nothing is copied twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

from engine import decode, prefill
from engine.decode import DecodeInstance
from engine.output import Choice
from engine.prefill import PrefillInstance
from kv.cache import KVCache
from kv.table import BlockTable
from scheduling.request import Request, State


@dataclass(frozen=True, eq=False, slots=True)
class Handover:
    """A complete prompt on its way to a decode instance. `choices` have their first token each."""

    request: Request
    table: BlockTable
    source: KVCache
    choices: list[Choice]


class Proxy:
    """`on_wait(request)` and `on_admitted(request, instance name)` tell of the two ends of a hand-over."""

    def __init__(self, prefills: list[PrefillInstance], decodes: list[DecodeInstance]) -> None:
        self.on_wait: Callable[[Request], None]
        self.on_admitted: Callable[[Request, str], None]
        self._decodes = decodes
        self._next_prefill = cycle(prefills)
        self._next_decode = cycle(range(len(decodes)))
        self._where: dict[int, PrefillInstance | DecodeInstance] = {}  # by request id
        self._waiting: deque[Handover] = deque()
        for instance in decodes:
            instance.quota.on_freed.append(self._hand_over_waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting

    def submit(self, request: Request) -> None:
        instance = next(self._next_prefill)
        self._where[request.id] = instance
        instance.post(prefill.Arrived(request))

    def hand_over(self, handover: Handover) -> None:
        del self._where[handover.request.id]
        handover.request.state = State.HANDOVER
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
        if isinstance(instance, PrefillInstance):
            instance.post(prefill.Gone(request))
        elif isinstance(instance, DecodeInstance):
            instance.post(decode.Gone(request))
        for handover in [handover for handover in self._waiting if handover.request is request]:
            self._waiting.remove(handover)
            handover.table.free()

    def _hand_over_waiting(self) -> None:
        """FCFS: the first that finds no room keeps the others waiting, so that a large one is not starved."""
        while self._waiting:
            handover = self._waiting[0]
            instance = self._with_room(handover)
            if instance is None:
                return
            self._waiting.popleft()
            self._where[handover.request.id] = instance
            instance.admit(handover.request, handover.table, handover.source, handover.choices)
            self.on_admitted(handover.request, instance.name)

    def _with_room(self, handover: Handover) -> DecodeInstance | None:
        for _ in self._decodes:
            instance = self._decodes[next(self._next_decode)]
            if instance.has_room(handover.request, handover.table):
                return instance
        return None
