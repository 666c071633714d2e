"""An ablation as data: which systems, on what, under which load; and one run of it, which any process can carry out.

A run is told apart by everything that its figures depend on, the source code included: `Run.key`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from inspect import getsourcefile
from pathlib import Path
from re import compile
from typing import Any

from engine.simulation import Deployment
from examples.arrivals import Arrival, scaled
from examples.workload import Recorded, Workload, at_rate, open_workload
from scheduling.change import change
from scheduling.presets import System, preset
from scheduling.request import SLO

_ENUM = compile(r"<\w+\.(\w+): [^>]*>")  # how an enumeration's member prints

CODE = ("engine", "models", "scheduling", "kv", "examples")  # what a run's figures depend on


@dataclass(frozen=True, slots=True)
class Variant:
    """A system, and what it is called: a preset's name with the answers that have been changed."""

    name: str
    system: System


def variant(words: str) -> Variant:
    """A preset's name, and behind it the answers to change: `distserve-cp2k order=s-edf budget=4096`. ValueError says
    what is wrong."""
    name, *settings = words.split()
    return Variant(" ".join([name, *settings]), change(preset(name), *settings))


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. `source` is a TRACE (examples/workload.py), `digest` its content, `model` that whose SLOs are used.

    Prompts, outputs and SLOs are multiplied by their scales before a run's own SLO scale.
    """

    source: str
    digest: str
    requests: int
    cv: float | None  # of the gaps; None: as recorded
    model: str = "llama3-8b"
    slo_class: str | None = None
    slos: tuple[tuple[str, SLO], ...] = ()
    allow_equal_times: bool = False
    keep_history: bool = False
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    max_output: int | None = None
    slo_base: float = 1.0

    def workload(self) -> Workload:
        return _opened(
            self.source, self.digest, self.model, self.slo_class, self.slos, self.allow_equal_times, self.keep_history
        )

    def arrivals(self, rate: float, slo_scale: float, seed: int) -> list[Arrival]:
        """The same seed gives the same requests at any rate and scale: common random numbers."""
        workload = self.workload()
        drawn = at_rate(workload.draw(self.requests, seed=seed, cv=self.cv), workload, rate)
        return scaled(
            drawn,
            prompt=self.prompt_scale,
            output=self.output_scale,
            max_output=self.max_output,
            slo=self.slo_base * slo_scale,
        )


@dataclass(frozen=True, slots=True)
class Live:
    """The torch backend: a model on a device of this machine."""

    model: str = "smollm2"
    device: str = "auto"
    prefill_instances: int = 1
    decode_instances: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One system under one load, once."""

    variant: Variant
    backend: Deployment | Live
    load: Load
    rate: float
    slo_scale: float
    seed: int

    @property
    def key(self) -> str:
        """Of the cache: the same for the same figures. The system's name is no part of it."""
        parts = (self.backend, self.load, self.rate, self.slo_scale, self.seed)
        return digest_of(*map(repr, parts), *describe(self.variant.system).values(), code_digest())

    @property
    def identity(self) -> dict[str, Any]:
        """How a record names it."""
        return {"system": self.variant.name, "rate": self.rate, "slo_scale": self.slo_scale, "seed": self.seed}


@lru_cache(maxsize=8)
def _opened(
    source: str,
    digest: str,
    model: str,
    slo_class: str | None,
    slos: tuple[tuple[str, SLO], ...],
    allow_equal_times: bool,
    keep_history: bool,
) -> Workload:
    """Once for each process; `digest` is here so that a changed file is read again."""
    return open_workload(
        source,
        model=model,
        slo_class=slo_class,
        slos=dict(slos),
        allow_equal_times=allow_equal_times,
        keep_history=keep_history,
    )


def load_digest(source: str, workload: Workload) -> str:
    """What the arrivals are drawn from: a file's content, or a generator's distributions."""
    if isinstance(workload, Recorded):
        return sha256(Path(source).read_bytes()).hexdigest()[:16]
    return digest_of(repr(workload))


@cache
def code_digest() -> str:
    """Of the project's Python files: results of another version are not taken for this one's."""
    root = Path(__file__).resolve().parents[1]
    content = sha256()
    for folder in CODE:
        for path in sorted((root / folder).glob("*.py")):
            content.update(path.read_bytes())
    return content.hexdigest()[:16]


def describe(system: System) -> dict[str, str]:
    """Each of its answers in words that differ whenever the answers do. An answer from elsewhere (a user's own order)
    brings the digest of its file along."""
    words: dict[str, str] = {}
    for name in ("order", "batch", "plan", "preempt", "placement"):
        answer = getattr(system, name)
        kind = type(answer)
        said = repr(answer)
        if " object at 0x" in said:  # it says where it is, not what
            said = f"{kind.__qualname__} {vars(answer)}"
        words[name] = _ENUM.sub(lambda member: member[1].lower(), said)
        if kind.__module__.split(".")[0] not in CODE:
            source = getsourcefile(kind)
            content = Path(source).read_bytes() if source else b""
            words[name] += f" of {kind.__module__}, {sha256(content).hexdigest()[:8]}"
    return words


def digest_of(*parts: str) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()[:16]
