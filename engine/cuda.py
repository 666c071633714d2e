"""The gate on CUDA. Kernels are queued ahead of the device, so a gate must bound the queue.

At each boundary an event is recorded, and the host waits for the event `run_ahead` boundaries back: the device never
runs dry, and a park request never waits for more than `run_ahead` + 1 operators. 0 is a full wait at every boundary,
which is what the FlowPrefill authors' code does.
"""

from __future__ import annotations

from collections import deque

import torch

from engine.gate import Gate
from scheduling.preempt import Preempt


class CudaGate(Gate):
    __slots__ = ("_events", "_run_ahead")

    def __init__(self, level: Preempt = Preempt.OPERATOR, run_ahead: int = 1) -> None:
        super().__init__(level)
        if run_ahead < 0:
            raise ValueError(f"run_ahead must be 0 boundaries or more, got {run_ahead}")
        self._run_ahead = run_ahead
        self._events: deque[torch.cuda.Event] = deque()

    def operator(self, name: str) -> Gate:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        if len(self._events) > self._run_ahead:
            self._events.popleft().synchronize()
        return super().operator(name)

    def drain(self) -> None:
        torch.cuda.current_stream().synchronize()
