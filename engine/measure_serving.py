"""Measure decode steps, and what prefills and decodes cost each other, by serving: what is done between two steps is
part of how long a step takes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from engine.config import EngineConfig
from engine.engine import Engine
from engine.forward import LanguageModel
from engine.machine import MachineProfile, MeasuredTiming, Pace, Slowdown, StepSample
from engine.timeline import Event, Kind
from engine.timing import pass_seconds
from models.costs import Volume
from scheduling.batch import Alone
from scheduling.order import FCFS
from scheduling.placement import Disaggregated, Exclusive
from scheduling.plan import Whole
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.request import Sampling

_ROUNDS = 5
_STEPS_TIMED = 24
_PACE_PROMPTS = (24, 48, 110, 200, 350, 600)  # tokens
_PACE_ROUNDS = 2
_PACE_SEQUENCES, _PACE_CONTEXT = 4, 200  # that decode beside them
_TOKENS = 500  # of a request that decodes while others are measured: enough to be there all the time


async def measure_steps(model: LanguageModel, config: EngineConfig, sequences: int, context: int) -> StepSample:
    """Serve so many requests side by side, with nothing to prefill."""
    watch = _Watch()
    engine = await _serving(model, config, watch)
    try:
        await _decode_together(engine, watch, sequences, context, _TOKENS)
    finally:
        await engine.stop()
    seconds = median(watch.steps_of(sequences)[:_STEPS_TIMED])
    return StepSample(sequences, context + _STEPS_TIMED / 2, seconds)


async def measure_slowdowns(
    model: LanguageModel, config: EngineConfig, prompts: Sequence[int], batches: Sequence[int]
) -> tuple[list[Slowdown], list[Slowdown]]:
    """(prefills, decode steps): seconds beside the other over seconds alone.

    Prefills of each length in `prompts` beside a batch of the middle size; steps of each size in `batches` beside
    prefills of the last length.
    """
    prefills: list[Slowdown] = []
    steps: list[Slowdown] = []
    for sequences in batches:
        watch = _Watch()
        engine = await _serving(model, config, watch)
        lengths = prompts if sequences == batches[len(batches) // 2] else prompts[-1:]
        try:
            alone = {tokens: await _prefill_seconds(engine, watch, tokens) for tokens in lengths}
            decoding = await _decode_together(engine, watch, sequences, 64, 2 * _TOKENS)
            step_alone = median(watch.steps_of(sequences))
            for tokens in lengths:
                watch.beside.clear()
                beside = await _prefill_seconds(engine, watch, tokens, decoding)
                if len(lengths) > 1:
                    prefills.append(Slowdown(tokens, max(1.0, beside / alone[tokens])))
            while len(watch.beside) < _STEPS_TIMED:
                await _prefill_seconds(engine, watch, lengths[-1], decoding)
            steps.append(Slowdown(sequences, max(1.0, median(watch.beside) / step_alone)))
        finally:
            await engine.stop()
    return prefills, steps


async def measure_pace(model: LanguageModel, config: EngineConfig, profile: MachineProfile) -> Pace:
    """Of this minute, by serving prompts of lengths that were not measured beside a few decodes, in a few seconds.

    Shared machines change their pace by several percent within minutes.
    """
    timing, layers = MeasuredTiming(profile, model.config.num_layers), model.config.num_layers
    watch = _Watch()
    engine = await _serving(model, config, watch)
    try:
        decoding = await _decode_together(engine, watch, _PACE_SEQUENCES, _PACE_CONTEXT, 2 * _TOKENS)
        steps = watch.steps_of(_PACE_SEQUENCES)[:_STEPS_TIMED]
        keys = _PACE_SEQUENCES * (_PACE_CONTEXT + len(steps) / 2)
        step = pass_seconds(timing, layers, Volume(_PACE_SEQUENCES, keys, keys, _PACE_SEQUENCES, _PACE_SEQUENCES))
        ratios = []
        for tokens in _PACE_PROMPTS * _PACE_ROUNDS:
            seconds = await _prefill_seconds(engine, watch, tokens, decoding, rounds=1)
            volume = Volume.of(0, tokens, drawn=1)
            ratios.append(seconds / (timing.slowdown(volume) * pass_seconds(timing, layers, volume)))
    finally:
        await engine.stop()
    return Pace(median(ratios), median(steps) / step)


async def _prefill_seconds(
    engine: Engine,
    watch: _Watch,
    tokens: int,
    decoding: Sequence[asyncio.Task[None]] = (),
    rounds: int = _ROUNDS,
) -> float:
    """Median of a few prefills, one after the other, on the executor; while all of `decoding` go on."""
    watch.prefills.clear()
    for _ in range(rounds):
        await _decode(engine, tokens, 1)
        _require_some(decoding)
    return median(watch.prefills)


class _Watch:
    """A sink: how long prefills took, and decode steps of each batch size, by whether a prefill ran meanwhile."""

    def __init__(self) -> None:
        self.prefills: list[float] = []
        self.beside: list[float] = []  # steps during which a prefill ran, at least for a part of it
        self._alone: dict[int, list[float]] = defaultdict(list)
        self._prefill_since: float | None = None
        self._disturbed = False  # a prefill has begun or ended since the last step ended
        self._step = (0, 0.0)  # sequences of the last step, and when it ended
        self._drives: dict[tuple[str, int], tuple[str, int]] = {}  # those under way: phase, and tokens

    def steps_of(self, sequences: int) -> list[float]:
        """Seconds from the end of one step to the end of the next, of steps of so many with no prefill beside."""
        return self._alone[sequences]

    def __call__(self, event: Event) -> None:
        if event.instance is None or event.drive is None:
            return
        drive = event.instance, event.drive
        if event.kind is Kind.STARTED:
            phase = event.data["phase"]
            self._drives[drive] = phase, event.data["tokens"]
            if phase == "prefill":
                self._prefill_since, self._disturbed = event.time, True
        elif event.kind is Kind.COMPLETED:
            phase, tokens = self._drives.pop(drive)
            if phase == "prefill":
                assert self._prefill_since is not None
                self.prefills.append(event.time - self._prefill_since)
                self._prefill_since, self._disturbed = None, True
            else:
                self._on_step(tokens, event.time)

    def _on_step(self, sequences: int, time: float) -> None:
        before, ended = self._step
        if before == sequences:
            alone = self._prefill_since is None and not self._disturbed
            (self._alone[sequences] if alone else self.beside).append(time - ended)
        self._step, self._disturbed = (sequences, time), False


async def _serving(model: LanguageModel, config: EngineConfig, watch: _Watch) -> Engine:
    placement = Exclusive() if config.system.colocated else Disaggregated()
    system = System(FCFS(), Alone(), Whole(), Preempt.NEVER, placement)
    engine = Engine(model, replace(config, system=system))
    engine.timeline.add(watch)
    await engine.start()
    return engine


async def _decode_together(
    engine: Engine, watch: _Watch, sequences: int, context: int, tokens: int
) -> list[asyncio.Task[None]]:
    """Serve so many requests at once, until enough steps of them all have been seen. Returns what goes on."""
    decoding = [_decode(engine, context, tokens) for _ in range(sequences)]
    while len(watch.steps_of(sequences)) < _STEPS_TIMED:
        _require_some(decoding)
        await asyncio.sleep(0.01)
    return decoding


def _require_some(decoding: Sequence[asyncio.Task[None]]) -> None:
    """RuntimeError where the requests have ended before they could be measured, for whatever reason."""
    if any(task.done() for task in decoding):
        raise RuntimeError("decode steps could not be measured: requests ended before enough of them had been seen")


def _decode(engine: Engine, context: int, tokens: int) -> asyncio.Task[None]:
    """Serve one request, and read what comes."""
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    request = engine.submit(_prompt(engine.model, context), sampling=sampling)

    async def read() -> None:
        async for _ in engine.stream(request):
            pass

    return asyncio.create_task(read())


def _prompt(model: LanguageModel, tokens: int) -> list[int]:
    return [7 * i % model.config.vocab_size for i in range(tokens)]
