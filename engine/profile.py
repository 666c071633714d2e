"""Measure this machine's prefill, and fit the TTFT predictor to it.

FlowPrefill profiles 45 lengths and fits a cubic of the token count. Here the terms are those of the work (see
scheduling/predictor.py): as many coefficients, but right also for merged prompts and for later chunks, and fitted by
relative error, so that a short prompt counts as much as a long one. The fit is kept in the user's cache with
what it was measured on, and is measured again when any of that changes.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.clock import LiveClock
from engine.executor import Failed, Forwards, drive_on
from engine.forward import LanguageModel
from engine.gate import Gate
from engine.sampling import Draw
from engine.work import Part, Work
from kv.cache import KVCache
from models.hub import cache_dir
from scheduling.predictor import Extent, Predictor, attention_pairs
from scheduling.preempt import Preempt
from scheduling.request import Sampling

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

# What is measured: single prompts, a cohort of short ones, and a chunk after a long prefix.
SHAPES: tuple[tuple[Extent, ...], ...] = (
    *(((0, tokens),) for tokens in (16, 32, 64, 128, 256, 512, 1024, 2048)),
    ((0, 64),) * 8,
    ((0, 256),) * 4,
    ((1024, 256),),
    ((1536, 512),),
)
_REPEATS = 5
_SECONDS_PER_SHAPE = 2.5  # a shape that takes long is repeated less often
_BLOCK_SIZE = 16
_FEWEST = 3  # samples that the terms are fitted to


@dataclass(frozen=True, slots=True)
class Sample:
    """The median time of one forward pass over `parts`."""

    parts: tuple[Extent, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """`provenance` says what the samples were measured on: model, dtype, device, threads, processor, torch, day."""

    provenance: dict[str, str]
    samples: tuple[Sample, ...]

    def predictor(self) -> Predictor:
        return fit(self.samples)


def fit(samples: Sequence[Sample]) -> Predictor:
    """Least squares on the relative error, with no negative coefficient. ValueError for fewer than three samples.

    Of the ways to call the fastest few samples the floor, or none, and to fit the terms to the others, the best.
    """
    if len(samples) < _FEWEST:
        raise ValueError(f"a predictor is fitted to at least {_FEWEST} samples, got {len(samples)}")
    samples = sorted(samples, key=lambda sample: sample.seconds)
    seconds = np.array([sample.seconds for sample in samples])
    terms = np.array([_terms(sample.parts) for sample in samples])

    def of(fastest: int) -> tuple[float, Floats, Floats]:
        """Floor, coefficients, and the relative errors of both together."""
        ones = np.ones((fastest, 1))
        floor = float(fit_terms(ones, seconds[:fastest])[0]) if fastest else 0.0
        coefficients = fit_terms(terms[fastest:], seconds[fastest:])
        return floor, coefficients, np.maximum(floor, terms @ coefficients) / seconds - 1

    fits = [of(fastest) for fastest in range(len(samples) - _FEWEST + 1)]
    floor, coefficients, errors = min(fits, key=lambda fit: float(fit[2] @ fit[2]))
    per_step, per_token, per_pair = (float(c) for c in coefficients)
    errors = np.abs(errors)
    return Predictor(per_step, per_token, per_pair, floor, float(errors.mean()), float(errors.max()))


def fit_terms(terms: Floats, seconds: Floats) -> Floats:
    """Coefficients of the columns of `terms`, [samples, terms], that give `seconds`: least squares of the relative
    error. None is negative: a term that would be is left out."""
    kept = list(range(terms.shape[1]))
    while True:
        solution = np.linalg.lstsq(terms[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if (solution >= 0).all():
            break
        kept.pop(int(solution.argmin()))
    coefficients = np.zeros(terms.shape[1])
    coefficients[kept] = solution
    return coefficients


def _terms(parts: Sequence[Extent]) -> list[float]:
    return [1.0, sum(tokens for _, tokens in parts), sum(attention_pairs(*part) for part in parts)]


def load_or_measure(model: LanguageModel, name: str, threads: int, *, fresh: bool = False) -> Profile:
    """This machine's profile of a model at a thread count: from the user's cache, else (or if `fresh`) measured now."""
    provenance = provenance_of(model, name, threads)
    path = cached_at(provenance)
    if not fresh and (profile := _read(path)) is not None:
        return profile
    log.warning("measuring the prefill times of %s on %s threads, once", name, threads)
    samples = measure(model, threads)
    profile = Profile(provenance | {"measured": time.strftime("%Y-%m-%d")}, tuple(samples))
    write_json(path, asdict(profile))
    return profile


def cached_at(provenance: dict[str, str], kind: str = "") -> Path:
    """Where a profile of this provenance is kept."""
    key = sha256(json.dumps(provenance, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{kind}{key}.json"


def write_json(path: Path, data: dict[str, Any]) -> None:
    """All of it or nothing, whoever else writes or reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{time.monotonic_ns()}.tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)


def provenance_of(model: LanguageModel, name: str, threads: int) -> dict[str, str]:
    """What a measurement of `model` is true for."""
    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(model.cache_dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _processor(),
        "threads": str(threads),
        "torch": torch.__version__,
    }


def measure(model: LanguageModel, threads: int, shapes: Sequence[tuple[Extent, ...]] = SHAPES) -> list[Sample]:
    """Time forward passes on a thread set up as an executor's is. Shapes beyond the model's context are left out."""
    limit = model.config.context_length
    shapes = [shape for shape in shapes if all(context + tokens < limit for context, tokens in shape)]
    samples: list[Sample] = []
    errors: list[str] = []

    def work() -> None:
        torch.zeros(1).add_(1)
        torch.set_num_threads(threads)
        with torch.inference_mode():
            _run(model, SHAPES[0], errors)  # warm up
            for shape in shapes:
                samples.append(Sample(shape, _median(model, shape, errors)))
                if errors:
                    return

    thread = Thread(target=work, name="profile")
    thread.start()
    thread.join()
    if errors:
        raise RuntimeError(f"a forward pass failed while profiling: {errors[0]}")
    return samples


def _median(model: LanguageModel, shape: tuple[Extent, ...], errors: list[str]) -> float:
    times: list[float] = []
    while not errors and len(times) < _REPEATS and (len(times) < 2 or sum(times) < _SECONDS_PER_SHAPE):
        times.append(_run(model, shape, errors))
    return statistics.median(times) if times else 0.0


def _run(model: LanguageModel, shape: tuple[Extent, ...], errors: list[str]) -> float:
    """Seconds of one forward pass of `shape`, the choice of the first tokens included."""
    config, clock = model.config, LiveClock()
    blocks = [-(-(context + tokens) // _BLOCK_SIZE) for context, tokens in shape]
    cache = KVCache(
        config.num_layers,
        sum(blocks),
        _BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        model.cache_dtype,
        model.device,
    )
    for tensor in (*cache.key, *cache.value):
        tensor.zero_()  # what a later chunk finds before it
    ends = list(accumulate(blocks))
    draws = (Draw(Sampling(), seed=0, index=0, position=0),)
    parts = tuple(
        Part([7 * i % config.vocab_size for i in range(tokens)], context, tuple(range(end - count, end)), draws)
        for (context, tokens), count, end in zip(shape, blocks, ends, strict=True)
    )
    work = Work(config.num_layers, parts, last=config.num_layers)
    began = clock.now()
    reply = drive_on(Forwards(model, cache).drive(0, work, Gate(Preempt.NEVER)), clock)
    if isinstance(reply, Failed):
        errors.append(reply.error)
    return reply.time - began


def _read(path: Path) -> Profile | None:
    """A profile from the cache; None if there is none, or none that can be read."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        samples = tuple(
            Sample(tuple((int(c), int(t)) for c, t in sample["parts"]), float(sample["seconds"]))
            for sample in data["samples"]
        )
        return Profile(dict(data["provenance"]), samples)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
