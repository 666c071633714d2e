"""Requests to come: when, how long, of which type, due when. And what may be done to them: scaling, and their gaps.

*Common random numbers*: every quantity has a random stream of its own, so changing the rate or a scale changes that and
nothing else, and every system sees the same work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from scheduling.request import SLO


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come, `time` seconds after the start.

    `blocks`: hashes of its prompt, `block_tokens` tokens each, where a trace tells which prompts begin alike.
    """

    index: int
    time: float
    label: str
    prompt_tokens: int
    output_tokens: int
    slo: SLO
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0

    def prompt(self, vocab_size: int, seed: int = 0) -> list[int]:
        """Random token ids, the same ones whoever asks. Prompts begin alike exactly as far as their blocks do; without
        blocks no two share a prefix that a cache could reuse."""
        tokens: list[int] = []
        for block in self.blocks[: -(-self.prompt_tokens // self.block_tokens) if self.blocks else 0]:
            tokens += Random(f"{seed}/block/{block}").choices(range(vocab_size), k=self.block_tokens)
        missing = max(0, self.prompt_tokens - len(tokens))
        own = Random(f"{seed}/prompt/{self.index}").choices(range(vocab_size), k=missing)
        return [*tokens[: self.prompt_tokens], *own]


def renewal(seed: int, rate: float, cv: float = 1.0) -> Iterator[float]:
    """Arrival times in seconds, from 0, at `rate` per second: independent gaps of a gamma distribution with this
    coefficient of variation. 1 is Poisson; more is burstier. Another rate stretches the same gaps."""
    if not 0 < rate < inf:
        raise ValueError(f"the arrival rate must be above 0 requests per second, got {rate:g}")
    if not 0 < cv < inf:
        raise ValueError(f"the gaps' coefficient of variation must be a number above 0, got {cv:g}")
    random = Random(f"{seed}/arrivals")
    shape = 1 / cv**2
    time = 0.0
    while True:
        yield time
        time += random.gammavariate(shape, 1 / shape) / rate


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
        if not 0 < factor < inf:
            raise ValueError(f"the {name} scale must be {'finite' if factor == inf else 'above 0'}, got {factor:g}")

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
