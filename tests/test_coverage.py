"""The coverage model against the measurements it was fitted to."""

from __future__ import annotations

import random
from itertools import product
from unittest.mock import patch

import pytest

from models import coverage as module
from models.config import MoEConfig
from models.coverage import KINSHIP, LIKENESS, POPULARITY, coverage, separate_rows

QWEN3_30B = MoEConfig(128, 8, 768, True, tuple(range(48)))
ALL_EXPERTS_GB = 128 * 48 * 3 * 2048 * 768 * 2 / 1e9
# Layered Prefill; rows of a decode batch -> coverage.
TABLE_1 = {32: 0.55, 128: 0.863}
AT_MOST = {16: 0.50, 64: 0.70}
FIGURE_2 = {512: 765, 1024: 405, 2048: 213, 4096: 110, 8192: 57}  # chunk -> GB loaded for a prompt of 8,192 tokens


def loaded(chunk: int) -> float:
    """GB of expert weights that a prompt of 8,192 tokens loads in chunks, one layer's experts once a chunk."""
    return 8192 / chunk * coverage(QWEN3_30B, separate_rows(chunk)) * ALL_EXPERTS_GB


def errors() -> list[float]:
    """In shares of a layer's experts."""
    return [
        *(coverage(QWEN3_30B, rows) - share for rows, share in TABLE_1.items()),
        *(max(0.0, coverage(QWEN3_30B, rows) - share) for rows, share in AT_MOST.items()),
        *((loaded(chunk) - theirs) * chunk / 8192 / ALL_EXPERTS_GB for chunk, theirs in FIGURE_2.items()),
    ]


def test_it_is_the_least_squares_fit() -> None:
    """No neighbour, one unit of the last digit away, does better."""

    def squares(popularity: float, kinship: float, likeness: float) -> float:
        with patch.multiple(module, POPULARITY=popularity, KINSHIP=kinship, LIKENESS=likeness):
            return sum(error**2 for error in errors())

    moves = product((-0.01, 0, 0.01), (-0.001, 0, 0.001), (-0.001, 0, 0.001))
    assert min(moves, key=lambda by: squares(POPULARITY + by[0], KINSHIP + by[1], LIKENESS + by[2])) == (0, 0, 0)


def test_it_is_within_three_points_of_every_measurement() -> None:
    assert max(map(abs, errors())) < 0.03


def test_independent_requests_would_not_fit() -> None:
    """What the third figure is for: without it no popularity comes as near to table 1."""

    def worst(popularity: float) -> float:
        with patch.multiple(module, POPULARITY=popularity, KINSHIP=1.0):
            return max(map(abs, errors()[:4]))

    assert min(worst(step / 100) for step in range(20, 500)) > 0.05


def test_even_independent_routing_is_the_limit_it_must_not_be() -> None:
    """As popularity evens out and requests differ, the model becomes the textbook formula; as fitted it is far off."""
    even = 1 - (1 - 1 / 16) ** 32
    with patch.multiple(module, POPULARITY=1e5, KINSHIP=1.0):
        assert coverage(QWEN3_30B, 32) == pytest.approx(even, abs=1e-3)
    assert coverage(QWEN3_30B, 32) < even - 0.25


def test_the_formula_is_what_drawing_experts_gives() -> None:
    draw = random.Random(0)
    a, b = POPULARITY, POPULARITY * 15
    popularity = [draw.betavariate(a, b) for _ in range(20_000)]
    drawn = sum(1 - (1 - p) ** 40 for p in popularity) / len(popularity)
    with patch.object(module, "KINSHIP", 1.0):
        assert coverage(QWEN3_30B, 40) == pytest.approx(drawn, abs=0.01)


def test_coverage_from_none_to_all() -> None:
    assert coverage(QWEN3_30B, 0) == 0
    assert coverage(QWEN3_30B, 1) == pytest.approx(8 / 128)
    assert separate_rows(0) == 0 and separate_rows(1) == 1
    shares = [coverage(QWEN3_30B, rows) for rows in (1, 2, 10, 100, 1000, 10**6)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1, abs=1e-3)
    dense = MoEConfig(4, 4, 768, True, (0,))  # every token takes every expert
    assert [coverage(dense, rows) for rows in (0, 0.5, 1, 7)] == [0, 0.5, 1, 1]
