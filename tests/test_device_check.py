"""The device check on this CPU, and that one failure does not hide the rest."""

import pytest
import torch

from examples import checks, device_check


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", ["attention", "parity", "transformers", "parks", "engine"])
def test_checks_pass_here(name):
    figures = device_check.CHECKS[name]("toy", "cpu")
    assert figures["passed"], figures


def test_a_wrong_result_does_not_pass(monkeypatch):
    monkeypatch.setattr(checks, "served", lambda model, given: torch.zeros(len(given), model.config.vocab_size))
    assert not checks.parity("toy", "cpu")["passed"]


def test_every_boundary_of_the_toy_is_parked_at():
    figures = checks.parks("toy", "cpu")
    assert figures["toy"] == {"boundaries": 20, "differ_at": []}


def test_a_check_that_crashes_says_why():
    figures = device_check.run_apart("parks", "no/such/folder", "cpu")
    assert not figures["passed"]
    assert "no/such/folder" in figures["error"]
