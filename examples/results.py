"""What one run came to, as the JSON record that `ablate` and `replay` write.

A miss is a miss: errors, refusals, aborts and requests that did not finish count as such in every attainment. A figure
that does not exist (a p99 of nothing, blocking where nothing was parked) is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import pstdev
from typing import Any, Literal

from engine.metrics import RequestRows, Row, Spread, percentile, summarise
from engine.timeline import Event, Kind

Record = dict[str, Any]
Metric = Literal["ttft", "tbt", "both"]

ATTAINMENT: dict[Metric, str] = {"ttft": "ttft_attainment", "tbt": "tbt_attainment", "both": "attainment"}
BY_CLASS: dict[Metric, str] = {key: f"{name}_by_class" for key, name in ATTAINMENT.items()}


def fold(
    rows: Sequence[Row], *, seconds: float, blocking: Spread | None = None, utilisation: float | None = None
) -> Record:
    """The figures over all `rows`, ended or not, of a run of so many seconds.

    `ttft_*_s` are over the requests that got a first token; `tbt_p99_s` is the p99 over requests of their own p99 gap.
    `fairness` is Jain's index of TTFT over its target: 1 if all wait alike for what they are due, 1/n if one bears all.
    """
    results = summarise(rows, seconds=seconds, blocking=blocking)
    total, stops = results.total, results.blocking
    ttfts = [row.ttft for row in rows if row.ttft is not None]
    gaps = [row.tbt_p99 for row in rows if row.tbt_p99 is not None]
    waits = [row.ttft / row.slo.ttft for row in rows if row.ttft is not None and row.slo.ttft is not None]
    return {
        "requests": total.n,
        "ttft_attainment": total.ttft_attainment,
        "tbt_attainment": total.tbt_attainment,
        "attainment": total.attainment,
        "attainment_by_class": {label: part.attainment for label, part in results.labels.items()},
        "ttft_attainment_by_class": {label: part.ttft_attainment for label, part in results.labels.items()},
        "tbt_attainment_by_class": {label: part.tbt_attainment for label, part in results.labels.items()},
        "met_per_s": total.met_per_s,
        "ttft_p50_s": total.ttft_p50,
        "ttft_p99_s": total.ttft_p99,
        "ttft_std_s": pstdev(ttfts) if ttfts else None,
        "tbt_p99_s": percentile(gaps, 99) if gaps else None,
        "blocking_mean_ms": None if stops.mean is None else stops.mean * 1e3,
        "blocking_max_ms": stops.max * 1e3 if stops.n else None,
        "utilisation": utilisation,
        "fairness": jain(waits),
        "unfinished": sum(row.finish is not Kind.FINISHED for row in rows),
    }


def fold_run(rows: RequestRows, busy: Busy) -> Record:
    """The figures of an engine's run."""
    results = rows.results()
    everybody = [*rows.rows, *rows.unfinished]
    return fold(everybody, seconds=results.seconds, blocking=rows.blocking, utilisation=busy.share)


def jain(values: Sequence[float]) -> float | None:
    """Jain's fairness index (Jain, Chiu, Hawe, 1984): the square of the sum over n times the sum of the squares."""
    largest = max(values, default=0.0)
    if not 0 < largest < inf:
        return None
    shares = [value / largest for value in values]  # whose squares neither overflow nor vanish
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def worst_class(record: Record, metric: Metric) -> tuple[str, float] | None:
    """The type that fares worst by this metric, and how; None where no request has such a target."""
    shares = {label: share for label, share in record[BY_CLASS[metric]].items() if share is not None}
    return min(shares.items(), key=lambda item: item[1]) if shares else None


class Busy:
    """A Timeline sink: the share of the time that instances which prefill have something on their executor, from the
    first event until the last of any such instance."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._latest = 0.0
        self._busy = 0.0
        self._since: dict[tuple[str, int], float] = {}  # of each running drive
        self._instances: set[str] = set()

    def __call__(self, event: Event) -> None:
        if self._began is None:
            self._began = event.time
        if event.instance is None or event.drive is None or event.instance.startswith("decode"):
            return
        self._instances.add(event.instance)
        self._latest = max(self._latest, event.time)
        drive = event.instance, event.drive
        match event.kind:
            case Kind.STARTED | Kind.RESUMED:
                self._since[drive] = event.time
            case Kind.PARKED | Kind.COMPLETED | Kind.DRIVE_FAILED if drive in self._since:
                self._busy += event.time - self._since.pop(drive)

    @property
    def share(self) -> float | None:
        """None if nothing was driven."""
        if self._began is None or self._latest <= self._began:
            return None
        return self._busy / (len(self._instances) * (self._latest - self._began))
