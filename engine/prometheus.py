"""The text of /metrics: counters and histograms folded from the Timeline, gauges read from the engine at that moment.

    metrics = PrometheusMetrics();  engine.timeline.add(metrics);  ...;  metrics.render(engine)

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, 0.0.4). Times are in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.timeline import TERMINAL, Event, Kind
from scheduling.request import Request, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Upper bounds in seconds: short enough for a GPU's chat, long enough for a document on a laptop.
_TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TBT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
_BLOCKING_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)


class Histogram:
    """Counts of observations at or below each bound, cumulative when shown."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


@dataclass(slots=True)
class _Live:
    request: Request
    last_token: dict[int, float] = field(default_factory=dict)  # choice -> when its last token came
    first_token: float = 0.0


class PrometheusMetrics:
    """A Timeline sink. Knows of each live request, and of finished ones only sums."""

    def __init__(self) -> None:
        self._live: dict[int, _Live] = {}
        self._park_requested: dict[tuple[str | None, int | None], float] = {}  # (instance, drive) -> when
        self._outcomes = Counter(dict.fromkeys(sorted(TERMINAL), 0))
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._parks = 0
        self._ttft = Histogram(_TTFT_BOUNDS)
        self._tbt = Histogram(_TBT_BOUNDS)
        self._blocking = Histogram(_BLOCKING_BOUNDS)

    def __call__(self, event: Event) -> None:
        if event.request is not None:
            self._on_request(event, event.request)
        else:
            self._on_drive(event)

    def _on_request(self, event: Event, request: Request) -> None:
        if event.kind is Kind.ARRIVED:
            self._live[request.id] = _Live(request)
            return
        live = self._live.get(request.id)
        if live is None:  # it arrived before this sink was added
            return
        match event.kind:
            case Kind.FIRST_TOKEN:  # of every choice at once
                self._ttft.observe(event.time - request.arrival)
                self._prompt_tokens += len(request.prompt)
                self._generated_tokens += request.sampling.n
                live.first_token = event.time
            case Kind.TOKEN:
                self._on_tokens(live, event.data["index"], [(event.time, event.time, 1)])
            case Kind.TOKENS:
                self._on_tokens(live, event.data["index"], event.data["stretches"].tolist())
            case kind if kind in TERMINAL:
                self._outcomes[kind] += 1
                del self._live[request.id]

    def _on_tokens(self, live: _Live, index: int, stretches: Iterable[Sequence[float]]) -> None:
        """The next tokens of one choice, as in engine/gaps.py."""
        for first, last, count in stretches:
            self._tbt.observe(first - live.last_token.get(index, live.first_token))
            if count > 1:
                self._tbt.observe((last - first) / (count - 1), int(count) - 1)
            self._generated_tokens += int(count)
            live.last_token[index] = last

    def _on_drive(self, event: Event) -> None:
        drive = (event.instance, event.drive)
        match event.kind:
            case Kind.PARK_REQUESTED:
                self._park_requested[drive] = event.time
            case Kind.PARKED:
                self._parks += 1
                self._blocking.observe(event.time - self._park_requested.pop(drive, event.time))
            case Kind.COMPLETED | Kind.DRIVE_FAILED:  # it came to its end before the next gate
                if (asked := self._park_requested.pop(drive, None)) is not None:
                    self._blocking.observe(event.time - asked)

    def render(self, engine: Engine) -> str:
        return "\n".join(self._lines(engine)) + "\n"

    def _lines(self, engine: Engine) -> Iterator[str]:
        yield from _head("layby_requests_total", "counter", "Requests that have ended, by how.")
        for kind, count in self._outcomes.items():
            yield f'layby_requests_total{{outcome="{kind}"}} {count}'

        yield from _head("layby_requests", "gauge", "Live requests, by where they are.")
        states = Counter(live.request.state for live in self._live.values())
        for state in State:
            if not state.terminal:
                yield f'layby_requests{{state="{state.value}"}} {states[state]}'

        yield from _head("layby_prompt_tokens_total", "counter", "Prompt tokens of requests that were prefilled.")
        yield f"layby_prompt_tokens_total {self._prompt_tokens}"
        yield from _head("layby_generated_tokens_total", "counter", "Tokens generated, over all choices.")
        yield f"layby_generated_tokens_total {self._generated_tokens}"

        yield from _head("layby_parks_total", "counter", "Prefills that pulled over.")
        yield f"layby_parks_total {self._parks}"

        for histogram, name, text in (
            (self._ttft, "layby_ttft_seconds", "From arrival to first token."),
            (self._tbt, "layby_tbt_seconds", "Between two tokens of a choice."),
            (self._blocking, "layby_park_blocking_seconds", "From a request to park until the executor is free."),
        ):
            yield from _head(name, "histogram", text)
            yield from histogram.lines(name)

        yield from _head("layby_late_signals_total", "counter", "Arrivals of requests that had ended: ignored.")
        for instance in engine.prefill:
            yield f'layby_late_signals_total{{instance="{instance.name}"}} {instance.prefills.late_signals}'

        quotas = [(instance.name, instance.quota) for instance in engine.instances]
        yield from _head("layby_kv_blocks_used", "gauge", "KV blocks in use.")
        for name, quota in quotas:
            yield f'layby_kv_blocks_used{{instance="{name}"}} {quota.used}'
        yield from _head("layby_kv_blocks_limit", "gauge", "KV blocks that the instance may use.")
        for name, quota in quotas:
            yield f'layby_kv_blocks_limit{{instance="{name}"}} {quota.limit}'


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"
