"""Rows and results: what counts as met, as a miss, and as nobody's business."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_helpers import Recorder, make, pull_over

from engine.gaps import Gaps
from engine.metrics import RequestRows, Row, Spread, percentile, summarise
from engine.timeline import Kind
from scheduling.request import SLO


def served(recorder: Recorder, request, first: float, *tokens: float) -> None:
    recorder.at(request.arrival, Kind.ARRIVED, request)
    recorder.at(first, Kind.FIRST_TOKEN, request)
    for time in tokens:
        recorder.at(time, Kind.TOKEN, request, index=0)
    recorder.at(tokens[-1] if tokens else first, Kind.FINISHED, request, reason="stop")


def test_percentile_is_a_value_that_occurred():
    hundred = [float(value) for value in range(1, 101)]
    assert percentile(hundred, 99) == 99
    assert percentile([*hundred, 101.0], 99) == 100
    assert percentile(hundred[::-1], 50) == 50
    assert percentile([3.0], 1) == percentile([3.0], 100) == 3.0


@pytest.mark.parametrize(("values", "percent", "message"), [([], 50, "no values"), ([1.0], 0, "got 0")])
def test_percentile_refuses(values, percent, message):
    with pytest.raises(ValueError, match=message):
        percentile(values, percent)


def test_one_row_per_request_with_its_times():
    rows = RequestRows()
    pull_over(Recorder(rows))
    text, search = rows.rows
    assert (text.id, text.label, text.prompt_tokens, text.output_tokens) == (1, "text", 100, 2)
    assert text.finish is Kind.FINISHED
    assert (text.ttft, text.ended, text.tbt_mean, text.tbt_p99, text.tbt_max) == (0.75, 3.25, 0.5, 0.5, 0.5)
    assert (search.ttft, search.tbt_max) == (5.5, 0.75)
    assert (text.meets_ttft, text.meets_tbt, text.meets) == (True, True, True)
    assert (search.meets_ttft, search.meets_tbt, search.meets) == (False, False, False)


def test_results_in_total_and_by_label():
    rows = RequestRows()
    pull_over(Recorder(rows))
    results = rows.results()
    assert results.seconds == 6.25
    assert list(results.labels) == ["search", "text"]
    assert results.total.n == 2
    assert (results.total.ttft_attainment, results.total.tbt_attainment, results.total.attainment) == (0.5, 0.5, 0.5)
    assert results.total.met_per_s == 1 / 6.25
    assert (results.total.ttft_mean, results.total.ttft_p50, results.total.ttft_p99) == (3.125, 0.75, 5.5)
    assert results.labels["text"].attainment == 1.0
    assert results.labels["search"].attainment == 0.0


def test_blocking_is_from_park_request_to_parked_or_to_completion():
    rows = RequestRows()
    recorder = Recorder(rows)
    pull_over(recorder)  # 2.0 -> 2.25
    recorder.at(8.0, Kind.ARRIVED, make(2, "text", 1, 8.0))
    recorder.at(8.0, Kind.STARTED, drive=2, phase="prefill", requests=[2], tokens=1)
    recorder.at(8.0, Kind.PARK_REQUESTED, drive=2)
    recorder.at(8.75, Kind.COMPLETED, drive=2)  # it was done before it could park
    recorder.at(9.0, Kind.PARKED, drive=2, boundary=1, operator="qkv_proj")  # nobody had asked: not blocking
    blocking = rows.results().blocking
    assert (blocking.n, blocking.mean, blocking.max) == (2, 0.5, 0.75)


def test_stopping_what_everybody_has_left_blocks_nobody():
    rows = RequestRows()
    recorder = Recorder(rows)
    request = make(0, "search", 4000, 0.0, ttft=5.0)
    recorder.at(0.0, Kind.ARRIVED, request)
    recorder.at(0.0, Kind.STARTED, drive=0, phase="prefill", requests=[0], tokens=4000)
    recorder.at(1.0, Kind.ABORTED, request)
    recorder.at(1.0, Kind.PARK_REQUESTED, drive=0)
    recorder.at(1.5, Kind.PARKED, drive=0, boundary=3, operator="attention")
    assert rows.results().blocking.n == 0


def test_a_spread_of_nothing_has_no_mean():
    assert Spread().mean is None


def test_p99_gap_allows_one_late_token_in_a_hundred():
    request = make(0, "chat", 10, 0.0, ttft=1.0, tbt=0.25)
    for late, met in ((1, True), (2, False)):
        rows = RequestRows()
        times = [1.0]
        for index in range(100):
            times.append(times[-1] + (0.5 if index < late else 0.125))
        served(Recorder(rows), request, times[0], *times[1:])
        assert rows.rows[0].tbt_max == 0.5
        assert rows.rows[0].meets_tbt is met


def test_tokens_in_one_go_fold_like_tokens_one_by_one():
    request = make(0, "chat", 10, 0.0, ttft=1.0, tbt=0.25)
    one_by_one, in_one_go = RequestRows(), RequestRows()
    served(Recorder(one_by_one), request, 1.0, 1.5, *(1.75 + 0.125 * step for step in range(150)))
    recorder = Recorder(in_one_go)
    recorder.at(0.0, Kind.ARRIVED, request)
    recorder.at(1.0, Kind.FIRST_TOKEN, request)
    last = 1.75 + 0.125 * 149
    stretches = np.array([[1.5, 1.5, 1], [1.75, last, 150]])
    recorder.at(last, Kind.TOKENS, request, index=0, count=151, stretches=stretches)
    recorder.at(last, Kind.FINISHED, request, reason="stop")
    (one,), (other,) = one_by_one.rows, in_one_go.rows
    assert other == replace(one, tbt_mean=other.tbt_mean) and other.tbt_mean == pytest.approx(one.tbt_mean)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1), st.integers(1, 100))
def test_gaps_fold_like_the_values_one_by_one(pairs, percent):
    gaps = Gaps()
    gaps.values.extend(value for value, _ in pairs)
    gaps.counts.extend(count for _, count in pairs)
    expanded = [float(value) for value, count in pairs for _ in range(count)]
    mean = pytest.approx(sum(expanded) / len(expanded))
    assert gaps.fold(percent) == (mean, percentile(expanded, percent), max(expanded))
    assert Gaps().fold(percent) is None


def test_gaps_are_taken_per_choice():
    rows = RequestRows()
    recorder = Recorder(rows)
    request = make(0, "chat", 10, 0.0, n=2, tbt=0.5)
    recorder.at(0.0, Kind.ARRIVED, request)
    recorder.at(1.0, Kind.FIRST_TOKEN, request)
    for time in (1.25, 1.5, 1.75):
        for index in (0, 1):
            recorder.at(time, Kind.TOKEN, request, index=index)
    recorder.at(2.0, Kind.FINISHED, request, reason="length")
    (row,) = rows.rows
    assert (row.output_tokens, row.tbt_mean, row.tbt_max) == (8, 0.25, 0.25)


@pytest.mark.parametrize("finish", [Kind.ABORTED, Kind.FAILED, Kind.REFUSED])
def test_whatever_ends_badly_is_a_miss_even_with_its_tokens_in_time(finish):
    rows = RequestRows()
    recorder = Recorder(rows)
    request = make(0, "chat", 10, 0.0, ttft=1.0, tbt=1.0)
    recorder.at(0.0, Kind.ARRIVED, request)
    recorder.at(0.5, Kind.FIRST_TOKEN, request)
    recorder.at(0.6, finish, request, error="gone")
    total = rows.results().total
    assert (total.n, total.ttft_attainment, total.tbt_attainment, total.attainment) == (1, 0.0, 0.0, 0.0)


def test_refused_on_arrival_and_unfinished_are_misses():
    rows = RequestRows()
    recorder = Recorder(rows)
    recorder.at(0.0, Kind.REFUSED, make(0, "chat", 10, 0.0, ttft=1.0), error="longer than the context")
    waiting = make(1, "chat", 10, 0.0, ttft=1.0)
    recorder.at(0.0, Kind.ARRIVED, waiting)
    recorder.at(0.5, Kind.FIRST_TOKEN, waiting)
    served(recorder, make(2, "chat", 10, 0.5, ttft=1.0), 1.0)
    assert [row.id for row in rows.unfinished] == [1]
    total = rows.results().total
    assert (total.n, total.ttft_attainment) == (3, 1 / 3)
    assert total.met_per_s == 1.0  # one request met in one second


def test_best_effort_is_in_no_denominator():
    rows = RequestRows()
    recorder = Recorder(rows)
    served(recorder, make(0, "batch", 10, 0.0), 60.0)
    served(recorder, make(1, "chat", 10, 0.0, ttft=100.0), 60.0)
    results = rows.results()
    assert rows.rows[0].meets is None
    assert results.total.attainment == 1.0
    assert results.labels["batch"].attainment is None
    assert results.labels["batch"].ttft_mean == 60.0
    assert results.labels["chat"].tbt_attainment is None


def test_one_token_has_no_gap_and_so_none_too_long():
    rows = RequestRows()
    served(Recorder(rows), make(0, "chat", 10, 0.0, tbt=0.1), 5.0)
    assert rows.rows[0].tbt_p99 is None
    assert rows.rows[0].meets is True


def test_results_of_nothing():
    results = RequestRows().results()
    assert (results.total.n, results.total.attainment, results.total.met_per_s) == (0, None, 0.0)


def test_memory_stays_flat_where_rows_are_handed_on():
    seen: list[Row] = []
    rows = RequestRows(emit=seen.append)
    recorder = Recorder(rows)
    for number in range(50):
        served(recorder, make(number, "chat", 10, float(number)), number + 0.5, number + 0.75)
    assert len(seen) == 50
    assert rows.rows == rows.unfinished == []


def test_summarise_takes_any_rows():
    row = Row(0, "chat", SLO(ttft=1.0), 0.0, 10, 1, 0.5, 0.5, Kind.FINISHED, None, None, None)
    assert summarise([row, row], seconds=4.0).total.met_per_s == 0.5
