"""Confidence intervals over a handful of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import mean, stdev
from typing import Final

# Student's t at 97.5 %, for 1, 2, ... degrees of freedom.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean (Student's t). One value tells nothing of its spread: an interval of no
    width, which callers say is none."""
    middle = mean(values)
    if len(values) < 2:
        return middle, middle
    half = quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return middle - half, middle + half


def quantile(freedom: int) -> float:
    """Of Student's t at 97.5 %; beyond the table by the first term of its expansion around the normal's 1.960."""
    if freedom < 1:
        return inf
    return _T[freedom - 1] if freedom <= len(_T) else 1.960 + 2.372 / freedom


def paired(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Mean and interval of the differences, seed by seed."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    return mean(differences), *interval(differences)
