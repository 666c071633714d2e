"""The TTFT predictor: the fit recovers what generated the samples, and a profile survives its cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.fake import FakeModel
from engine.profile import SHAPES, Profile, Sample, fit, load_or_measure, measure
from models.decoder import Model
from models.load import load_model
from scheduling.predictor import Predictor, attention_pairs


def test_the_fit_recovers_the_coefficients_it_was_made_from() -> None:
    truth = Predictor(per_step=0.02, per_token=3e-4, per_pair=2e-8)
    found = fit([Sample(shape, truth(shape)) for shape in SHAPES])
    assert found.per_step == pytest.approx(truth.per_step)
    assert found.per_token == pytest.approx(truth.per_token)
    assert found.per_pair == pytest.approx(truth.per_pair)
    assert found.error_max < 1e-6
    assert found.floor <= truth([(0, 16)]) * 1.000001


def test_what_short_passes_take_at_least_does_not_bend_the_rest() -> None:
    truth = Predictor(per_step=0.004, per_token=3e-4, per_pair=2e-8, floor=0.05)
    found = fit([Sample(shape, truth(shape)) for shape in SHAPES])
    assert found.floor == pytest.approx(0.05) and found.error_max < 1e-6
    for shape in (((0, 100),), ((0, 300),) * 8, ((2000, 700),)):
        assert found(shape) == pytest.approx(truth(shape))
    assert found([]) == 0.0


def test_on_another_device_everything_takes_so_much_longer() -> None:
    predict = Predictor(per_step=0.02, per_token=3e-4, per_pair=2e-8, floor=0.05, error_mean=0.1)
    for shape in SHAPES:
        assert predict.scaled(1.5)(shape) == pytest.approx(1.5 * predict(shape))
    assert predict.scaled(1.5).error_mean == 0.1


def test_no_coefficient_is_negative_and_the_error_is_reported() -> None:
    falling = [Sample(((0, 100),), 1.0), Sample(((0, 200),), 1.5), Sample(((0, 400),), 1.7), Sample(((0, 800),), 2.0)]
    found = fit(falling)
    assert min(found.per_step, found.per_token, found.per_pair) >= 0
    assert 0 < found.error_mean <= found.error_max < 1


def test_merged_prompts_cost_less_than_one_prompt_of_their_sum() -> None:
    predict = Predictor(per_step=0.01, per_token=1e-4, per_pair=1e-7)
    assert predict([(0, 512)] * 4) < predict([(0, 2048)])
    assert predict([]) == 0.0
    assert attention_pairs(10, 3) == 11 + 12 + 13


def test_a_profile_is_measured_once_and_kept_with_its_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYBY_CACHE", str(tmp_path))
    model, calls = load_model("toy"), []

    def counting(model: Model, threads: int) -> list[Sample]:
        calls.append(threads)
        return measure(model, threads, SHAPES[:4])

    monkeypatch.setattr("engine.profile.measure", counting)
    first = load_or_measure(model, "toy", 1)
    assert calls == [1] and load_or_measure(model, "toy", 1) == first and calls == [1]
    assert first.provenance["threads"] == "1" and first.provenance["model"] == "toy" and first.provenance["measured"]
    assert len(first.samples) == 4 and all(sample.seconds > 0 for sample in first.samples)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(json.dumps({"samples": "damaged"}))
    assert isinstance(load_or_measure(model, "toy", 1), Profile) and calls == [1, 1]


def test_a_model_that_fails_is_an_error_and_not_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYBY_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="failed while profiling"):
        load_or_measure(FakeModel(fail_on=7), "fake", 1)
    assert not list(tmp_path.rglob("*.json"))
