"""A Chrome trace of the Timeline, for ui.perfetto.dev or chrome://tracing: one sees a long prefill pull over.

Process "instances" has a track for each executor with the stretches it drove, and beside it tracks of what is parked;
an arrow follows a drive from stretch to gap to stretch. Process "requests" has a track for each request: waiting,
running, parked, hand-over, decoding, with marks at its first token and at its deadline.

Format: the "JSON object format" of Chrome's Trace Event Format. Times are microseconds of the engine's clock.
"""

from __future__ import annotations

import json
from math import isinf
from pathlib import Path
from typing import Any

from engine.intervals import DriveInterval, Intervals, Phase, RequestInterval
from engine.timeline import TERMINAL, Event, Kind
from scheduling.request import Request

INSTANCES, REQUESTS = 1, 2  # process ids of the two groups of tracks

_REQUEST_TRACKS = 1000  # thread ids from here on; the instances' tracks count from 1


class ChromeTrace:
    """A Timeline sink that writes to `path` as it goes, in constant memory. `close()` makes the file whole."""

    def __init__(self, path: Path | str) -> None:
        """Raises OSError where `path` cannot be written: at the start, not after a long run."""
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (open until close())
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._first = True
        self._intervals = Intervals(self._drive, self._phase)
        self._tracks: dict[str, int] = {}  # name -> thread id, of the instances' process
        self._parking: dict[str, list[float]] = {}  # instance -> when each of its parking tracks is free again
        self._labels: dict[int, str] = {}  # live requests, for naming drives
        self._name_process(INSTANCES, "instances")
        self._name_process(REQUESTS, "requests")

    def __call__(self, event: Event) -> None:
        request = event.request
        if request is not None and event.kind is Kind.ARRIVED:
            self._begin_request(request)
        self._intervals(event)
        if request is not None and event.kind is Kind.FIRST_TOKEN:
            late = event.time > request.deadline
            self._mark("first token, late" if late else "first token", request.id, event.time, late=late)
        elif request is not None and event.kind in TERMINAL:
            self._mark(event.kind.value, request.id, event.time, **event.data)
            self._labels.pop(request.id, None)

    def close(self) -> None:
        """End what is still open and finish the file. A second call does nothing."""
        if not self._file.closed:
            self._intervals.close()
            self._file.write("\n]}\n")
            self._file.close()

    # -- requests

    def _begin_request(self, request: Request) -> None:
        self._labels[request.id] = title = f"{request.label or 'request'} {request.id}"
        self._name_track(REQUESTS, _REQUEST_TRACKS + request.id, f"{title} ({len(request.prompt)} tokens)")
        if not isinf(request.deadline):
            self._mark("TTFT deadline", request.id, request.deadline, slo_ttft_s=request.slo.ttft)

    def _phase(self, interval: RequestInterval) -> None:
        request = interval.request
        arguments = {
            "request": request.id,
            "label": request.label,
            "prompt_tokens": len(request.prompt),
            "max_tokens": request.sampling.max_tokens,
            "slo_ttft_s": request.slo.ttft,
            "slo_tbt_s": request.slo.tbt,
            "until": interval.until,
        }
        track = _REQUEST_TRACKS + request.id
        self._slice(interval.phase.value, REQUESTS, track, interval.start, interval.end, arguments)

    # -- instances

    def _drive(self, interval: DriveInterval) -> None:
        head = interval.requests[0]
        name = self._labels.get(head, f"request {head}")
        if interval.kind == "decode":
            name = f"decode x{len(interval.requests)}"
        elif interval.kind == "both":
            name += " + decodes"
        arguments = {
            "drive": interval.drive,
            "kind": interval.kind,
            "requests": list(interval.requests),
            "tokens": interval.tokens,
            "part": interval.part,
            "until": interval.until,
            "boundary": interval.boundary,
            "operator": interval.operator,
        }
        if interval.parked:
            track, name = self._parking_track(interval), f"{name} {Phase.PARKED}"
        else:
            track = self._track(interval.instance)
        self._slice(name, INSTANCES, track, interval.start, interval.end, arguments)
        if interval.part > 0 or interval.until is Kind.PARKED:
            self._arrow(interval, track)

    def _arrow(self, interval: DriveInterval, track: int) -> None:
        """One step of the flow that ties the parts of a parked drive together."""
        over = interval.until not in (Kind.PARKED, Kind.RESUMED)
        step = "s" if interval.part == 0 else "f" if over else "t"
        arrow = {"ph": step, "name": "pull over", "cat": "park", "id": f"{interval.instance}/{interval.drive}"}
        if step == "f":
            arrow["bp"] = "e"  # bind to the slice around this moment, not to the next one
        self._write({**arrow, "pid": INSTANCES, "tid": track, "ts": _microseconds(interval.start)})

    def _track(self, name: str) -> int:
        """The track of that name, made on first use."""
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            self._name_track(INSTANCES, self._tracks[name], name)
        return self._tracks[name]

    def _parking_track(self, interval: DriveInterval) -> int:
        """The first parking track of the instance that is free then: slices of one track must not cross."""
        free_at = self._parking.setdefault(interval.instance, [])
        number = next((number for number, time in enumerate(free_at) if time <= interval.start), len(free_at))
        free_at[number : number + 1] = [interval.end]
        return self._track(f"{interval.instance} parked {number}")

    # -- the file

    def _slice(self, name: str, process: int, track: int, start: float, end: float, arguments: dict[str, Any]) -> None:
        begin, finish = _microseconds(start), _microseconds(end)
        self._write(
            {
                "ph": "X",
                "name": name,
                "cat": "drive" if process == INSTANCES else "request",
                "pid": process,
                "tid": track,
                "ts": begin,
                "dur": round(finish - begin, 3),
                "args": {key: value for key, value in arguments.items() if value is not None},
            }
        )

    def _mark(self, name: str, request: int, time: float, **arguments: Any) -> None:
        mark = {"ph": "i", "s": "t", "name": name, "cat": "request", "args": arguments}
        self._write({**mark, "pid": REQUESTS, "tid": _REQUEST_TRACKS + request, "ts": _microseconds(time)})

    def _name_process(self, process: int, name: str) -> None:
        self._write({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        order = {"sort_index": process}
        self._write({"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": order})

    def _name_track(self, process: int, track: int, name: str) -> None:
        self._write({"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}})
        order = {"sort_index": track}
        self._write({"ph": "M", "name": "thread_sort_index", "pid": process, "tid": track, "args": order})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write("\n" if self._first else ",\n")
        self._first = False
        self._file.write(json.dumps(record))


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
