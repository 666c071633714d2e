"""Results: the Timeline folded to one row per request, and what the rows say about the SLOs.

    rows = RequestRows();  engine.timeline.add(rows);  ...;  results = rows.results();  results.total.ttft_attainment

A request *meets* TTFT if its first token came in time, and *meets* TBT if its p99 gap between tokens is within target.
Goodput is honest: refused, failed, aborted and unfinished requests are misses, and a best-effort request counts in no
denominator. Goodput here is requests met per second of the whole run (FlowPrefill's; papers: arXiv 2602.16603).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.gaps import Gaps
from engine.timeline import TERMINAL, Event, Kind
from scheduling.request import SLO, Request


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` of the values do not exceed.

    Always a value that occurred, so "p99 within target" means exactly "at most one in a hundred above it".
    """
    if not values:
        raise ValueError("no percentile of no values")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, got {percent}")
    rank = math.ceil(percent * len(values) / 100)
    return sorted(values)[rank - 1]


@dataclass(frozen=True, slots=True)
class Row:
    """One request when it is over, or as far as it has come. Times are seconds on the engine's clock."""

    id: int
    label: str
    slo: SLO
    arrival: float
    prompt_tokens: int
    output_tokens: int  # over all choices
    first_token: float | None  # the moment it came
    ended: float | None
    finish: Kind | None  # a terminal kind; None: unfinished
    tbt_mean: float | None  # seconds, over the gaps of all choices; None: fewer than two tokens
    tbt_p99: float | None
    tbt_max: float | None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def meets_ttft(self) -> bool | None:
        """None for a request without a TTFT target."""
        if self.slo.ttft is None:
            return None
        return self.finish is Kind.FINISHED and self.ttft is not None and self.ttft <= self.slo.ttft

    @property
    def meets_tbt(self) -> bool | None:
        """None for a request without a TBT target. A finished request of one token has no gap, so none too long."""
        if self.slo.tbt is None:
            return None
        return self.finish is Kind.FINISHED and (self.tbt_p99 is None or self.tbt_p99 <= self.slo.tbt)

    @property
    def meets(self) -> bool | None:
        """Whether every target it has is met; None for a best-effort request."""
        targets = [met for met in (self.meets_ttft, self.meets_tbt) if met is not None]
        return all(targets) if targets else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one label, or of all. An attainment over no request is None, as is a TTFT of no first token."""

    n: int
    ttft_attainment: float | None
    tbt_attainment: float | None
    attainment: float | None  # every target the request has
    met_per_s: float  # requests that meet every target they have, per second of the whole run
    ttft_mean: float | None  # seconds, over the requests that got a first token
    ttft_p50: float | None
    ttft_p99: float | None

    @classmethod
    def of(cls, rows: Sequence[Row], seconds: float) -> Summary:
        """`seconds`: how long the run took, first arrival to last event."""
        ttfts = [row.ttft for row in rows if row.ttft is not None]
        met = sum(row.meets is True for row in rows)
        return cls(
            n=len(rows),
            ttft_attainment=_share(row.meets_ttft for row in rows),
            tbt_attainment=_share(row.meets_tbt for row in rows),
            attainment=_share(row.meets for row in rows),
            met_per_s=met / seconds if seconds > 0 else 0.0,
            ttft_mean=sum(ttfts) / len(ttfts) if ttfts else None,
            ttft_p50=percentile(ttfts, 50) if ttfts else None,
            ttft_p99=percentile(ttfts, 99) if ttfts else None,
        )


def _share(met: Iterable[bool | None]) -> float | None:
    counted = [value for value in met if value is not None]
    return sum(counted) / len(counted) if counted else None


@dataclass(slots=True)
class Spread:
    """Count, mean and maximum of durations in seconds, in constant memory."""

    n: int = 0
    total: float = 0.0
    max: float = 0.0

    def add(self, seconds: float) -> None:
        self.n += 1
        self.total += seconds
        self.max = max(self.max, seconds)

    @property
    def mean(self) -> float | None:
        return self.total / self.n if self.n else None


@dataclass(frozen=True, slots=True)
class Results:
    seconds: float  # first arrival to last event
    total: Summary
    labels: dict[str, Summary]  # by label, in alphabetical order
    blocking: Spread  # park requested -> parked (or completed first)


def summarise(rows: Sequence[Row], *, seconds: float, blocking: Spread | None = None) -> Results:
    """Fold rows to results, in total and by label. `seconds` is the length of the run they come from."""
    labels = sorted({row.label for row in rows})
    return Results(
        seconds=seconds,
        total=Summary.of(rows, seconds),
        labels={label: Summary.of([row for row in rows if row.label == label], seconds) for label in labels},
        blocking=blocking or Spread(),
    )


@dataclass(slots=True)
class _Live:
    """A request under way. `tokens` counts those of all choices."""

    request: Request
    first_token: float | None = None
    tokens: int = 0
    gaps: Gaps = field(default_factory=Gaps)

    def row(self, finish: Kind | None, ended: float | None) -> Row:
        request = self.request
        mean, p99, longest = self.gaps.fold(99) or (None, None, None)
        return Row(
            id=request.id,
            label=request.label,
            slo=request.slo,
            arrival=request.arrival,
            prompt_tokens=len(request.prompt),
            output_tokens=self.tokens,
            first_token=self.first_token,
            ended=ended,
            finish=finish,
            tbt_mean=mean,
            tbt_p99=p99,
            tbt_max=longest,
        )


class RequestRows:
    """A Timeline sink: hands one Row to `emit` as each request ends (by default to the list `rows`).

    Memory: a row per ended request (none where `emit` keeps none), and the token gaps of the live ones.
    """

    def __init__(self, emit: Callable[[Row], None] | None = None) -> None:
        self.rows: list[Row] = []
        self.blocking = Spread()
        self._emit = emit or self.rows.append
        self._live: dict[int, _Live] = {}
        self._cohorts: dict[tuple[str | None, int | None], tuple[int, ...]] = {}  # drive -> its requests
        self._park_requested: dict[tuple[str | None, int | None], float] = {}
        self._began: float | None = None
        self._latest = 0.0

    def __call__(self, event: Event) -> None:
        self._latest = max(self._latest, event.time)
        if event.request is not None:
            self._on_request(event, event.request)
        else:
            self._on_drive(event)

    def _on_request(self, event: Event, request: Request) -> None:
        if self._began is None:
            self._began = request.arrival
        if event.kind in TERMINAL:  # a request refused on arrival may have no other event
            ended = self._live.pop(request.id, None) or _Live(request)
            self._emit(ended.row(event.kind, event.time))
            return
        if request.id not in self._live:
            self._live[request.id] = _Live(request)
        live = self._live[request.id]
        if event.kind is Kind.FIRST_TOKEN:
            live.first_token = event.time
            live.tokens = request.sampling.n
            live.gaps.begin(request.sampling.n, event.time)
        elif event.kind is Kind.TOKEN:
            live.gaps.add(event.data["index"], event.time)
            live.tokens += 1
        elif event.kind is Kind.TOKENS:
            live.gaps.add_stretches(event.data["index"], event.data["stretches"])
            live.tokens += event.data["count"]

    def _on_drive(self, event: Event) -> None:
        drive = (event.instance, event.drive)
        match event.kind:
            case Kind.STARTED:
                self._cohorts[drive] = event.data["requests"]
            case Kind.PARK_REQUESTED:
                # Stopping work that everybody has left blocks nobody.
                if any(request in self._live for request in self._cohorts.get(drive, ())):
                    self._park_requested[drive] = event.time
            case Kind.PARKED | Kind.COMPLETED | Kind.DRIVE_FAILED if drive in self._park_requested:
                self.blocking.add(event.time - self._park_requested.pop(drive))
        if event.kind in (Kind.COMPLETED, Kind.DRIVE_FAILED, Kind.CLOSED):
            self._cohorts.pop(drive, None)

    @property
    def unfinished(self) -> list[Row]:
        """The requests that have not ended, as far as they have come."""
        return [live.row(None, None) for live in self._live.values()]

    def results(self) -> Results:
        """Results over `rows` and the unfinished, which are misses."""
        seconds = 0.0 if self._began is None else self._latest - self._began
        return summarise([*self.rows, *self.unfinished], seconds=seconds, blocking=self.blocking)
