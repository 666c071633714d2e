"""A QwenTrace-like workload: four types of request, with the lengths, outputs, arrivals and SLOs of the real trace.

Fitted to the first two minutes of QwenTrace A (alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0) as used by
FlowPrefill: 327 requests in 119 s. Pure Python, one seed, and *common random numbers*: every quantity has a random
stream of its own, so changing the rate or a scale changes that and nothing else, and every system sees the same work.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from engine.slo_classes import SLO_CLASSES
from scheduling.request import SLO

BASE_RATE = 2.746  # requests per second: 327 in 119.08 s

SLOS = {label: SLO_CLASSES[label] for label in ("text", "image", "search", "file")}

# Prefill of 1,024 tokens on the machine those SLOs are for, in seconds: another machine's are scaled against it.
A800_1K_PREFILL = 0.080


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come, `time` seconds after the start."""

    index: int
    time: float
    label: str
    prompt_tokens: int
    output_tokens: int
    slo: SLO

    def prompt(self, vocab_size: int, seed: int = 0) -> list[int]:
        """Random token ids, the same ones whoever asks; no two arrivals share a prefix that a cache could reuse."""
        return Random(f"{seed}/prompt/{self.index}").choices(range(vocab_size), k=self.prompt_tokens)


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
class Mixture:
    """One of several distributions, drawn with the given weights."""

    parts: Sequence[tuple[float, Callable[[Random], int]]]

    def __call__(self, random: Random) -> int:
        weights, choices = zip(*self.parts, strict=True)
        draw: Callable[[Random], int] = random.choices(choices, weights)[0]
        return draw(random)


@dataclass(frozen=True, slots=True)
class RequestType:
    """A type of request: its share of the arrivals and how long its prompts and outputs are, in tokens."""

    share: float
    prompt: Callable[[Random], int]
    output: Callable[[Random], int]


QWENTRACE = {
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
        prompt=Mixture(
            (
                (0.96, lambda random: 350 + round(random.expovariate(1 / 20))),
                (0.04, lambda random: 930),
            )
        ),
        output=LogNormal(4.323, 0.455),
    ),
    "search": RequestType(
        share=0.202,
        prompt=Mixture(
            (
                (0.94, LogNormal(8.457, 0.488, 1886, 16744)),
                (0.06, lambda random: random.randint(241, 982)),
            )
        ),
        output=LogNormal(5.861, 0.519),
    ),
    "file": RequestType(share=0.034, prompt=LogNormal(7.685, 1.38, 111, 10720), output=LogNormal(6.408, 0.408)),
}


def poisson(seed: int, rate: float) -> Iterator[float]:
    """Arrival times in seconds, from 0, at `rate` per second. Another rate stretches the same gaps."""
    if not rate > 0:
        raise ValueError(f"the arrival rate must be above 0 requests per second, got {rate}")
    random = Random(f"{seed}/arrivals")
    time = 0.0
    while True:
        yield time
        time += random.expovariate(1.0) / rate


def qwentrace(n: int, *, seed: int = 0, rate: float = BASE_RATE) -> list[Arrival]:
    """`n` arrivals drawn from the fitted distributions, unscaled."""
    types = Random(f"{seed}/types").choices(list(QWENTRACE), [each.share for each in QWENTRACE.values()], k=n)
    arrivals = []
    for index, (label, time) in enumerate(zip(types, poisson(seed, rate), strict=False)):
        # A stream for each request and quantity: one more draw here moves nothing elsewhere.
        prompt = QWENTRACE[label].prompt(Random(f"{seed}/prompt tokens/{index}"))
        output = QWENTRACE[label].output(Random(f"{seed}/output tokens/{index}"))
        arrivals.append(Arrival(index, time, label, prompt, output, SLOS[label]))
    return arrivals


def bootstrap(path: Path | str, n: int, *, seed: int = 0, rate: float = BASE_RATE) -> list[Arrival]:
    """`n` arrivals whose type and lengths are rows drawn, with replacement, from a CSV of real requests.

    The columns `type` (text, image, search or file), `prompt_len` and `output_len` are read. Raises ValueError for
    a file without them, naming the row; times in the file are not used.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = {"type", "prompt_len", "output_len"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        rows = [_parse(path, reader.line_num, row) for row in reader]
    if not rows:
        raise ValueError(f"{path} has no rows")
    drawn = Random(f"{seed}/rows").choices(rows, k=n)
    return [
        Arrival(index, time, label, prompt, output, SLOS[label])
        for index, ((label, prompt, output), time) in enumerate(zip(drawn, poisson(seed, rate), strict=False))
    ]


def _parse(path: Path | str, line: int, row: dict[str, str]) -> tuple[str, int, int]:
    label = row["type"]
    if label not in SLOS:
        raise ValueError(f"{path}, line {line}: type {label!r} is none of {', '.join(SLOS)}")
    try:
        prompt, output = int(row["prompt_len"]), int(row["output_len"])
    except (TypeError, ValueError):
        raise ValueError(f"{path}, line {line}: prompt_len and output_len must be whole numbers, got {row}") from None
    if prompt < 1 or output < 1:
        raise ValueError(f"{path}, line {line}: prompt_len and output_len must be at least 1, got {prompt}, {output}")
    return label, prompt, output


def scaled(
    arrivals: Sequence[Arrival],
    *,
    prompt: float = 1.0,
    output: float = 1.0,
    max_output: int | None = None,
    slo: float = 1.0,
    time: float = 1.0,
) -> list[Arrival]:
    """The same arrivals with prompt lengths, output lengths, SLOs and arrival times multiplied; no length below 1."""
    for name, factor in (("prompt", prompt), ("output", output), ("slo", slo), ("time", time)):
        if not factor > 0:
            raise ValueError(f"the {name} scale must be above 0, got {factor}")

    def scale(arrival: Arrival) -> Arrival:
        outputs = max(1, round(arrival.output_tokens * output))
        return replace(
            arrival,
            time=arrival.time * time,
            prompt_tokens=max(1, round(arrival.prompt_tokens * prompt)),
            output_tokens=outputs if max_output is None else min(outputs, max_output),
            slo=SLO(*(None if target is None else target * slo for target in (arrival.slo.ttft, arrival.slo.tbt))),
        )

    return [scale(arrival) for arrival in arrivals]
