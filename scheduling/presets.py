"""A system is five answers: order, batch, plan, preempt, placement. The published ones, by name.

An ablation changes one answer and keeps four:

    dataclasses.replace(PRESETS["flowprefill"], preempt=Preempt.LAYER)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduling.batch import Alone, Batch, FillBudget, FillChunks, FillSequences, SLOAware
from scheduling.layered import Layered
from scheduling.order import FCFS, SEDF, Order
from scheduling.placement import (
    Disaggregated,
    Exclusive,
    Interleave,
    Piggyback,
    Placement,
    RequestLevel,
    refuse_impossible,
)
from scheduling.plan import Chunked, Plan, Whole
from scheduling.preempt import Preempt


@dataclass(frozen=True, slots=True)
class System:
    order: Order
    batch: Batch
    plan: Plan
    preempt: Preempt
    placement: Placement = field(default_factory=Disaggregated)

    def __post_init__(self) -> None:
        """ValueError, with the reason, for answers that contradict each other."""
        refuse_impossible(self.placement, self.preempt)
        _refuse_impossible_cuts(self.batch, self.plan, self.preempt)

    @property
    def colocated(self) -> bool:
        """Whether it prefills and decodes on the same instances."""
        return not isinstance(self.placement, Disaggregated)


def _refuse_impossible_cuts(batch: Batch, plan: Plan, preempt: Preempt) -> None:
    if isinstance(batch, FillChunks) and plan.largest_share > batch.budget:
        raise ValueError(
            f"{batch} is impossible with {plan}: it cuts prompts to fill a pass of {batch.budget} tokens, and the plan "
            f"gives a prompt {plan.largest_share} at once; use chunks of at most {batch.budget} tokens, or FillBudget"
        )
    if preempt == Preempt.RESTART and not isinstance(plan, Whole):
        raise ValueError(
            f"preempt restart is impossible with {plan}: it gives up a whole prefill, and of one that is cut it would "
            "keep the slices done; use the plan whole (chunk=none), or another level"
        )


PRESETS: dict[str, System] = {
    # DistServe (OSDI 24): prefill queue of the released code.
    "distserve": System(FCFS(), FillBudget(4096), Whole(), Preempt.NEVER),
    # FlowPrefill's baselines "DistServe-CP2K" and "-CP8K". The paper does not say who comes first between two chunks:
    # here whoever arrived first. With order=s-edf the most urgent does, and if preempt=never is added, what has begun
    # goes before what has not, as in vLLM.
    "distserve-cp2k": System(FCFS(), FillChunks(2048), Chunked(2048), Preempt.SLICE),
    "distserve-cp8k": System(FCFS(), FillChunks(8192), Chunked(8192), Preempt.SLICE),
    # Preemption of whole requests: what was computed is lost.
    "restart": System(SEDF(), Alone(), Whole(), Preempt.RESTART),
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
    # Co-located, in the order in which the field found them. FasterTransformer: request-level batches.
    "static": System(FCFS(), FillSequences(32), Whole(), Preempt.NEVER, RequestLevel()),
    # Orca (OSDI 22): iteration-level batches, whole prompts beside decodes.
    "orca": System(FCFS(), FillSequences(256), Whole(), Preempt.NEVER, Piggyback()),
    # vLLM before V1.
    "prefill-first": System(FCFS(), FillBudget(8192), Whole(), Preempt.NEVER, Exclusive()),
    # Sarathi-Serve (OSDI 24): stall-free batching; also the chunked prefill that Layered Prefill compares with.
    "sarathi": System(FCFS(), FillChunks(512), Chunked(512), Preempt.SLICE, Piggyback()),
    # vLLM V1: the same with a larger budget. (Its own default depends on the GPU.)
    "vllm-cp2k": System(FCFS(), FillChunks(2048), Chunked(2048), Preempt.SLICE, Piggyback()),
    # FlowPrefill's co-location is unpublished: prefills first, a decode step between cohorts and at parks.
    "flowprefill-colocated": System(SEDF(), SLOAware(4096), Whole(), Preempt.OPERATOR, Exclusive(decode_between=True)),
    # Ours: the prefill is parked when a decode step is due.
    "layby-colocated": System(SEDF(), SLOAware(4096), Whole(), Preempt.OPERATOR, Interleave()),
    # Layered Prefill (MLSys 26): one group of layers an iteration, 512 tokens' worth of work.
    "layered": System(FCFS(), FillBudget(8192), Layered(512), Preempt.SLICE, Piggyback()),
    # Its hybrid for very long prompts: chunks of 8,192 tokens, each crossing the groups.
    "layered-chunked": System(
        FCFS(), FillChunks(8192, decodes_count=False), Layered(512, chunk=8192), Preempt.SLICE, Piggyback()
    ),
    # What neither paper has: between two groups the cohort's state is saved anyway, so an urgent one may pass.
    "layered-s-edf": System(SEDF(), SLOAware(8192), Layered(512), Preempt.SLICE, Piggyback()),
}


def preset(name: str) -> System:
    """The system called `name`. Raises ValueError naming those there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"no system called {name!r}; there are: {', '.join(PRESETS)}") from None
