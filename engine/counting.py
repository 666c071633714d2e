"""Count a forward pass. All but the experts follows from its work; which experts it read is either measured, from the
routing that really happened, or expected, from the coverage model (models/coverage.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain

import torch

from engine.counters import Counters
from engine.work import Work, volume
from models.costs import ModelCosts, Operator, Volume


class Counting:
    """Counts the passes of one model."""

    def __init__(self, costs: ModelCosts) -> None:
        self._costs = costs
        operators = list(chain.from_iterable(costs.layers))
        self._experts = next((one for one in operators if one.name == "experts"), Operator("experts"))
        self._sparse = [any(one.name == "experts" for one in layer) for layer in costs.layers]
        self._between = lru_cache(maxsize=1024)(self._sum)

    def measured(self, work: Work, routed: Sequence[torch.Tensor]) -> Counters:
        """`routed`: where each expert's rows ended, int32 [experts], for every sparse layer of the pass in turn.

        Waits for the device: to be called when the pass is over.
        """
        shares = [0.0] * len(self._sparse)  # of its experts that each layer read
        if routed:
            ends = torch.stack(list(routed))
            used = ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1)) > 0
            crossed = range(work.first_crossed, work.first_crossed + work.layers_crossed)
            sparse = [layer for layer in crossed if self._sparse[layer]]
            for layer, share in zip(sparse, used.double().mean(dim=1).tolist(), strict=True):
                shares[layer] = share
        return self._count(
            work, work.decoded, lambda first, last, _: sum(shares[first:last]) * self._experts.weight_bytes
        )

    def expected(self, work: Work, steps: int = 1) -> Counters:
        """By the coverage model; of so many decode steps in a row, from each to the next of which contexts grow."""

        def covered(first: int, last: int, rows: Volume) -> float:
            return sum(self._sparse[first:last]) * self._experts.weights_read(rows)

        decode = work.decoded
        one = self._count(work, decode, covered)
        if steps == 1:
            return one
        return (one + self._count(work, decode.later(steps - 1), covered)) * (steps / 2)

    def _count(self, work: Work, decode: Volume, expert_bytes: Callable[[int, int, Volume], float]) -> Counters:
        """One pass: decode rows cross all layers, prefill rows theirs.

        `expert_bytes(first, last, rows)`: what these rows read of the experts of the layers [first, last).
        """
        prefill, head = volume(work.prefill), self._costs.head
        drawn = Volume(prefill.drawn + decode.drawn)
        flops, moved = head.flops(drawn), head.bytes(drawn) if drawn.rows else 0.0
        kv = experts = charged = 0.0
        for first, last, prefilled in (
            (0, work.first, Volume()),
            (work.first, work.last, prefill),
            (work.last, work.layers, Volume()),
        ):
            rows = prefilled + decode
            if first == last or not rows.rows:
                continue
            layers = self._between(first, last)
            read = expert_bytes(first, last, rows)
            flops += layers.flops(rows)
            moved += layers.bytes(rows) + read
            kv += layers.bytes_per_key * rows.keys
            experts += read
            charged += read * prefilled.rows / rows.rows
        ranks = self._costs.tp
        return Counters(1, ranks * flops, ranks * moved, ranks * kv, ranks * experts, ranks * charged)

    def _sum(self, first: int, last: int) -> Operator:
        """The layers [first, last) as if they were one operator, the weights of their experts left out."""
        operators = list(chain.from_iterable(self._costs.layers[first:last]))
        return Operator(
            "layers",
            flops_per_row=sum(one.flops_per_row for one in operators),
            flops_per_pair=sum(one.flops_per_pair for one in operators),
            weight_bytes=sum(one.weight_bytes for one in operators if one.name != "experts"),
            bytes_per_row=sum(one.bytes_per_row for one in operators),
            bytes_per_key=sum(one.bytes_per_key for one in operators),
        )
