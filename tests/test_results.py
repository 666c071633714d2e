"""The record of a run: what counts as a miss, the figures by value, and how busy an executor was."""

import pytest

from engine.metrics import Row, Spread
from engine.timeline import Event, Kind
from examples.results import Busy, fold, jain, worst_class
from scheduling.request import SLO


def row(id, label="text", ttft=0.1, finish=Kind.FINISHED, tbt=0.05, slo=None):
    slo = SLO(ttft=0.2, tbt=0.1) if slo is None else slo
    first = None if ttft is None else 10.0 + ttft
    return Row(id, label, slo, 10.0, 100, 5, first, 20.0, finish, tbt, tbt, tbt)


def test_errors_refusals_and_unfinished_requests_are_misses():
    rows = [
        row(0),
        row(1, ttft=0.3),  # late
        row(2, tbt=0.2),  # in time, then slow
        row(3, ttft=None, finish=Kind.REFUSED, tbt=None),
        row(4, finish=Kind.FAILED),
        row(5, finish=None),  # in time, but never finished
        row(6, slo=SLO(), ttft=9.0),  # best effort: in no denominator
    ]
    record = fold(rows, seconds=2.0)
    assert record["requests"] == 7
    assert record["ttft_attainment"] == pytest.approx(2 / 6)
    assert record["tbt_attainment"] == pytest.approx(2 / 6)
    assert record["attainment"] == pytest.approx(1 / 6)
    assert record["met_per_s"] == 0.5
    assert record["unfinished"] == 3


def test_figures_by_value():
    rows = [row(0, ttft=0.1, tbt=0.01), row(1, ttft=0.2, tbt=0.02), row(2, "file", ttft=0.6, tbt=None)]
    record = fold(rows, seconds=4.0, blocking=Spread(2, 0.010, 0.008), utilisation=0.5)
    assert record["ttft_p50_s"] == pytest.approx(0.2)
    assert record["ttft_p99_s"] == pytest.approx(0.6)
    assert record["ttft_std_s"] == pytest.approx(0.216, abs=1e-3)
    assert record["tbt_p99_s"] == 0.02
    assert (record["blocking_mean_ms"], record["blocking_max_ms"]) == pytest.approx((5.0, 8.0))
    assert record["utilisation"] == 0.5
    assert record["fairness"] == pytest.approx((0.5 + 1 + 3) ** 2 / (3 * (0.25 + 1 + 9)))
    assert record["attainment_by_class"] == {"file": 0.0, "text": 1.0}
    assert worst_class(record, "ttft") == ("file", 0.0)


def test_what_does_not_exist_is_null():
    record = fold([row(0, slo=SLO(), ttft=None, finish=Kind.ABORTED, tbt=None)], seconds=1.0)
    missing = ("ttft_attainment", "tbt_attainment", "attainment", "ttft_p50_s", "ttft_std_s", "tbt_p99_s", "fairness")
    assert all(record[key] is None for key in (*missing, "blocking_mean_ms", "blocking_max_ms", "utilisation"))
    assert worst_class(record, "both") is None


def test_jain():
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([0.0, 0.0, 7.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) is None
    assert jain([0.0, 0.0]) is None
    assert jain([1e300, 3e300]) == pytest.approx(0.8), "squares beyond all numbers"
    assert jain([1e-300, 3e-300]) == pytest.approx(0.8), "squares below all numbers"


def test_busy_counts_stretches_on_prefilling_instances_until_their_last_event():
    busy = Busy()

    def event(time, kind, instance=None, drive=None):
        busy(Event(time, kind, None, instance, drive, {}))

    assert busy.share is None
    event(0.0, Kind.ARRIVED)
    event(1.0, Kind.STARTED, "prefill-0", 0)
    event(2.0, Kind.PARKED, "prefill-0", 0)
    event(2.0, Kind.STARTED, "decode-0", 0)
    event(2.0, Kind.STARTED, "prefill-0", 1)
    event(3.0, Kind.COMPLETED, "prefill-0", 1)
    event(5.0, Kind.RESUMED, "prefill-0", 0)
    event(6.0, Kind.COMPLETED, "prefill-0", 0)
    event(60.0, Kind.COMPLETED, "decode-0", 0)
    assert busy.share == pytest.approx(3.0 / 6.0)
