"""The engine on virtual time for tests of scheduling: exact operator times, systems that differ in their level."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import poison_freed_blocks

from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.lab import Lab
from engine.timeline import Event, Kind
from scheduling.batch import Alone, SLOAware
from scheduling.order import SEDF, Order
from scheduling.plan import Chunked, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.request import Request, Sampling

ONE_TOKEN = Sampling(max_tokens=1)
PER_OPERATOR, PER_TOKEN = 2**-13, 2**-13  # binary fractions: times add up exactly


def at_levels(*levels: Preempt) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("level", levels, ids=lambda level: level.name.lower())


at_every_level = at_levels(*Preempt)
inside_a_forward = at_levels(*(level for level in Preempt if level.inside_a_forward))
where_prompts_may_be_cut = at_levels(*(level for level in Preempt if level != Preempt.RESTART))


def flowprefill(level: Preempt, order: Order | None = None, *, chunk: int | None = None, alone: bool = True) -> System:
    """FlowPrefill's system at another level; prompts alone or batched, whole or in chunks."""
    plan = Whole() if chunk is None else Chunked(chunk)
    return System(order or SEDF(), Alone() if alone else SLOAware(4096), plan, level)


@contextmanager
def laboratory(
    system: System, *, layers: int = 2, context: int = 4096, num_blocks: int = 1024, block_size: int = 16
) -> Iterator[Lab]:
    """A lab that poisons freed blocks, and in the end has served everyone and holds nothing. Prefills get half of the
    blocks."""
    model = FakeModel(num_layers=layers, context=context)
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size)
    with Lab(system, model=model, config=config, per_operator=PER_OPERATOR, per_token=PER_TOKEN) as lab:
        poison_freed_blocks(lab)
        yield lab
        lab.run()
        lab.check()
        assert lab.engine.idle


def operator(tokens: int) -> float:
    """Seconds of one operator over so many rows; a layer has five."""
    return PER_OPERATOR + PER_TOKEN * tokens


def of_prefill(event: Event) -> bool:
    return event.instance is not None and event.instance.startswith("prefill")


def started(lab: Lab, request: Request) -> float:
    """When a pass with this request in it was first started."""
    passes = (event for event in lab.events if event.kind == Kind.STARTED and of_prefill(event))
    return next(event.time for event in passes if request.id in event.data["requests"])


def first_token(lab: Lab, request: Request) -> float:
    return next(event.time for event in lab.events if event.kind == Kind.FIRST_TOKEN and event.request is request)


def parks(lab: Lab) -> int:
    return sum(event.kind == Kind.PARKED for event in lab.events)
