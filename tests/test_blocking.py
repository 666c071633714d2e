"""Blocking: the predicted mean by hand, and the whole measurement once, tiny, on the toy model."""

import json

import pytest

from examples import blocking
from scheduling.preempt import Preempt

# Two layers of (attention, o_proj, down_proj), seconds, and the head.
TIMES = [
    ("attention", 2.0), ("o_proj", 1.0), ("down_proj", 1.0),
    ("attention", 2.0), ("o_proj", 1.0), ("down_proj", 1.0), ("head", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (Preempt.OPERATOR, (2 * (4 + 1 + 1) + 1) / (2 * 9)),
        (Preempt.HALF_LAYER, (2 * (9 + 1) + 1) / (2 * 9)),
        (Preempt.LAYER, (2 * 16 + 1) / (2 * 9)),
        (Preempt.NEVER, 81 / (2 * 9)),  # half of the whole
    ],
)
def test_predicted_mean_is_that_of_a_random_moment(level, expected):
    assert blocking.predicted_mean(TIMES, level) == pytest.approx(expected)


def test_the_whole_measurement_on_the_toy_model(tmp_path, capsys):
    path = tmp_path / "figures" / "blocking.json"
    options = ["--model", "toy", "--tokens", "256", "--parks", "5", "--pairs", "3", "--json", str(path)]
    blocking.main([*options, "--lag-seconds", "0.2"])
    figures = json.loads(path.read_text())
    for level in ("operator", "layer"):
        assert set(figures[level]) == {"mean_ms", "max_ms", "n", "predicted_mean_ms"}
        assert figures[level]["n"] >= 5
        assert 0 < figures[level]["mean_ms"] <= figures[level]["max_ms"]
    assert figures["layer"]["predicted_mean_ms"] > figures["operator"]["predicted_mean_ms"]
    assert figures["ratio"] == figures["layer"]["mean_ms"] / figures["operator"]["mean_ms"]
    assert figures["gates"] == 20
    assert figures["gate_overhead"] == pytest.approx(figures["gate_ns"] * 20e-6 / figures["gate_forward_ms"])
    paired = figures["gate_overhead_paired"]
    assert paired["low"] <= paired["median"] <= paired["high"]
    assert figures["loop_lag_p50_ms"] <= figures["loop_lag_p99_ms"] <= figures["loop_lag_max_ms"]
    assert "layer/operator" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--tokens", "--parks", "--pairs"])
def test_bad_options_are_named(option, capsys):
    with pytest.raises(SystemExit):
        blocking.main([option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        blocking.main(["--model", "./no-such-folder"])
    assert "no-such-folder" in capsys.readouterr().err
