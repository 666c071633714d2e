"""A system is five answers: order, batch, plan, preempt, placement. The published ones, by name.

An ablation changes one answer and keeps four:

    dataclasses.replace(PRESETS["flowprefill"], preempt=Preempt.LAYER)
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.batch import Batch, FillBudget, SLOAware
from scheduling.order import FCFS, SEDF, Order
from scheduling.placement import Disaggregated, Placement, refuse_impossible
from scheduling.plan import Chunked, Plan, Whole
from scheduling.preempt import Preempt


@dataclass(frozen=True, slots=True)
class System:
    order: Order
    batch: Batch
    plan: Plan
    preempt: Preempt
    placement: Placement = Disaggregated()

    def __post_init__(self) -> None:
        refuse_impossible(self.placement, self.preempt)


PRESETS: dict[str, System] = {
    "distserve": System(FCFS(), FillBudget(4096), Whole(), Preempt.NEVER),
    "flowprefill-layer": System(SEDF(), SLOAware(4096), Whole(), Preempt.LAYER),
    # As in the paper.
    "flowprefill": System(SEDF(), SLOAware(4096), Chunked(8192, above=32768), Preempt.OPERATOR),
    # As in the authors' released code.
    "flowprefill-release": System(
        SEDF(),
        SLOAware(2048, margin=0.1, on_misfit="skip", on_late="stop", long_head_alone=True),
        Chunked(8192),
        Preempt.HALF_LAYER,
    ),
}


def preset(name: str) -> System:
    """The system called `name`. Raises ValueError naming those there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"no system called {name!r}; there are: {', '.join(PRESETS)}") from None
