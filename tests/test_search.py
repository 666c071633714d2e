"""The search for knees, on curves made by hand, and the intervals over seeds."""

import asyncio
from math import exp, log

import pytest

from examples.confidence import interval, paired, quantile
from examples.search import STEPS, Edge, combine, highest, ratio

STEP = 2 ** (1 / STEPS)


def search(holds, start=1.0):
    asked = []

    async def ask(value):
        asked.append(value)
        return holds(value)

    edge = asyncio.run(highest(ask, start))
    assert len(set(asked)) == len(asked), "every point is asked for once"
    return edge, asked


@pytest.mark.parametrize("knee", [0.1, 0.9, 1.0, 1.7, 5.0, 70.0])
@pytest.mark.parametrize("start", [0.3, 1.0, 4.0])
def test_a_monotone_curve_gives_its_knee_within_a_step_of_the_grid(knee, start):
    edge, asked = search(lambda value: value <= knee, start)
    assert edge.value <= knee < edge.beyond
    assert edge.beyond / edge.value == pytest.approx(STEP)
    assert len(asked) < 22


def test_an_island_two_steps_beyond_the_first_failure_is_found():
    knee = 2 ** (20 / STEPS)
    island = 2 ** (22 / STEPS)
    edge, _ = search(lambda value: value <= knee * 1.001 or abs(value - island) < 1e-6)
    assert edge.value == pytest.approx(island)
    assert edge.beyond == pytest.approx(island * STEP)


def test_from_an_island_the_search_goes_on_upwards():
    knee, low, high = 2 ** (20 / STEPS), 2 ** (23 / STEPS), 2 ** (28 / STEPS)
    edge, _ = search(lambda value: value <= knee * 1.001 or low * 0.999 <= value <= high * 1.001)
    assert edge.value == pytest.approx(high)


def test_above_what_is_found_three_neighbours_have_failed():
    edge, asked = search(lambda value: value <= 3.0)
    above = [edge.value * STEP**k for k in (1, 2, 3)]
    assert all(any(abs(log(value / each)) < 1e-6 for each in asked) for value in above)


def test_what_always_or_never_holds_has_no_edge():
    assert search(lambda value: True)[0] == Edge(2.0**8, None)
    edge, _ = search(lambda value: False)
    assert edge == Edge(None, 2.0**-8)


def test_seeds_are_combined_on_the_scale_of_ratios():
    estimate = combine([Edge(2.0, 2.1), Edge(8.0, 8.4)])
    assert estimate.value == pytest.approx(4.0)
    half = 12.706 * log(4.0) / 2  # t of one degree of freedom, times the standard error of two values
    assert estimate.low == pytest.approx(4.0 * exp(-half))
    assert estimate.high == pytest.approx(4.0 * exp(half))


def test_one_seed_has_the_bracket_for_an_interval():
    estimate = combine([Edge(2.0, 2.1)])
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((2.0, 2.0, 2.1))


def test_open_ends_stay_open():
    none = combine([Edge(2.0, 2.1), Edge(None, 0.1)])
    assert (none.value, none.low, none.high) == (None, None, 2.1)
    beyond = combine([Edge(2.0, None), Edge(2.0, None)])
    assert (beyond.value, beyond.high) == (pytest.approx(2.0), None)


def test_ratios_are_paired_by_seed():
    base = [Edge(1.0, 1.1), Edge(3.0, 3.1)]
    twice = ratio([Edge(2.0, 2.1), Edge(6.0, 6.1)], base)
    assert (twice.value, twice.low, twice.high) == pytest.approx((2.0, 2.0, 2.0))  # the same in every seed
    assert ratio([Edge(None, 0.1), Edge(6.0, 6.1)], base).value is None


def test_students_interval():
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert interval([5.0]) == (5.0, 5.0)
    assert quantile(30) > quantile(31) > quantile(1000) > 1.96
    assert quantile(60) == pytest.approx(2.000, abs=2e-3)
    assert paired([3.0, 5.0], [1.0, 3.0]) == pytest.approx((2.0, 2.0, 2.0))
