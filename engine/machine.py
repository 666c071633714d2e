"""This machine as a simulated one: its operators and decode steps as measured (engine/measure.py), not as computed.

    machine = await measure(model, "smollm2")
    rows = simulate(system, arrivals, ThisMachine(model.config, machine, config))

Prefill and decode instances share the processor and its memory bandwidth here. What each takes alone is measured, and
how much longer it takes while the other is busy. A co-located instance has the machine for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.course import Leg
from engine.devices import Device
from engine.profile import Floats, fit_terms
from engine.timing import Timing
from models.config import ModelConfig
from models.costs import ModelCosts, Volume, model_costs
from models.decoder import Model
from scheduling.predictor import Extent
from scheduling.presets import System


@dataclass(frozen=True, slots=True)
class PassSample:
    """One prefill pass, in median seconds: from the hand-over to the executor to the first layer, of each operator of a
    layer, and from the last layer to the reply."""

    parts: tuple[Extent, ...]
    before: float
    operators: tuple[float, ...]
    after: float

    @property
    def volume(self) -> Volume:
        return sum((Volume.of(context, tokens, drawn=1) for context, tokens in self.parts), Volume())


@dataclass(frozen=True, slots=True)
class StepSample:
    """Decode steps one after the other, `context` tokens in each sequence: median seconds from token to token."""

    sequences: int
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long a pass of so many rows takes while the other kind of instance is busy."""

    rows: int
    times: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How many times as long as in a profile prefills and decode steps take."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Slowdowns: of prefills by their tokens, of decode steps by their sequences; none of a co-located instance."""

    provenance: dict[str, str]
    operators: tuple[str, ...]
    passes: tuple[PassSample, ...]
    steps: tuple[StepSample, ...]
    prefill_slowdowns: tuple[Slowdown, ...]
    decode_slowdowns: tuple[Slowdown, ...]

    def at_pace(self, pace: Pace) -> MachineProfile:
        """The same machine in another minute."""
        passes = [
            replace(
                sample,
                before=pace.prefill * sample.before,
                operators=tuple(pace.prefill * seconds for seconds in sample.operators),
                after=pace.prefill * sample.after,
            )
            for sample in self.passes
        ]
        steps = [replace(sample, seconds=pace.decode * sample.seconds) for sample in self.steps]
        return replace(self, passes=tuple(passes), steps=tuple(steps))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MachineProfile:
        """From what `dataclasses.asdict` gave, read back. KeyError, TypeError or ValueError if it is something else."""
        return cls(
            provenance=dict(data["provenance"]),
            operators=tuple(data["operators"]),
            passes=tuple(
                PassSample(tuple((c, t) for c, t in p["parts"]), p["before"], tuple(p["operators"]), p["after"])
                for p in data["passes"]
            ),
            steps=tuple(StepSample(**step) for step in data["steps"]),
            prefill_slowdowns=tuple(Slowdown(**each) for each in data["prefill_slowdowns"]),
            decode_slowdowns=tuple(Slowdown(**each) for each in data["decode_slowdowns"]),
        )


class MeasuredTiming:
    """A `Timing` (engine/timing.py) from a profile.

    Token-wise operators: straight lines between the numbers of rows that were measured. Attention: a fit to sequences,
    rows and (query, key) pairs. Decode steps: lines between the batch sizes, plus so much for each key read. What such
    a step takes beyond its token-wise operators, be it attention or what is done between two steps, is put down to
    attention where decodes and a prefill share a pass.
    """

    def __init__(self, profile: MachineProfile, num_layers: int) -> None:
        self._names = profile.operators
        self._num_layers = num_layers
        volumes = [sample.volume for sample in profile.passes]
        attention = profile.operators.index("attention")
        self._rows, self._tokenwise = self._table(profile, volumes)
        self._attention_at = attention
        self._attention = _fit(
            [[v.sequences, v.rows, v.pairs] for v in volumes], [s.operators[attention] for s in profile.passes]
        )
        self._before = median(sample.before for sample in profile.passes)
        self._after = _fit([[1, v.drawn] for v in volumes], [s.after for s in profile.passes])
        self._batches, self._steps, self._per_key = self._decode_steps(profile.steps)
        self._prefill_slowdowns = _columns(profile.prefill_slowdowns)
        self._decode_slowdowns = _columns(profile.decode_slowdowns)

    def before(self, volume: Volume) -> float:
        return self._before

    def legs(self, first: int, last: int, *volumes: Volume) -> list[Leg]:
        if first == last:
            return []
        together = sum(volumes, Volume())
        seconds = np.array([_between(self._rows, column, together.rows) for column in self._tokenwise.T])
        seconds[self._attention_at] = sum(map(self._attend, volumes))
        if _decodes_only(together):  # few rows may take less than the fewest that were measured in a prefill
            seconds *= self._decode_layer(together) / seconds.sum()
        return [Leg(last - first, self._names, tuple(accumulate(seconds.tolist())))]

    def after(self, volume: Volume) -> float:
        return float(self._after @ (1, volume.drawn)) if volume.drawn else 0.0

    def hand_over(self, tokens: int) -> float:
        """Blocks change their owner; nothing moves."""
        return 0.0

    def slowdown(self, volume: Volume) -> float:
        rows, times = self._decode_slowdowns if _decodes_only(volume) else self._prefill_slowdowns
        return float(np.interp(volume.rows, rows, times))

    def _attend(self, volume: Volume) -> float:
        """Seconds of one layer's attention."""
        if _decodes_only(volume):
            tokenwise = sum(
                _between(self._rows, column, volume.rows)
                for operator, column in enumerate(self._tokenwise.T)
                if operator != self._attention_at
            )
            return max(self._decode_layer(volume) - tokenwise, self._per_key * volume.keys / self._num_layers)
        return float(self._attention @ (volume.sequences, volume.rows, volume.pairs))

    def _decode_layer(self, volume: Volume) -> float:
        """Seconds of one layer in a step of decodes alone."""
        step = _between(self._batches, self._steps, volume.rows) + self._per_key * volume.keys
        return max(step - self.before(volume) - self.after(volume), 0.1 * step) / self._num_layers

    @staticmethod
    def _table(profile: MachineProfile, volumes: Sequence[Volume]) -> tuple[Floats, Floats]:
        """Rows measured, ascending, and seconds of each operator then, [rows, operators]: means over equal rows."""
        rows = sorted({volume.rows for volume in volumes})
        means = [
            np.mean([s.operators for s, v in zip(profile.passes, volumes, strict=True) if v.rows == n], axis=0)
            for n in rows
        ]
        return np.array(rows, dtype=float), np.array(means)

    @staticmethod
    def _decode_steps(steps: Sequence[StepSample]) -> tuple[Floats, Floats, float]:
        """Batch sizes, seconds of a step at each without its keys, and seconds for each key.

        The latter is the slope between the shortest and the longest context of the batch size that has both.
        """
        contexts = {n: sorted((s.context, s.seconds) for s in steps if s.sequences == n) for n in _sizes(steps)}
        n, (short, *_, long) = next((n, seen) for n, seen in contexts.items() if len(seen) > 1)
        per_key = max(0.0, (long[1] - short[1]) / (n * (long[0] - short[0])))
        base = [np.mean([seconds - per_key * n * context for context, seconds in contexts[n]]) for n in contexts]
        return np.array(list(contexts), dtype=float), np.array(base), per_key


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """What `simulate` asks (engine/simulation.py): the engine of `config` as it runs here, on one device that all
    instances share. `config` must say how many bytes K and V take: the simulation has no memory to look at."""

    model: ModelConfig
    profile: MachineProfile
    config: EngineConfig
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not (self.config.num_blocks or self.config.kv_bytes):
            raise ValueError("simulating this machine needs num_blocks or kv_bytes in the engine's config")
        if not self.shared and self.config.prefill_instances > 1:
            raise ValueError("what several co-located instances on this machine cost each other is not measured")

    @property
    def costs(self) -> ModelCosts:
        return model_costs(self.model, itemsize=self.dtype.itemsize)

    def engine_config(self, system: System) -> EngineConfig:
        return replace(self.config, system=system)

    def devices(self, system: System) -> list[Device]:
        return Device.lay_out(Model(self.model, self.dtype, "meta"), None, self.engine_config(system))

    def timing_of(self, instance: str) -> Timing:
        return MeasuredTiming(self.profile, self.model.num_layers)

    @property
    def shared(self) -> bool:
        return bool(self.profile.prefill_slowdowns)


def _decodes_only(volume: Volume) -> bool:
    return volume.rows == volume.sequences


def _columns(slowdowns: Sequence[Slowdown]) -> tuple[Floats, Floats]:
    slowdowns = slowdowns or (Slowdown(1, 1.0),)
    return np.array([s.rows for s in slowdowns], dtype=float), np.array([s.times for s in slowdowns])


def _sizes(steps: Sequence[StepSample]) -> list[int]:
    return sorted({step.sequences for step in steps})


def _between(points: Floats, values: Floats, at: float) -> float:
    """On straight lines between the points, the last of which goes on."""
    if at > points[-1] and len(points) > 1:
        slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
        return float(values[-1] + max(slope, 0.0) * (at - points[-1]))
    return float(np.interp(at, points, values))


def _fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> Floats:
    return fit_terms(np.array(terms, dtype=float), np.array(seconds))
