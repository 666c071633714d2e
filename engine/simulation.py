"""A whole deployment in virtual time: the engine as it is, on simulated devices.

    rows = simulate(preset("flowprefill"), arrivals, Deployment(model="llama3-8b", hardware="a800-80g"))
    rows.results().total.ttft_attainment

Scheduler, proxy, instances, KV pools and timeline are the real ones; only the executors are simulated
(engine/simulated.py), by a cost model (models/costs.py) on a device (engine/hardware.py). Same arrivals, same bytes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.counting import Counting
from engine.deployment import Deployment
from engine.devices import Device
from engine.engine import Engine
from engine.errors import Refused
from engine.executor import Executor, Forwards
from engine.metrics import RequestRows
from engine.prompt import Blank
from engine.simulated import SimulatedExecutor
from engine.timeline import Sink
from engine.timing import Timing
from engine.virtual import Stalled, VirtualLoop
from models.costs import ModelCosts
from scheduling.presets import System
from scheduling.request import SLO, Sampling

__all__ = ["Arrival", "Deployment", "simulate"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: `time` in seconds from the start, lengths in tokens."""

    time: float
    prompt_tokens: int
    output_tokens: int
    label: str = ""
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        if not self.time >= 0:
            raise ValueError(f"arrival time must be 0 seconds or more, got {self.time}")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"prompt_tokens and output_tokens must be at least 1, got {self.prompt_tokens} and {self.output_tokens}"
            )


class Site(Protocol):
    """What `simulate` asks of a `Deployment`, or of this machine (engine/machine.py)."""

    @property
    def costs(self) -> ModelCosts: ...

    def engine_config(self, system: System) -> EngineConfig: ...

    def devices(self, system: System) -> list[Device]: ...

    def timing_of(self, instance: str) -> Timing: ...

    @property
    def shared(self) -> bool:
        """Whether all instances are on one machine, and slow each other down."""
        ...


def simulate(
    system: System,
    arrivals: Iterable[Arrival],
    deployment: Site,
    *,
    sinks: Sequence[Sink] = (),
    rows: RequestRows | None = None,
    counters: bool = False,
    on_start: Callable[[Engine], None] = lambda engine: None,
) -> RequestRows:
    """Play `arrivals`, in order of their times, against `system` until the last has ended.

    `rows`: one that hands them on keeps memory flat, however many requests there are. `counters`: whether the COMPLETED
    events say what was read and computed (engine/counters.py), for one of the sinks. `on_start(engine)` is called when
    its instances stand, before the first arrival: to watch them. ValueError for arrivals out of order.
    """
    loop = VirtualLoop()
    counting = Counting(deployment.costs) if counters else None

    executors: list[SimulatedExecutor] = []

    def make_executor(name: str, threads: int, forwards: Forwards) -> Executor:
        executor = SimulatedExecutor(loop, deployment.timing_of(name), counting)
        for other in executors if deployment.shared else ():
            executor.neighbours.append(other)
            other.neighbours.append(executor)
        executors.append(executor)
        return executor

    devices = deployment.devices(system)
    config = deployment.engine_config(system)
    engine = Engine(devices[0].model, config, devices=devices, clock=loop, make_executor=make_executor)
    rows = RequestRows() if rows is None else rows
    engine.timeline.add(rows)
    for sink in sinks:
        engine.timeline.add(sink)
    # Never done: the loop stalls when nothing is left to do. What goes wrong in a callback is raised through it.
    end: Any = loop.create_future()
    loop.set_exception_handler(lambda _, context: end.done() or end.set_exception(context["exception"]))
    with _old_objects_left_alone():
        loop.run_until_complete(engine.start())
        on_start(engine)
        _feed(loop, engine, iter(arrivals), 0.0)
        try:
            with contextlib.suppress(Stalled):
                loop.run_until_complete(end)
        finally:
            loop.run_until_complete(engine.stop())
            loop.close()
    return rows


def _feed(loop: VirtualLoop, engine: Engine, arrivals: Iterator[Arrival], after: float) -> None:
    """Submit the next arrival when it is due, and only then look at the one behind it."""
    arrival = next(arrivals, None)
    if arrival is None:
        return
    if arrival.time < after:
        raise ValueError(f"arrivals must be in order of time: one at {arrival.time} s follows one at {after} s")
    loop.call_at(arrival.time, _submit, loop, engine, arrival, arrivals)


def _submit(loop: VirtualLoop, engine: Engine, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
    prompt, sampling = Blank(arrival.prompt_tokens), Sampling(max_tokens=arrival.output_tokens, ignore_eos=True)
    with contextlib.suppress(Refused):  # it is in the rows, as a miss
        engine.submit(prompt, sampling=sampling, slo=arrival.slo, label=arrival.label, streamed=False)
    _feed(loop, engine, arrivals, arrival.time)


@contextlib.contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """The garbage collector would go through all of torch again and again: a sixth of the time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
