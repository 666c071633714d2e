"""From logits to tokens: greedy, temperature, top-p, seeds, log-probabilities.

A draw is a pure function of (logits, sampling, seed, choice, position). No generator is carried along, so the same
request gives the same tokens whatever it is batched with, wherever it is parked, and when a step is retried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduling.request import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: for choice `index` of a request, at position `position` of its sequence."""

    sampling: Sampling
    seed: int
    index: int
    position: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """`logprob` and `top` (the likeliest tokens, best first) come from the raw logits: temperature 1, no top-p."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, draws: Sequence[Sequence[Draw]]) -> list[tuple[Sampled, ...]]:
    """One token for each draw of each row. `logits`: float32 [rows, vocab]. Raises ValueError where a row has NaN."""
    greedy = logits.argmax(dim=-1).tolist()
    if torch.isnan(logits).any():
        bad = torch.isnan(logits).any(dim=-1).nonzero().flatten().tolist()
        raise ValueError(f"the model gave NaN logits in rows {bad}")
    return [
        tuple(_choose(row, likeliest, draw) for draw in row_draws)
        for row, likeliest, row_draws in zip(logits, greedy, draws, strict=True)
    ]


def _choose(row: torch.Tensor, likeliest: int, draw: Draw) -> Sampled:
    token = likeliest if draw.sampling.temperature == 0 else _draw(row, draw)
    return _with_logprobs(row, token, draw.sampling.logprobs)


def _draw(row: torch.Tensor, draw: Draw) -> int:
    # In double precision and from the maximum down: a tiny temperature must not overflow into nonsense.
    scaled = (row - row.max()).double() / draw.sampling.temperature
    probabilities = torch.softmax(scaled, dim=-1)
    generator = torch.Generator().manual_seed(_mix(draw.seed, draw.index, draw.position))
    uniform = torch.rand((), generator=generator, dtype=torch.float64).item()
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    mass = ordered.cumsum(dim=-1)
    # Top-p keeps the smallest set of likeliest tokens whose mass reaches top_p; the first is always in it.
    kept = int((mass < draw.sampling.top_p).sum()) + 1 if draw.sampling.top_p < 1 else len(mass)
    kept = min(kept, len(mass))
    target = uniform * float(mass[kept - 1])
    return int(tokens[min(int((mass[:kept] <= target).sum()), kept - 1)])


def _with_logprobs(row: torch.Tensor, token: int, wanted: int | None) -> Sampled:
    if wanted is None:
        return Sampled(token)
    logprobs = torch.log_softmax(row, dim=-1)
    values, tokens = logprobs.topk(min(wanted, len(logprobs)))
    return Sampled(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _mix(seed: int, index: int, position: int) -> int:
    """One 63-bit seed for each draw, spread by a fixed odd multiplier (splitmix64's)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) >> 1
