"""From logits to tokens: greedy, temperature, top-p, seeds, log-probabilities.

A draw is a pure function of (logits, sampling, seed, choice, position). No generator is carried along, so the same
request gives the same tokens whatever it is batched with, wherever it is parked, and when a step is retried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduling.request import Sampling

_LIKELIEST = 1024  # tokens that top-p looks at before it sorts them all


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
    if draw.sampling.top_p == 1:
        return _at(uniform, probabilities)
    likeliest, tokens = _top_p(probabilities, draw.sampling.top_p)
    return int(tokens[_at(uniform, likeliest)])


def _at(uniform: float, weights: torch.Tensor) -> int:
    """The entry that the fraction `uniform` of all weights falls into; never one of weight 0."""
    mass = weights.cumsum(dim=-1)
    index = int(torch.searchsorted(mass, uniform * float(mass[-1]), right=True))
    return min(index, int(weights.nonzero()[-1])) if index == len(mass) else index


def _top_p(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, tokens) of the smallest set of likeliest tokens whose mass reaches `top_p`; at least one.

    A few hundred tokens nearly always hold that mass: only where they do not is the whole vocabulary sorted, which
    takes milliseconds.
    """
    for count in (min(_LIKELIEST, len(probabilities)), len(probabilities)):
        likeliest, tokens = probabilities.topk(count)
        mass = likeliest.cumsum(dim=-1)
        if float(mass[-1]) >= top_p or count == len(probabilities):
            break
    kept = int((mass < top_p).sum()) + 1
    return likeliest[:kept], tokens[:kept]


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
