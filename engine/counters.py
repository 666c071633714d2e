"""What forward passes read and compute: the weights of experts above all, which cutting along layers is to save.

Counting has to be asked for (engine/counting.py does it): then the COMPLETED event of every drive carries the fields of
`Counters` as data, and `Account` adds them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from engine.timeline import Event, Kind


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one drive, over all ranks. A drive that is given up is not counted, however far it came.

    passes                forward passes: more than one where a simulation runs several decode steps in one go
    flops                 of matrix products and attention
    bytes                 read and written in all: weights, activations, K and V
    kv_bytes              K and V that attention read: each sequence's once a layer and pass
    expert_bytes          weights of the experts that some row was routed to: each once a layer and pass
    prefill_expert_bytes  of these, what is charged to prefill rows: in every layer, all rows there share them evenly
    """

    passes: float = 0
    flops: float = 0.0
    bytes: float = 0.0
    kv_bytes: float = 0.0
    expert_bytes: float = 0.0
    prefill_expert_bytes: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Counters:
        return Counters(*(factor * value for value in astuple(self)))

    @property
    def data(self) -> dict[str, Any]:
        """As an event carries it."""
        return asdict(self)


class Account:
    """A sink: `total` of all completed drives, and the expert bytes of each request, by its id.

    A request is charged by rows: the decode rows of a drive share what is not charged to prefill rows evenly, the
    prefill rows share the rest.
    """

    def __init__(self) -> None:
        self.total = Counters()
        self.expert_bytes: dict[int, float] = defaultdict(float)
        self._decode_rows = self._decode_passes = 0.0
        self._running: dict[tuple[str | None, int | None], dict[str, Any]] = {}

    @property
    def mean_decode_batch(self) -> float:
        """Rows in a pass that decodes, on average; 0 if there was none."""
        return self._decode_rows / self._decode_passes if self._decode_passes else 0.0

    def __call__(self, event: Event) -> None:
        drive = (event.instance, event.drive)
        if event.kind == Kind.STARTED:
            self._running[drive] = event.data
        elif event.kind == Kind.COMPLETED:
            started = self._running.pop(drive)
            if event.data:
                self._add(started, Counters(**event.data))
        elif event.kind in (Kind.DRIVE_FAILED, Kind.CLOSED):
            self._running.pop(drive, None)

    def _add(self, started: dict[str, Any], counters: Counters) -> None:
        self.total += counters
        requests, rows = started["requests"], started.get("rows", ())  # those that prefill come first
        self._charge(requests[: len(rows)], rows, counters.prefill_expert_bytes)
        decodes = requests[len(rows) :]
        self._charge(decodes, (1,) * len(decodes), counters.expert_bytes - counters.prefill_expert_bytes)
        if decodes:
            self._decode_passes += counters.passes
            self._decode_rows += counters.passes * len(decodes)

    def _charge(self, requests: Sequence[int], rows: Sequence[int], expert_bytes: float) -> None:
        for request, count in zip(requests, rows, strict=True):
            self.expert_bytes[request] += expert_bytes * count / sum(rows)
