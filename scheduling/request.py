"""What a user asked for: prompt, sampling, SLO, and how far the prefill has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf


@dataclass(frozen=True, slots=True)
class SLO:
    """Relative targets in seconds: time to first token, and time between tokens. None means best effort."""

    ttft: float | None = None
    tbt: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft), ("tbt", self.tbt)):
            if value is not None and not 0 < value < inf:
                raise ValueError(f"slo.{name} must be a positive number of seconds, got {value}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_p` 1 keeps the whole distribution."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside the chosen token; None: no logprobs at all

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < inf:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be 0 or more, got {self.logprobs}")


class State(Enum):
    """Where a request is. Every request ends in exactly one of FINISHED, ABORTED, FAILED or REFUSED."""

    WAITING = "waiting"  # for a prefill, or for its next chunk
    RUNNING = "running"  # in the cohort that the executor drives
    PARKED = "parked"  # in a cohort that pulled over
    HANDOVER = "handover"  # prefilled, waiting for room on a decode instance
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    REFUSED = "refused"

    @property
    def terminal(self) -> bool:
        return self in (State.FINISHED, State.ABORTED, State.FAILED, State.REFUSED)


@dataclass(eq=False, slots=True)
class Request:
    """One request. `arrival` is stamped by the engine, in seconds on its clock; `computed` counts prompt tokens whose
    K and V are in the cache."""

    id: int
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    slo: SLO = field(default_factory=SLO)
    arrival: float = 0.0
    seed: int = 0  # the request's own, or one that the engine has drawn
    label: str = ""  # the workload type or SLO class, for reports
    computed: int = 0
    state: State = State.WAITING
    admitted: bool = False  # holds KV blocks for its whole prompt
    recomputes: int = 0  # how often its blocks were given up while it was decoding
    blocks_beside: int = 0  # KV blocks that it gave up beside its prompt's, and will want again
    alone: bool = False  # retried after its cohort failed: it must not take others with it again

    @property
    def remaining(self) -> int:
        """Prompt tokens that the prefill has yet to compute."""
        return len(self.prompt) - self.computed

    @property
    def refusable(self) -> bool:
        """Whether it may be turned away for being late: it has not begun. Recomputed ones had their first token."""
        return not self.admitted and not self.recomputes

    @property
    def deadline(self) -> float:
        """The moment the first token is due, in seconds on the engine's clock; infinite for best effort."""
        return inf if self.slo.ttft is None else self.arrival + self.slo.ttft

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.computed}/{len(self.prompt)} tokens, {self.state.value})"
