"""Fit a device's figures to measured prefill times: the least one can know about a machine that is not at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from engine.hardware import DeviceSpec
from engine.roofline import Roofline
from engine.timing import pass_seconds
from models.costs import ModelCosts, Volume

# Llama-3.1-8B on A800-80G: the lowest TTFT at a prompt length, in seconds, in the log that FlowPrefill's authors
# published with their code (benchmarks/benchmark_offline.ipynb): larger ones at the same length include queueing.
LLAMA3_8B_ON_A800: dict[int, float] = {
    128: 0.025,
    746: 0.060,
    1737: 0.131,
    2458: 0.186,
    3874: 0.274,
    4982: 0.357,
}
FITTED = (128, 746, 4982)

# Qwen3-30B-A3B on two H100 (TP2), a prompt of 8,192 tokens by the size of its chunks: seconds in the experts' part
# (router to combine), and in all else. Layered Prefill's figure 2, read off the plot.
QWEN3_30B_ON_H100: dict[int, tuple[float, float]] = {
    512: (0.310, 0.248),
    1024: (0.185, 0.185),
    2048: (0.115, 0.148),
    4096: (0.092, 0.140),
    8192: (0.083, 0.125),
}

_FREE = ("launch", "step", "matmul_efficiency")
_FREE_OF_CHUNKS = ("launch", "step", "grouped_efficiency", "attention_efficiency", "bandwidth_efficiency")
_EXPERTS = ("router", "dispatch", "experts", "combine")


def prefill_seconds(costs: ModelCosts, device: DeviceSpec, tokens: int) -> float:
    """Of one prompt alone, its first token drawn."""
    volume = Volume(rows=tokens, pairs=tokens * (tokens + 1) / 2, keys=tokens, sequences=1, drawn=1)
    return pass_seconds(Roofline(costs, device), costs.num_layers, volume)


def chunk_seconds(costs: ModelCosts, device: DeviceSpec, chunk: int, tokens: int = 8192) -> tuple[float, float]:
    """(in the experts' part, in all else) of one prompt alone in chunks."""
    experts = others = 0.0
    timing = Roofline(costs, device)
    for start in range(0, tokens, chunk):
        volume = Volume.of(start, chunk)
        others += timing.before(volume)
        for count, operators in costs.stretches(0, costs.num_layers):
            for operator in operators:
                seconds = count * device.seconds(operator, volume, costs.tp)
                if operator.name in _EXPERTS:
                    experts += seconds
                else:
                    others += seconds
    return experts, others


def fit_prefill(costs: ModelCosts, device: DeviceSpec, measured: Mapping[int, float]) -> DeviceSpec:
    """`device` with launch, step and matmul_efficiency such that prefills of `measured`'s lengths take its seconds.
    ValueError for fewer than three lengths."""
    if len(measured) < len(_FREE):
        raise ValueError(f"{len(_FREE)} figures are fitted to at least as many prefill times, got {len(measured)}")
    return _fit(
        device, _FREE, lambda at: [prefill_seconds(costs, at, n) / seconds - 1 for n, seconds in measured.items()]
    )


def fit_chunks(costs: ModelCosts, device: DeviceSpec, measured: Mapping[int, tuple[float, float]]) -> DeviceSpec:
    """`device` with launch, step and three efficiencies such that prompts in chunks of `measured`'s sizes take its
    seconds; fitted as by `fit_prefill`."""

    def errors(at: DeviceSpec) -> list[float]:
        pairs = [zip(chunk_seconds(costs, at, chunk), seconds, strict=True) for chunk, seconds in measured.items()]
        return [ours / theirs - 1 for pair in pairs for ours, theirs in pair]

    return _fit(device, _FREE_OF_CHUNKS, errors)


def _fit(device: DeviceSpec, free: Sequence[str], errors_of: Callable[[DeviceSpec], Sequence[float]]) -> DeviceSpec:
    """Least squares of the relative errors by Gauss-Newton on the logarithms of the `free` figures."""
    logs = np.log([getattr(device, name) for name in free])

    def at(logs: np.ndarray) -> DeviceSpec:
        return replace(device, **dict(zip(free, np.exp(logs).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.array(errors_of(at(logs)))

    nudge = 1e-4
    for _ in range(50):
        now = errors(logs)
        slopes = np.stack([(errors(logs + nudge * unit) - now) / nudge for unit in np.eye(len(free))], axis=1)
        logs = logs - np.linalg.lstsq(slopes, now, rcond=None)[0]
    return at(logs)
