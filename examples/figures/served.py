"""What a prefill instance gets done under one load, decoding left aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from engine.deployment import Deployment
from examples.backends import play
from examples.experiment import Run


@dataclass(frozen=True, slots=True)
class Served:
    """Of all requests of a run, from the first arrival until the last first token."""

    tokens_per_s: float  # of prompts
    attainment: float  # of TTFT
    met_per_s: float  # requests whose first token is in time


def served(run: Run) -> Served:
    assert isinstance(run.backend, Deployment)
    rows, _ = play(run.variant, run.load.arrivals(run.rate, run.slo_scale, run.seed), run.backend)
    began, ended = rows.rows[0].arrival, 0.0
    for row in rows.rows:
        began, ended = min(began, row.arrival), max(ended, row.first_token or 0.0)
    met = sum(row.meets_ttft is True for row in rows.rows)
    tokens = sum(row.prompt_tokens for row in rows.rows if row.first_token is not None)
    return Served(tokens / (ended - began), met / len(rows.rows), met / (ended - began))


def average(found: Sequence[Served]) -> Served:
    """Over seeds."""
    return Served(
        mean(each.tokens_per_s for each in found),
        mean(each.attainment for each in found),
        mean(each.met_per_s for each in found),
    )
