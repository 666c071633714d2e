"""The benchmark of decisions measures what it says. How long anything takes is no matter here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import bench_scheduler
from examples.bench_scheduler import arrivals, measure, table


def test_as_many_arrive_as_leave_and_every_kind_of_decision_is_measured() -> None:
    row = measure(20, looks=5)
    assert row.waiting == 20
    for cost in (row.head, row.head_resorted, row.decision, row.nobody_fits, row.busy):
        assert 0 < cost.median <= cost.p99
    assert table([row]).splitlines()[1].split()[:2] == ["20", f"{row.head.median:,.0f}"]


def test_a_part_of_the_queue_is_late_and_a_part_is_not() -> None:
    """Else every head would be a newcomer, or no rank would ever change."""
    waiting = 1000
    coming = arrivals(waiting)
    queue = [next(coming) for _ in range(waiting)]
    late = sum(request.deadline < queue[-1].arrival for request in queue)
    assert waiting / 10 < late < waiting * 9 / 10


def test_the_figures_are_written_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "scheduler.json"
    monkeypatch.setattr("sys.argv", ["bench_scheduler", "--waiting", "10,20", "--looks", "5", "--json", str(file)])
    assert bench_scheduler.main() == 0
    rows = json.loads(file.read_text())
    assert [row["waiting"] for row in rows] == [10, 20]
    assert set(rows[0]) == {"waiting", "head", "head_resorted", "decision", "nobody_fits", "busy"}
    assert set(rows[0]["decision"]) == {"median", "p99"}
    assert "decision" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "error"), [(["--waiting", "0"], "must be at least 1, got 0"), (["--json", "/"], "is a directory")]
)
def test_bad_options_are_one_line(
    args: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_scheduler", *args])
    with pytest.raises(SystemExit) as exit:
        bench_scheduler.main()
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert error in message and message.count("\n") == 1
