"""The demo: its sizing and table by value, its effect on virtual time, and all of it once, tiny, on the toy model."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.lab import Lab
from engine.metrics import RequestRows
from engine.timeline import TERMINAL, Kind
from examples import demo, demo_layered
from examples.arrivals import Arrival
from examples.demo_plot import choose_window
from examples.demo_report import Outcome, progress_line, table
from examples.history import History
from examples.open_loop import replay
from examples.workload import open_workload
from scheduling.predictor import Predictor
from scheduling.request import SLO, State


def qwentrace(n: int, seed: int = 0) -> list[Arrival]:
    return open_workload("qwen").draw(n, seed=seed)


LINEAR = Predictor(per_step=0.0, per_token=0.001)


def test_sizing_fills_the_load_and_scales_slos_to_the_machine():
    scenario = demo.size(qwentrace(100), LINEAR, load=0.8, seconds=50.0, longest=100_000)
    busy = sum(LINEAR([(0, arrival.prompt_tokens)]) for arrival in scenario.arrivals)
    assert busy == pytest.approx(0.8 * scenario.seconds)
    assert scenario.seconds == pytest.approx(50.0, rel=0.01)
    assert scenario.length_scale < 1
    # 1,024 tokens of the trace have become 1,024 * scale, at 1 ms each; on the A800 they take 80 ms.
    assert scenario.slo_scale == pytest.approx(1.024 * scenario.length_scale / 0.080, rel=0.01)
    text = next(arrival for arrival in scenario.arrivals if arrival.label == "text")
    assert text.slo.ttft == pytest.approx(0.25 * scenario.slo_scale)
    assert max(arrival.output_tokens for arrival in scenario.arrivals) == 64


def test_sizing_keeps_prompts_within_bounds_and_speeds_arrivals_up_instead():
    scenario = demo.size(qwentrace(100), LINEAR, load=0.8, seconds=1e6, longest=500)
    assert max(arrival.prompt_tokens for arrival in scenario.arrivals) == 500
    busy = sum(LINEAR([(0, arrival.prompt_tokens)]) for arrival in scenario.arrivals)
    assert busy == pytest.approx(0.8 * scenario.seconds)
    assert scenario.seconds < 1e3
    assert demo.size(qwentrace(10), LINEAR, load=0.8, seconds=1e6, longest=10**9).length_scale == 1.0


@pytest.fixture(scope="module")
def outcomes():
    """A demo on virtual time: every operator of a four-layer model takes 20 microseconds a token."""
    predictor = Predictor(per_step=0.0, per_token=20 * 2e-5)
    scenario = demo.size(qwentrace(60, seed=1), predictor, load=0.8, seconds=20.0, longest=4000)
    found = []
    for system in demo.SYSTEMS:
        with Lab(system, model=FakeModel(context=8192), per_operator=0.0, per_token=2e-5) as lab:
            rows, history = RequestRows(), History()
            lab.engine.timeline.add(rows)
            lab.engine.timeline.add(history)
            lab.loop.run_until_complete(replay(lab.engine, scenario.arrivals, drain_seconds=100.0))
            found.append(Outcome(system, rows.results(), history))
    return found


def test_the_demo_shows_its_effect(outcomes):
    distserve, layer, operator = (outcome.results for outcome in outcomes)
    assert {each.total.n for each in (distserve, layer, operator)} == {60}
    assert distserve.labels["text"].ttft_attainment < 0.6 < 0.9 < operator.labels["text"].ttft_attainment
    assert distserve.blocking.n == 0
    assert layer.blocking.mean > 3 * operator.blocking.mean > 0
    assert operator.total.met_per_s > distserve.total.met_per_s


def test_every_system_saw_the_same_arrivals(outcomes):
    seen = [
        [(request.label, tuple(request.prompt), request.slo) for request in outcome.history.requests.values()]
        for outcome in outcomes
    ]
    assert seen[0] == seen[1] == seen[2]


def test_the_picture_looks_where_a_prefill_pulls_over(outcomes):
    history = outcomes[-1].history
    window = choose_window(history)
    star = history.requests[window.star]
    parked = [drive for drive in history.drives if drive.parked and window.star in drive.requests]
    assert parked
    assert window.star in window.requests
    assert len(star.prompt) > 500
    origin = min(request.arrival for request in history.requests.values())
    assert all(window.start < drive.start - origin < drive.end - origin < window.end for drive in parked)


def test_a_picture_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no request got its first token"):
        history = History()
        history.requests[0] = SimpleNamespace(arrival=0.0)  # type: ignore[assignment]
        choose_window(history)


def test_slowdown_counts_the_time_on_the_executor_and_not_that_in_the_layby(outcomes):
    predictor = Predictor(per_step=0.0, per_token=20 * 2e-5)
    for outcome in outcomes:
        assert demo.slowdown(outcome.history, predictor) == pytest.approx(1.0)
        assert demo.slowdown(outcome.history, replace(predictor, per_token=10 * 2e-5)) == pytest.approx(2.0)


def test_table(outcomes):
    text = table(outcomes)
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert text.splitlines()[0].split() == list(demo.SYSTEMS)
    total = outcomes[0].results.total
    assert f"{total.ttft_attainment:.1%}" in text
    assert lines["parks"].split()[1] == "0"
    assert f"{outcomes[-1].results.blocking.mean * 1e3:.1f} ms" in text
    assert "n=60" in text
    texts = outcomes[0].results.labels["text"].n
    assert f"text           n={texts}" in text
    assert len({len(line) for line in text.splitlines()}) == 1


def test_progress_counts_first_tokens_in_time():
    rows = SimpleNamespace(rows=[SimpleNamespace(meets_ttft=met) for met in (True, False, None, True)])
    line = progress_line("flowprefill", rows, 8, 12.4)  # type: ignore[arg-type]
    assert "[############            ]" in line
    assert "4/8 done,    2 first tokens in time,   12 s" in line


def test_replay_is_open_loop_and_gives_up_after_the_drain():
    slow = [Arrival(index, 0.1 * index, "text", 100, 2, SLO(ttft=1.0)) for index in range(4)]
    too_long = Arrival(4, 0.0, "file", 5000, 1, SLO(ttft=1.0))
    with Lab("distserve", model=FakeModel(), config=EngineConfig(num_blocks=1024), per_token=0.001) as lab:
        events = lab.events
        lab.loop.run_until_complete(replay(lab.engine, [*slow, too_long], drain_seconds=3.0))
        arrived = [event.time for event in events if event.kind is Kind.ARRIVED]
        assert arrived == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])  # due times, though a prefill takes 2 s
        ends = {event.request.label: event.request.state for event in events if event.request is not None}
        assert ends["file"] is State.REFUSED
        finishes = [event.kind for event in events if event.kind in TERMINAL]
        assert sorted(finishes) == ["aborted", "aborted", "aborted", "finished", "refused"]


def test_the_whole_demo_on_the_toy_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "load_or_measure", lambda *_: SimpleNamespace(predictor=lambda: Predictor(1e-3, 2e-5)))
    monkeypatch.setattr(demo, "KV_BYTES", 32 << 20)
    monkeypatch.setattr(demo_layered, "PROMPT", 300)
    monkeypatch.setattr(demo_layered, "TOKENS", 40)
    demo.main(["--model", "toy", "--requests", "10", "--seconds", "0.3", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "TTFT attainment  n=10" in printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "demo.json").read_text())
    for system in demo.SYSTEMS:
        assert figures[system]["total"]["n"] == 10
        assert json.loads((tmp_path / f"demo-{system}.trace.json").read_text())["traceEvents"]
    assert sorted(line.strip() for line in printed.splitlines() if line.startswith("  /")) == sorted(
        str(path) for path in tmp_path.iterdir()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./no-such-folder"], "no-such-folder"),
        (["--model", "toy", "--workload", "no-such-rows.csv"], "no-such-rows.csv"),
    ],
)
def test_what_is_not_there_is_named(options, message, capsys):
    with pytest.raises(SystemExit):
        demo.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--requests", "1"), ("--seconds", "0"), ("--load", "-1")])
def test_bad_options_are_named(option, value, capsys):
    with pytest.raises(SystemExit):
        demo.main([option, value])
    assert f"{option} must be" in capsys.readouterr().err
