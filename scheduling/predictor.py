"""How long will this prefill take? The TTFT predictor that slack and SLO-aware batching rest on.

FlowPrefill fits a polynomial of the batch's total tokens. That over-predicts merged short prompts, because attention
is quadratic in each prompt, not in their sum. The terms here are those of the work itself:

    seconds = max(floor, per_step + per_token * tokens + per_pair * (query, key) pairs)

where a prompt of n new tokens after c cached ones has n * c + n * (n + 1) / 2 pairs. The floor is what a pass takes
however little it computes: to launch its kernels, or to read the weights. Without it the straight part is bent to meet
short passes, and then falls short of batches. The fit lives in engine/profile.py; its error is kept beside the
coefficients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

# One sequence's share of a forward pass: (tokens already cached, new tokens).
Extent = tuple[int, int]


def attention_pairs(context: int, tokens: int) -> float:
    """(query, key) pairs of `tokens` new causal rows after `context` cached ones."""
    return tokens * context + tokens * (tokens + 1) / 2


class Load(NamedTuple):
    """What one forward pass has to compute. Both counts are exact, so loads add up the same in any order."""

    rows: int = 0
    pairs: float = 0.0  # (query, key) pairs of attention: whole and half numbers

    def plus(self, extent: Extent) -> Load:
        context, tokens = extent
        return Load(self.rows + tokens, self.pairs + attention_pairs(context, tokens))


class Predict(Protocol):
    """Seconds of one forward pass: a function of its load, and one that never falls as the load grows."""

    def __call__(self, extents: Iterable[Extent]) -> float:
        """Of a pass over these sequences; 0 for no work at all."""
        ...

    def seconds(self, load: Load) -> float: ...


@dataclass(frozen=True, slots=True)
class Predictor:
    """Coefficients in seconds. `error_mean` and `error_max`: relative errors of the fit on its own samples."""

    per_step: float
    per_token: float
    per_pair: float = 0.0
    floor: float = 0.0
    error_mean: float = 0.0
    error_max: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_step", "per_token", "per_pair", "floor"):
            if getattr(self, name) < 0:
                raise ValueError(f"predictor.{name} must not be negative, got {getattr(self, name)}")

    def __call__(self, extents: Iterable[Extent]) -> float:
        load = Load()
        for extent in extents:
            load = load.plus(extent)
        return self.seconds(load)

    def seconds(self, load: Load) -> float:
        rows, pairs = load
        if not rows:
            return 0.0
        return max(self.floor, self.per_step + self.per_token * rows + self.per_pair * pairs)

    def scaled(self, factor: float) -> Predictor:
        """Of a device on which everything takes `factor` times as long."""
        terms = {name: factor * getattr(self, name) for name in ("per_step", "per_token", "per_pair", "floor")}
        return replace(self, **terms)
