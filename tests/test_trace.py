"""The Chrome trace: valid by structure, and it shows the long prefill pull over."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from timeline_helpers import Recorder, make, pull_over

from engine.timeline import Kind
from engine.trace import INSTANCES, REQUESTS, ChromeTrace


def record(path: Path, story=pull_over) -> list[dict]:
    trace = ChromeTrace(path)
    story(Recorder(trace))
    trace.close()
    return json.loads(path.read_text())["traceEvents"]


def tracks(events: list[dict], process: int) -> dict[str, list[dict]]:
    """Slices and marks by the name of their track, in time order."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == process}
    found = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] in "Xi" and e["pid"] == process), key=lambda e: e["ts"]):
        found[names[event["tid"]]].append(event)
    return found


def spans(events: list[dict]) -> list[tuple[str, float, float]]:
    """(name, start, end) in seconds."""
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]


def check_structure(events: list[dict]) -> None:
    """What Chrome's trace event format asks of the phases we use."""
    slices = defaultdict(list)
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            case "X":
                assert event["dur"] > 0
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] == "t"
                assert event["ts"] >= 0
            case "s" | "t" | "f":
                assert event["id"]
            case other:
                pytest.fail(f"unknown phase {other!r}")
    for track in slices.values():  # slices of one track neither nest nor cross
        track.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(track))
    for arrow in (event for event in events if event["ph"] in "stf"):  # an arrow is bound to a slice around it
        assert any(start <= arrow["ts"] < end for start, end in slices[arrow["pid"], arrow["tid"]])


def test_the_prefill_pulls_over_on_the_instance_track(tmp_path):
    events = record(tmp_path / "trace.json")
    check_structure(events)
    instances = tracks(events, INSTANCES)
    assert spans(instances["prefill0"]) == [("search 0", 1.0, 2.25), ("text 1", 2.25, 2.75), ("search 0", 2.75, 6.5)]
    assert spans(instances["prefill0 parked 0"]) == [("search 0 parked", 2.25, 2.75)]
    assert spans(instances["decode0"]) == [("decode x1", 3.0, 3.25)]
    before, _, after = instances["prefill0"]
    assert before["args"] == {
        "drive": 0, "kind": "prefill", "requests": [0], "tokens": 4000, "part": 0,
        "until": "parked", "boundary": 42, "operator": "attention",
    }  # fmt: skip
    assert after["args"]["until"] == "completed"


def test_an_arrow_follows_the_parked_drive(tmp_path):
    arrows = [event for event in record(tmp_path / "trace.json") if event["ph"] in "stf"]
    assert [(arrow["ph"], arrow["ts"] / 1e6) for arrow in arrows] == [("s", 1.0), ("t", 2.25), ("f", 2.75)]
    assert len({arrow["id"] for arrow in arrows}) == 1


def test_each_request_has_a_track_of_its_life(tmp_path):
    requests = tracks(record(tmp_path / "trace.json"), REQUESTS)
    assert spans(requests["search 0 (4000 tokens)"]) == [
        ("running", 1.0, 2.25), ("parked", 2.25, 2.75), ("running", 2.75, 6.5),
        ("hand-over", 6.5, 7.0), ("decoding", 7.0, 7.25),
    ]  # fmt: skip
    assert spans(requests["text 1 (100 tokens)"]) == [
        ("waiting", 2.0, 2.25), ("running", 2.25, 2.75), ("hand-over", 2.75, 3.0), ("decoding", 3.0, 3.25),
    ]  # fmt: skip
    marks = [(event["name"], event["ts"] / 1e6) for event in requests["text 1 (100 tokens)"] if event["ph"] == "i"]
    assert marks == [("first token", 2.75), ("TTFT deadline", 3.0), ("finished", 3.25)]
    late = [event["name"] for event in requests["search 0 (4000 tokens)"] if event["ph"] == "i"]
    assert late == ["TTFT deadline", "first token, late", "finished"]
    running = next(event for event in requests["text 1 (100 tokens)"] if event["name"] == "running")["args"]
    assert (running["slo_ttft_s"], running["prompt_tokens"], running["until"]) == (1.0, 100, "completed")


def test_parked_prefills_that_overlap_get_tracks_of_their_own(tmp_path):
    def story(recorder: Recorder) -> None:
        at = recorder.at
        for number in (0, 1, 2):
            at(float(number), Kind.ARRIVED, make(number, "search", 10, float(number)))
            at(float(number), Kind.STARTED, drive=number, phase="prefill", requests=[number], tokens=10)
            at(number + 0.5, Kind.PARKED, drive=number, boundary=number, operator="o_proj")
        at(3.0, Kind.RESUMED, drive=0)  # 0.5-3.0 and 1.5-5.0 cross
        at(4.0, Kind.COMPLETED, drive=0)
        at(5.0, Kind.CLOSED, drive=1)
        at(5.0, Kind.STARTED, drive=3, phase="prefill", requests=[3], tokens=10)
        at(5.5, Kind.PARKED, drive=3, boundary=7, operator="attention")
        at(6.0, Kind.RESUMED, drive=3)

    events = record(tmp_path / "trace.json", story)
    check_structure(events)
    parked = [name for name in tracks(events, INSTANCES) if "parked" in name]
    assert sorted(parked) == ["prefill0 parked 0", "prefill0 parked 1", "prefill0 parked 2"]


def test_what_is_still_open_ends_with_the_trace(tmp_path):
    def story(recorder: Recorder) -> None:
        request = make(0, 'a "label"\n', 10, 1.0)
        recorder.at(1.0, Kind.ARRIVED, request)
        recorder.at(2.0, Kind.STARTED, drive=0, phase="prefill", requests=[0], tokens=10)
        recorder.at(3.0, Kind.ARRIVED, make(1, "", 5, 3.0))

    events = record(tmp_path / "trace.json", story)
    check_structure(events)
    assert spans(tracks(events, INSTANCES)["prefill0"]) == [('a "label"\n 0', 2.0, 3.0)]


def test_chunks_of_one_request_wait_in_between(tmp_path):
    def story(recorder: Recorder) -> None:
        request = make(0, "search", 10, 0.0)
        recorder.at(0.0, Kind.ARRIVED, request)
        for number, (start, end) in enumerate([(0.0, 1.0), (2.0, 3.0)]):
            recorder.at(start, Kind.STARTED, drive=number, phase="prefill", requests=[0], tokens=5)
            recorder.at(end, Kind.COMPLETED, drive=number)
        recorder.at(3.0, Kind.FIRST_TOKEN, request)
        recorder.at(4.0, Kind.ABORTED, request)

    track = tracks(record(tmp_path / "trace.json", story), REQUESTS)["search 0 (10 tokens)"]
    assert spans(track) == [
        ("running", 0.0, 1.0), ("waiting", 1.0, 2.0), ("running", 2.0, 3.0), ("hand-over", 3.0, 4.0),
    ]  # fmt: skip


def test_a_recomputed_request_waits_again_and_a_pass_of_both_kinds_says_so(tmp_path):
    def story(recorder: Recorder) -> None:
        request = make(0, "chat", 10, 0.0)
        at = recorder.at
        at(0.0, Kind.ARRIVED, request)
        at(0.0, Kind.STARTED, drive=0, phase="prefill", requests=[0], tokens=10)
        at(1.0, Kind.COMPLETED, drive=0)
        at(1.0, Kind.FIRST_TOKEN, request)
        at(1.0, Kind.DECODING, request)
        at(2.0, Kind.RECOMPUTED, request)
        at(3.0, Kind.STARTED, drive=1, phase="both", requests=[0, 7], tokens=11)
        at(4.0, Kind.COMPLETED, drive=1)
        at(4.0, Kind.DECODING, request)
        at(5.0, Kind.FINISHED, request, reason="stop")

    events = record(tmp_path / "trace.json", story)
    check_structure(events)
    assert spans(tracks(events, REQUESTS)["chat 0 (10 tokens)"]) == [
        ("running", 0.0, 1.0), ("decoding", 1.0, 2.0), ("waiting", 2.0, 3.0), ("running", 3.0, 4.0),
        ("decoding", 4.0, 5.0),
    ]  # fmt: skip
    assert spans(tracks(events, INSTANCES)["prefill0"]) == [("chat 0", 0.0, 1.0), ("chat 0 + decodes", 3.0, 4.0)]


def test_late_events_about_requests_and_drives_that_are_gone_are_ignored(tmp_path):
    def story(recorder: Recorder) -> None:
        request = make(0, "chat", 10, 0.0)
        recorder.at(0.0, Kind.ARRIVED, request)
        recorder.at(0.5, Kind.STARTED, drive=0, phase="prefill", requests=[0], tokens=10)
        recorder.at(1.0, Kind.ABORTED, request)
        recorder.at(1.5, Kind.PARKED, drive=0, boundary=3, operator="attention")
        recorder.at(1.5, Kind.CLOSED, drive=0)
        recorder.at(2.0, Kind.DECODING, request)
        recorder.at(2.0, Kind.COMPLETED, drive=0)

    events = record(tmp_path / "trace.json", story)
    check_structure(events)
    assert spans(tracks(events, REQUESTS)["chat 0 (10 tokens)"]) == [("waiting", 0.0, 0.5), ("running", 0.5, 1.0)]


def test_a_path_that_cannot_be_written_fails_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ChromeTrace(tmp_path / "nowhere" / "trace.json")


def test_closing_twice_is_harmless(tmp_path):
    trace = ChromeTrace(tmp_path / "trace.json")
    trace.close()
    trace.close()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
