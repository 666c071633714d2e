"""Stoppable where? The ladder of preemption levels, which is what an ablation of FlowPrefill turns."""

from __future__ import annotations

from enum import IntEnum

# The last operators of a layer, one for each family of MLP (dense, mixture of experts).
_LAYER_ENDS = frozenset({"down_proj", "combine"})
_HALF_LAYER_ENDS = _LAYER_ENDS | {"o_proj"}


class Preempt(IntEnum):
    """Where a forward pass may be parked, from coarse to fine. Each level also stops wherever the coarser ones do."""

    NEVER = 0
    SLICE = 1  # between slices; nothing inside a forward pass
    LAYER = 2
    HALF_LAYER = 3  # after attention's output projection and after the MLP
    OPERATOR = 4
    RESTART = 5  # at any operator, and the work is thrown away: the request-level baseline

    def stops_at(self, operator: str) -> bool:
        """Whether a drive may be parked at the boundary behind `operator`."""
        if self >= Preempt.OPERATOR:
            return True
        if self == Preempt.HALF_LAYER:
            return operator in _HALF_LAYER_ENDS
        return self == Preempt.LAYER and operator in _LAYER_ENDS

    @property
    def inside_a_forward(self) -> bool:
        """Whether a running drive can be parked at all at this level."""
        return self >= Preempt.LAYER
