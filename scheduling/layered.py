"""Cut along layers: Layered Prefill's plan (arXiv 2510.08055, section on scheduling).

Chunked prefill reads every expert again for every chunk. A layered prefill keeps the prompt whole and cuts the model:
in each iteration one group of layers computes prefill and decodes together, all others decodes only. After G iterations
each layer has seen the prompt exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from scheduling.plan import Group
from scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Layered:
    """G(L) = max(1, ceil(L / `work`)) groups for a cohort of L tokens, never more than there are layers.

    `work`: tokens of whole-model work in an iteration (the paper's 512 matches a chunk of 512). `fixed_groups` sets G
    instead of deriving it. Prompts longer than `chunk`, if one is given, are cut along tokens as well, each chunk
    crossing the groups (the paper's hybrid for very long prompts).
    """

    work: int = 512
    chunk: int | None = None
    fixed_groups: int | None = None

    def __post_init__(self) -> None:
        if self.work < 1:
            raise ValueError(f"layered.work must be at least 1 token, got {self.work}")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"layered.chunk must be at least 1 token, got {self.chunk}")
        if self.fixed_groups is not None and self.fixed_groups < 1:
            raise ValueError(f"layered.fixed_groups must be at least 1, got {self.fixed_groups}")

    @property
    def largest_share(self) -> float:
        return inf if self.chunk is None else self.chunk

    def take(self, request: Request) -> int:
        return request.remaining if self.chunk is None else min(self.chunk, request.remaining)

    def groups(self, tokens: int, num_layers: int) -> Sequence[Group]:
        """Contiguous groups; where the layers do not divide, the first ones get one more. ValueError if `fixed_groups`
        is more than the model has layers."""
        if self.fixed_groups is not None and self.fixed_groups > num_layers:
            raise ValueError(f"{self.fixed_groups} layer groups are more than the model's {num_layers} layers")
        count = self.fixed_groups or min(num_layers, max(1, -(-tokens // self.work)))
        size, longer = divmod(num_layers, count)
        starts = [i * size + min(i, longer) for i in range(count + 1)]
        return tuple(pairwise(starts))
