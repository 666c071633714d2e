"""Comparing a simulation with live runs: the statistics, on rows made by hand; and one whole study of the toy model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pytest import approx

from engine.metrics import Row
from engine.timeline import Kind
from examples import fidelity
from examples.fidelity_report import Comparison, Distance, Served, rank_correlation, table
from scheduling.request import SLO


def run(*ttfts: float, gaps: Sequence[float] = (0.1,)) -> Served:
    return Served(rows(*ttfts), gaps)


def rows(*ttfts: float) -> list[Row]:
    return [
        Row(i, "text", SLO(ttft=1.0), float(i), 10, 1, i + ttft, i + ttft, Kind.FINISHED, None, None, None)
        for i, ttft in enumerate(ttfts)
    ]


def test_distances_are_from_the_mean_of_the_live_runs_and_between_them() -> None:
    live, again = run(*[0.9] * 9, 4.0, gaps=[0.1] * 50 + [0.4] * 2), run(*[1.1] * 9, 4.0, gaps=[0.1] * 52)
    simulated = run(*[1.2] * 9, 5.0, gaps=[0.114] * 52)
    found = Comparison.of("flowprefill", 0.6, 2.5, live, again, simulated)
    assert (found.ttft_p50.simulated, found.ttft_p50.live) == approx((0.2, 0.2))
    assert (found.attainment.simulated, found.attainment.live) == approx((-0.45, 0.9))
    assert found.ttft_p50.holds  # 20 % is within 1.5 times the live runs' 20 %
    assert found.ttft_p90.holds and found.attainment.holds
    assert (found.tbt_p50.simulated, found.tbt_p50.live) == approx((0.14, 0.0)) and found.tbt_p50.holds  # of 15 %
    assert (found.tbt_p99.simulated, found.tbt_p99.live) == approx((-0.544, 1.2)) and found.tbt_p99.holds
    assert found.requests == 10 and (found.live_ttft_p50, found.live_attainment) == approx((1.0, 0.45))


@pytest.mark.parametrize(
    ("simulated", "live", "holds"),
    [(0.09, 0.0, True), (-0.11, 0.0, False), (-0.11, 0.08, True), (0.13, 0.08, False)],
)
def test_the_aim_is_10_percent_or_what_live_runs_allow(simulated: float, live: float, holds: bool) -> None:
    assert Distance(simulated, live).holds is holds
    assert ("!" in str(Distance(simulated, live))) is not holds


@pytest.mark.parametrize(
    ("one", "other", "rank"),
    [
        ((1, 2, 3, 4), (10, 20, 30, 40), 1.0),
        ((1, 2, 3, 4), (4, 3, 2, 1), -1.0),
        ((1, 2, 3, 4), (1, 3, 2, 4), 0.8),
        ((1, 1, 2, 3), (1, 2, 3, 4), 0.9486832980505138),  # equal ones share their rank
    ],
)
def test_rank_correlation_is_spearmans(one: Sequence[float], other: Sequence[float], rank: float) -> None:
    assert rank_correlation(rows(*one), rows(*other)) == approx(rank)


def test_the_table_has_a_line_for_each_comparison_and_marks_what_misses_the_aim() -> None:
    bad = Comparison.of("distserve", 0.3, 1.0, run(1, 2, 3), run(1, 2, 3), run(2, 4, 6))
    heading, line = table([bad]).splitlines()
    assert line.startswith("distserve") and "+100.0%" in line and "!" in line
    assert "TTFT met" in heading and "TBT p99" in heading and table([bad], heading=False) == line


def test_a_study_of_the_toy_model_compares_every_system_at_every_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAYBY_CACHE", str(tmp_path))
    monkeypatch.setattr("engine.measure.PASSES", tuple(((0, n),) for n in (8, 16, 32, 64, 128)))
    monkeypatch.setattr("engine.measure.STEPS", ((1, 8), (2, 8), (2, 64)))
    monkeypatch.setattr("engine.measure.BESIDE", ((8, 64), (1, 2)))
    monkeypatch.setattr("engine.measure_serving._PACE_PROMPTS", (16, 64))
    monkeypatch.setattr("engine.measure_serving._PACE_CONTEXT", 32)
    monkeypatch.setattr(fidelity, "KNEE_REQUESTS", 30)
    monkeypatch.setattr(fidelity, "TARGET", 0.5)  # there is one, however busy the machine was when it was measured
    out = tmp_path / "fidelity.json"
    arguments = ["--model", "toy", "--systems", "distserve,flowprefill,layered", "--loads", "0.5", "--seconds", "0.5"]
    monkeypatch.setattr("sys.argv", ["fidelity", *arguments, "--length-scale", "0.02", "--json", str(out)])
    assert fidelity.main() == 0
    found = json.loads(out.read_text())
    assert [c["system"] for c in found["comparisons"]] == ["distserve", "flowprefill", "layered"]
    assert all(c["requests"] >= 10 and 0 <= c["live_attainment"] <= 1 for c in found["comparisons"])
    assert [profile["operators"][1] for profile in found["profiles"]] == ["attention"] * 2
    assert [bool(profile["decode_slowdowns"]) for profile in found["profiles"]] == [True, False]
    assert capsys.readouterr().out.count("\n") == 4


@pytest.mark.parametrize("arguments", [["--systems", "nosuch"], ["--loads", "0"], ["--length-scale", "2"]])
def test_bad_options_are_one_line_and_exit_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fidelity", *arguments])
    with pytest.raises(SystemExit) as stop:
        fidelity.main()
    assert stop.value.code == 2 and capsys.readouterr().err.strip().count("\n") == 0
