"""How long prompts and outputs are: distributions, and the published workloads described with them.

A distribution is called with a `Random` and gives tokens. Everything here is data, and prints as what it is, so that
a run's configuration can be hashed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

Length = Callable[[Random], int]  # tokens, at least 1


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp of a normal(mu, sigma), clipped to [low, high] tokens."""

    mu: float
    sigma: float
    low: int = 1
    high: int = 1_000_000

    def __call__(self, random: Random) -> int:
        return min(max(round(random.lognormvariate(self.mu, self.sigma)), self.low), self.high)


@dataclass(frozen=True, slots=True)
class Exponential:
    """`low` plus an exponential of this mean."""

    low: int
    mean: float

    def __call__(self, random: Random) -> int:
        return self.low + round(random.expovariate(1 / self.mean))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any whole number of [low, high]."""

    low: int
    high: int

    def __call__(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The inverse of a CDF known at some percentages, linear between them: `points` are (percent, tokens), from 0 %
    to 100 %."""

    points: Sequence[tuple[float, float]]

    def __call__(self, random: Random) -> int:
        percent = 100 * random.random()
        after = bisect_right(self.points, percent, key=lambda point: point[0])
        (left, low), (right, high) = self.points[after - 1 : after + 1]
        return max(1, round(low + (high - low) * (percent - left) / (right - left)))


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of several distributions, drawn with the given weights."""

    parts: Sequence[tuple[float, Length]]

    def __call__(self, random: Random) -> int:
        weights, choices = zip(*self.parts, strict=True)
        draw: Length = random.choices(choices, weights)[0]
        return draw(random)


@dataclass(frozen=True, slots=True)
class RequestType:
    """A type of request: its share of the arrivals and how long its prompts and outputs are, independently."""

    share: float
    prompt: Length
    output: Length


# QwenTrace A (alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0), minutes 0 to 2, as FlowPrefill used it: 327
# requests; a text's history is not counted. Fitted by type to those rows.
QWENTRACE: Mapping[str, RequestType] = {
    "text": RequestType(
        share=0.691,
        prompt=Mixture(
            (
                (0.243, LogNormal(4.322, 0.299, 16, 127)),  # a follow-up turn: only its new tokens count
                (0.230, LogNormal(5.634, 0.487, 128, 699)),
                (0.398, LogNormal(6.708, 0.094, 700, 1023)),  # a first turn: mostly the system prompt
                (0.128, LogNormal(7.377, 0.423, 1024, 4613)),
            )
        ),
        output=LogNormal(5.423, 1.02),
    ),
    "image": RequestType(
        share=0.073,
        prompt=Mixture(((0.96, Exponential(350, 20)), (0.04, Uniform(930, 930)))),
        output=LogNormal(4.323, 0.455),
    ),
    "search": RequestType(
        share=0.202,
        prompt=Mixture(((0.94, LogNormal(8.457, 0.488, 1886, 16744)), (0.06, Uniform(241, 982)))),
        output=LogNormal(5.861, 0.519),
    ),
    "file": RequestType(share=0.034, prompt=LogNormal(7.685, 1.38, 111, 10720), output=LogNormal(6.408, 0.408)),
}

# The same with a tail that the slice does not have, for FlowPrefill's figure 15: a tenth of the searches has 32K to
# 128K tokens.
QWENTRACE_LONG: Mapping[str, RequestType] = {
    **QWENTRACE,
    "search": replace(
        QWENTRACE["search"], prompt=Mixture(((0.9, QWENTRACE["search"].prompt), (0.1, Uniform(32_768, 131_072))))
    ),
}

# arXiv summarisation as in Layered Prefill: a stand-in for lengths that are published as means only.
ARXIV: Mapping[str, RequestType] = {"arxiv": RequestType(1.0, LogNormal(8.86, 0.48), LogNormal(5.34, 0.45))}


def _quantiles(*tokens: float) -> Quantiles:
    return Quantiles(tuple(zip((0, 5, 10, 25, 50, 75, 90, 95, 99, 100), tokens, strict=True)))


# ShareGPT cut to 8K, the length file of Sarathi-Serve and Layered Prefill (microsoft/sarathi-serve, Apache-2.0).
SHAREGPT: Mapping[str, RequestType] = {
    "text": RequestType(
        1.0,
        _quantiles(1, 29, 74, 580, 1730, 3735, 5696, 6563, 7434, 8141),
        _quantiles(2, 44, 84, 228, 415, 628, 834, 920, 998, 1024),
    )
}

# Azure's conversations of 2023 (AzurePublicDataset, CC-BY; Patel et al., Splitwise, ISCA 2024): 19,366 requests.
AZURE: Mapping[str, RequestType] = {
    "text": RequestType(
        1.0,
        _quantiles(2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        _quantiles(7, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
    )
}

# Mooncake's conversations (kvcache-ai/Mooncake, FAST 2025, Apache-2.0): 12,031 requests, 6.9 % of them above 32K.
MOONCAKE: Mapping[str, RequestType] = {
    "file": RequestType(
        1.0,
        _quantiles(891, 901, 964, 2307, 6909, 15366, 27367, 39549, 85401, 126195),
        _quantiles(1, 10, 24, 157, 350, 472, 597, 698, 1120, 2000),
    )
}
