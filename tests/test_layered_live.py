"""Chunks against groups on real forward passes: what the comparison counts, what the demo's second picture shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import demo_layered, layered_live
from examples.demo_layered import Lanes, Shown
from examples.driving import run
from examples.layered_live import CHUNKED, LAYERED, compare, draw, load_sparse, sized, table
from models.costs import model_costs
from models.load import load_model
from scheduling.batch import FillChunks
from scheduling.layered import Layered
from scheduling.plan import Chunked


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})


def test_groups_read_fewer_experts_for_prompts_than_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_live, "PROMPTS", (120, 180))
    monkeypatch.setattr(layered_live, "OUTPUTS", (2, 6))
    model = load_model("toy-moe")
    chunked, layered = run(compare(model, work=30, requests=6))
    assert (chunked.system, layered.system) == (CHUNKED, LAYERED)
    for each in (chunked, layered):
        assert len(each.rows) == 6 and all(row.ttft is not None for row in each.rows)
        assert len(each.gaps) == sum(row.output_tokens - 1 for row in each.rows)
        assert 0 < each.prefill_expert_bytes <= each.expert_bytes
    # A prompt of at least 120 tokens: four chunks, or every layer once.
    layers = model_costs(model.config, itemsize=4).layers
    held = sum(one.weight_bytes for layer in layers for one in layer if one.name == "experts")
    assert layered.prefill_expert_bytes <= held < chunked.prefill_expert_bytes
    text = table((chunked, layered))
    assert f"{100 * (layered.expert_bytes / chunked.expert_bytes - 1):+.0f} % of the experts' bytes" in text


def test_chunks_and_groups_carry_the_same_work() -> None:
    chunked, layered = sized(CHUNKED, 40), sized(LAYERED, 40)
    assert (chunked.plan, chunked.batch) == (Chunked(40), FillChunks(40))
    assert layered.plan == Layered(40)
    assert chunked.placement == layered.placement


def test_arrivals_are_the_same_for_every_system() -> None:
    assert draw(5, 2.0) == draw(5, 2.0)
    assert [a.prompt_tokens for a in draw(5, 2.0)] == [a.prompt_tokens for a in draw(9, 4.0)][:5]


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="toy has no experts to count: take a mixture of experts, such as toy-moe"):
        load_sparse("toy")


def shown(tokens: dict[int, list[float]], waits: dict[int, tuple[float, float]]) -> Shown:
    return Shown("layered", Lanes(tokens, waits), prompt_bytes=5e6)


def test_the_longest_gap_counts_while_long_prompts_wait() -> None:
    # The gap of 3 s lies before the prompt comes, that of 2 s begins before and ends within its wait.
    each = shown({0: [0.0, 3.0, 3.5], 1: [3.0, 5.0, 5.25]}, {7: (4.0, 5.5)})
    assert each.longest_gap == 2.0
    assert each.ttfts == [1.5]


def test_the_demo_serves_and_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_layered, "PROMPT", 300)
    monkeypatch.setattr(demo_layered, "TOKENS", 40)
    monkeypatch.setattr(demo_layered, "WORK", 64)
    demo_layered.demo(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if " ms " in line] == ["orca", "sarathi", "layered"]
    assert (tmp_path / "demo-layered.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_names_a_model_it_cannot_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        demo_layered.main(["--model", "toy"])
    assert exit.value.code == 2
    assert "toy has no experts" in capsys.readouterr().err
