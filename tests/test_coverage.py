"""The coverage model against the measurements it was fitted to, and those it was not."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from models import coverage as module
from models.config import MoEConfig
from models.coverage import LIKENESS, POPULARITY, coverage, independent_rows

QWEN3_30B = MoEConfig(128, 8, 768, True, tuple(range(48)))
ALL_EXPERTS_GB = 128 * 48 * 3 * 2048 * 768 * 2 / 1e9
TABLE_1 = {16: 0.50, 32: 0.55, 64: 0.70, 128: 0.863}  # Layered Prefill; rows of a decode batch -> coverage
FIGURE_2 = {512: 765, 1024: 405, 2048: 213, 4096: 110, 8192: 57}  # chunk -> GB loaded for a prompt of 8,192 tokens


def loaded(chunk: int) -> float:
    """GB of expert weights that a prompt of 8,192 tokens loads in chunks, one layer's experts once a chunk."""
    return 8192 / chunk * coverage(QWEN3_30B, independent_rows(chunk)) * ALL_EXPERTS_GB


def test_popularity_is_the_least_squares_fit_to_table_1() -> None:
    def error(popularity: float) -> float:
        with patch.object(module, "POPULARITY", popularity):
            return sum((coverage(QWEN3_30B, rows) - share) ** 2 for rows, share in TABLE_1.items())

    best = min((step / 1000 for step in range(300, 1200)), key=error)
    assert best == POPULARITY
    assert max(abs(coverage(QWEN3_30B, rows) - share) for rows, share in TABLE_1.items()) < 0.06


def test_likeness_is_the_fit_to_chunks_of_512() -> None:
    def error(likeness: float) -> float:
        with patch.object(module, "LIKENESS", likeness):
            return abs(loaded(512) - FIGURE_2[512])

    assert min((step / 1000 for step in range(500, 1000)), key=error) == LIKENESS


@pytest.mark.parametrize("chunk", [1024, 2048, 4096, 8192])
def test_larger_chunks_are_predicted(chunk: int) -> None:
    """Figure 2 is read off a plot, to a few GB."""
    assert loaded(chunk) == pytest.approx(FIGURE_2[chunk], rel=0.04)


def test_even_independent_routing_is_the_limit_it_must_not_be() -> None:
    """As popularity evens out, the model becomes the textbook formula; as fitted it is far from it."""
    even = 1 - (1 - 1 / 16) ** 32
    with patch.object(module, "POPULARITY", 1e5):
        assert coverage(QWEN3_30B, 32) == pytest.approx(even, abs=1e-3)
    assert coverage(QWEN3_30B, 32) < even - 0.25


def test_the_formula_is_what_drawing_experts_gives() -> None:
    draw = random.Random(0)
    a, b = POPULARITY, POPULARITY * 15
    popularity = [draw.betavariate(a, b) for _ in range(20_000)]
    drawn = sum(1 - (1 - p) ** 40 for p in popularity) / len(popularity)
    assert coverage(QWEN3_30B, 40) == pytest.approx(drawn, abs=0.01)


def test_coverage_from_none_to_all() -> None:
    assert coverage(QWEN3_30B, 0) == 0
    assert coverage(QWEN3_30B, 1) == pytest.approx(8 / 128)
    assert independent_rows(0) == 0 and independent_rows(1) == 1
    shares = [coverage(QWEN3_30B, rows) for rows in (1, 2, 10, 100, 1000, 10**6)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1, abs=1e-3)
    dense = MoEConfig(4, 4, 768, True, (0,))  # every token takes every expert
    assert [coverage(dense, rows) for rows in (0, 0.5, 1, 7)] == [0, 0.5, 1, 1]
