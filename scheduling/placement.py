"""Beside which decodes? Where prefills and decodes run, and how they share a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduling.preempt import Preempt


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """Prefill and decode instances of their own, with a hand-over of K and V between them (DistServe)."""


@dataclass(frozen=True, slots=True)
class Piggyback:
    """One instance. An iteration computes all decodes and at most one slice of prefill in one pass, which reads the
    weights once for both (Sarathi-Serve, Layered Prefill). Such a pass carries decodes, so it may not be parked inside.
    """


@dataclass(frozen=True, slots=True)
class Exclusive:
    """One instance. Prefills go first; decodes run when nobody waits for a prefill (vLLM V0).

    `decode_between`: a decode step also runs whenever a prefill has completed a slice or pulled over. FlowPrefill's own
    co-location is unpublished; this is our reading of it.
    """

    decode_between: bool = False


@dataclass(frozen=True, slots=True)
class Interleave:
    """One instance. A prefill runs alone and is parked when a decode step is due by the TBT targets.

    A decode step is due when starting it later would make some choice miss its target. Prefills get at least `quantum`
    seconds between two decode steps. Where both targets cannot be met, `yields` says which one gives way: "ttft" parks
    the prefill all the same, "tbt" lets it finish if the step would make its head late. Choices without a TBT target
    are due `patience` seconds after their last token.
    """

    quantum: float = 0.01
    yields: Literal["ttft", "tbt"] = "ttft"
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not self.quantum > 0:
            raise ValueError(f"interleave.quantum must be above 0 seconds, got {self.quantum}")
        if not self.patience > 0:
            raise ValueError(f"interleave.patience must be above 0 seconds, got {self.patience}")
        if self.yields not in ("ttft", "tbt"):
            raise ValueError(f"interleave.yields must be 'ttft' or 'tbt', got {self.yields!r}")


@dataclass(frozen=True, slots=True)
class RequestLevel:
    """One instance. A batch is prefilled and decoded to its end before the next one is admitted: static batching, as in
    FasterTransformer."""


Placement = Disaggregated | Piggyback | Exclusive | Interleave | RequestLevel


def refuse_impossible(placement: Placement, preempt: Preempt) -> None:
    """ValueError for a preemption level that the placement cannot have."""
    if isinstance(placement, Piggyback) and preempt.inside_a_forward:
        raise ValueError(
            f"preempt {preempt.name.lower()} is impossible with piggybacked decodes: a pass that carries decodes may "
            "not be parked inside; use never or slice"
        )
    if isinstance(placement, Interleave) and not preempt.inside_a_forward:
        raise ValueError(
            f"preempt {preempt.name.lower()} is impossible with interleaved decodes: the prefill has to be parked when "
            "a decode step is due; use layer, half_layer or operator"
        )
    if isinstance(placement, Interleave) and preempt == Preempt.RESTART:
        raise ValueError(
            "preempt restart is impossible with interleaved decodes: every decode step would make the prefill start "
            "over; use layer, half_layer or operator"
        )
    if isinstance(placement, RequestLevel) and preempt != Preempt.NEVER:
        raise ValueError(f"preempt {preempt.name.lower()} is impossible with request-level batches; use never")
