"""Fit a device's figures to measured prefill times: the least one can know about a machine that is not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from engine.hardware import DeviceSpec
from engine.roofline import Roofline
from engine.simulated import pass_seconds
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

_FREE = ("launch", "step", "matmul_efficiency")


def prefill_seconds(costs: ModelCosts, device: DeviceSpec, tokens: int) -> float:
    """Of one prompt alone, its first token drawn."""
    volume = Volume(rows=tokens, pairs=tokens * (tokens + 1) / 2, keys=tokens, sequences=1, drawn=1)
    return pass_seconds(Roofline(costs, device), costs.num_layers, volume)


def fit_prefill(costs: ModelCosts, device: DeviceSpec, measured: Mapping[int, float]) -> DeviceSpec:
    """`device` with launch, step and matmul_efficiency such that prefills of `measured`'s lengths take its seconds:
    least squares of the relative errors, by Gauss-Newton on the logarithms. ValueError for fewer than three lengths."""
    if len(measured) < len(_FREE):
        raise ValueError(f"{len(_FREE)} figures are fitted to at least as many prefill times, got {len(measured)}")
    logs = np.log([getattr(device, name) for name in _FREE])

    def at(logs: np.ndarray) -> DeviceSpec:
        return replace(device, **dict(zip(_FREE, np.exp(logs).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.array([prefill_seconds(costs, at(logs), n) / seconds - 1 for n, seconds in measured.items()])

    nudge = 1e-4
    for _ in range(50):
        now = errors(logs)
        slopes = np.stack([(errors(logs + nudge * unit) - now) / nudge for unit in np.eye(len(_FREE))], axis=1)
        logs = logs - np.linalg.lstsq(slopes, now, rcond=None)[0]
    return at(logs)
