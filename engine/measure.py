"""Measure this machine for the simulator: operators, decode steps, and how much prefills and decodes slow each other.

1. Operators: prefill passes of several shapes, alone, on an executor as in serving, with the clock read at every gate.
   Not only of powers of two: matrix products are fastest at these.
2. Decode steps and what both sides cost each other: by serving, since the work between steps is part of a step.

Takes about a minute for a model of 135M on one core, and must have the machine for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from statistics import median

from engine.clock import Clock, LiveClock
from engine.config import EngineConfig
from engine.executor import Failed, Forwards, Reply, ThreadExecutor
from engine.forward import LanguageModel
from engine.gate import Gate
from engine.machine import MachineProfile, PassSample, Slowdown
from engine.measure_serving import measure_slowdowns, measure_steps
from engine.profile import cached_at, provenance_of, write_json
from engine.sampling import Draw
from engine.work import Part, Work
from kv.cache import KVCache
from scheduling.predictor import Extent
from scheduling.preempt import Preempt
from scheduling.request import Sampling

PASSES: tuple[tuple[Extent, ...], ...] = (
    *(((0, tokens),) for tokens in (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 272, 320, 384, 448, 512, 544, 640, 800)),
    *(((0, tokens),) for tokens in (1024, 1400, 2048)),
    ((256, 256),),
    ((512, 64),),
    ((512, 512),),
    ((1024, 256),),
    ((1536, 512),),
    ((0, 64),) * 4,
    ((0, 16),) * 8,
    ((0, 128),) * 4,
)
STEPS = ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (32, 64), (8, 768))  # (sequences, tokens of context)
BESIDE = ((16, 64, 192, 512), (1, 8, 16))  # (prefilled tokens, decoding sequences) of which each slows the other
_ROUNDS = 4
_BLOCK_SIZE = 16


class TimedGate(Gate):
    """Reads the clock at every boundary, and never parks."""

    __slots__ = ("_clock", "stamps")

    def __init__(self, clock: Clock) -> None:
        super().__init__(Preempt.NEVER)
        self._clock = clock
        self.stamps: list[float] = []

    def operator(self, name: str) -> Gate:
        self.stamps.append(self._clock.now())
        return super().operator(name)


async def load_or_measure(
    model: LanguageModel, name: str, config: EngineConfig, *, fresh: bool = False
) -> MachineProfile:
    """From the user's cache, else (or if `fresh`) measured now and kept there."""
    provenance = _provenance(model, name, config)
    path = cached_at(provenance, "machine-")
    if not fresh:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return MachineProfile.from_json(json.loads(path.read_text()))
    measured = await measure(model, name, config)
    write_json(path, asdict(measured))
    return measured


async def measure(model: LanguageModel, name: str, config: EngineConfig) -> MachineProfile:
    """A profile of `model` on an engine set up as `config` says. Raises RuntimeError if a forward pass fails."""
    passes = await measure_passes(model, config.threads()[0])
    steps = [await measure_steps(model, config, *shape) for shape in STEPS]
    prefill_slowdowns: list[Slowdown] = []
    decode_slowdowns: list[Slowdown] = []
    if not config.system.colocated:
        prefill_slowdowns, decode_slowdowns = await measure_slowdowns(model, config, *BESIDE)
    provenance = _provenance(model, name, config) | {"measured": time.strftime("%Y-%m-%d")}
    slowdowns = tuple(prefill_slowdowns), tuple(decode_slowdowns)
    return MachineProfile(provenance, model.layer_operators(0), tuple(passes), tuple(steps), *slowdowns)


def _provenance(model: LanguageModel, name: str, config: EngineConfig) -> dict[str, str]:
    prefill_threads, decode_threads = config.threads()
    return provenance_of(model, name, prefill_threads) | {"decode_threads": str(decode_threads)}


async def measure_passes(
    model: LanguageModel, threads: int, shapes: Sequence[tuple[Extent, ...]] = PASSES
) -> list[PassSample]:
    """Every shape that fits the model's context, `_ROUNDS` times in turn, so that a slow moment hits all alike."""
    limit = model.config.context_length
    shapes = [shape for shape in shapes if all(context + tokens < limit for context, tokens in shape)]
    clock, replies = LiveClock(), asyncio.Queue[Reply]()
    blocks = max(sum(_blocks(context + tokens) for context, tokens in shape) for shape in shapes)
    cache = _zeroed_cache(model, blocks)
    forwards = Forwards(model, cache)
    executor = ThreadExecutor("measure", clock, forwards, threads=threads)
    executor.on_reply = replies.put_nowait
    await executor.ready()
    seen: dict[int, list[PassSample]] = defaultdict(list)
    try:
        for number in range(_ROUNDS + 1):
            for index, shape in enumerate(shapes):
                gate = TimedGate(clock)
                drive = forwards.drive(index, _prefill(model, shape), gate)
                began = clock.now()
                executor.start(drive)
                reply = await replies.get()
                if isinstance(reply, Failed):
                    raise RuntimeError(f"a forward pass failed while measuring: {reply.error}")
                if number:  # the first round warms up
                    seen[index].append(_sample(shape, began, gate.stamps, reply.time, model))
    finally:
        await executor.close()
    return [_median_sample(samples) for samples in seen.values()]


def _sample(
    shape: tuple[Extent, ...], began: float, stamps: Sequence[float], ended: float, model: LanguageModel
) -> PassSample:
    """Operator times are medians over the layers; the first operator's own time is taken off what is before it."""
    size = len(model.layer_operators(0))
    gaps = [after - before for before, after in pairwise(stamps)]
    # gaps[i] is the time of operator i + 1: those of operator o are every size-th from o - 1 on.
    operators = tuple(median(gaps[(o - 1) % size :: size]) for o in range(size))
    return PassSample(shape, max(0.0, stamps[0] - began - operators[0]), operators, ended - stamps[-1])


def _median_sample(samples: Sequence[PassSample]) -> PassSample:
    operators = tuple(median(times) for times in zip(*(sample.operators for sample in samples), strict=True))
    return PassSample(samples[0].parts, median(s.before for s in samples), operators, median(s.after for s in samples))


def _prefill(model: LanguageModel, shape: tuple[Extent, ...]) -> Work:
    ends = list(accumulate(_blocks(context + tokens) for context, tokens in shape))
    draws = (Draw(Sampling(), seed=0, index=0, position=0),)
    parts = tuple(
        Part(_prompt(model, tokens), context, tuple(range(end - _blocks(context + tokens), end)), draws)
        for (context, tokens), end in zip(shape, ends, strict=True)
    )
    layers = model.config.num_layers
    return Work(layers, parts, last=layers)


def _prompt(model: LanguageModel, tokens: int) -> list[int]:
    return [7 * i % model.config.vocab_size for i in range(tokens)]


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK_SIZE)


def _zeroed_cache(model: LanguageModel, blocks: int) -> KVCache:
    """With zeros where a prompt's context would be."""
    shape = model.config
    heads = (shape.num_kv_heads, shape.head_dim)
    cache = KVCache(shape.num_layers, blocks, _BLOCK_SIZE, *heads, model.cache_dtype, model.device)
    for tensor in (*cache.key, *cache.value):
        tensor.zero_()
    return cache
