"""The papers' figures: their frame, what they are made of, and some of them from end to end."""

from __future__ import annotations

import asyncio
import csv
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.deployment import Deployment
from engine.metrics import RequestRows
from engine.profile import Sample
from engine.simulation import simulate
from examples.backends import simulated_arrival
from examples.experiment import Run, variant
from examples.figures import __main__ as command
from examples.figures.catalogue import FIGURES
from examples.figures.fig04_batching import pass_time
from examples.figures.fig12_blocking import Waits, waits
from examples.figures.fig13_predictor import cubic
from examples.figures.figure import Claim, Figure, csv_of, table
from examples.figures.served import served
from examples.figures.study import Study, generated, searched, times
from examples.figures.workers import Workers

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_claim_that_does_not_hold_says_why() -> None:
    with pytest.raises(ValueError, match="needs a reason: twice as fast"):
        Claim("twice as fast", "half as fast", holds=False)
    assert Claim("twice as fast", "2.1x", holds=True).why == ""


def test_the_table_of_claims() -> None:
    one = Figure("title", "setting", [Claim("a | b", "3x", True), Claim("c", "1x", False, "of d")], [], b"")
    assert table({"fig1": one}).splitlines() == [
        "| figure | the paper | here | holds |",
        "|---|---|---|---|",
        "| fig1 | a \\| b | 3x | yes |",
        "|  | c | 1x | **no**. of d |",
    ]


def test_csv_has_six_digits_and_an_empty_cell_for_nothing() -> None:
    assert csv_of([{"a": 1 / 3, "b": 7, "c": None}, {"a": 2e-9, "b": "x", "c": ""}]) == "a,b,c\n0.333333,7,\n2e-09,x,\n"


# The command


def test_the_figures_that_are_there() -> None:
    assert {f"fig{number}" for number in (3, 4, 9, 10, 11, 12, 13, 14, 15)} <= set(FIGURES)


def test_one_figure_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["fig4", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fig4.csv", "fig4.png"]
    assert (tmp_path / "fig4.png").read_bytes().startswith(PNG)
    rows = list(csv.DictReader((tmp_path / "fig4.csv").open()))
    [row] = [row for row in rows if (row["prompt_tokens"], row["batch"]) == ("64", "8")]
    seconds = pass_time(Deployment(model="llama3-8b", hardware="a800-80g"), 64, 8)
    assert float(row["ttft_s"]) == pytest.approx(seconds, rel=1e-5)
    assert float(row["tokens_per_s"]) == pytest.approx(512 / seconds, rel=1e-5)
    said = capsys.readouterr().out
    assert "paper  Prompts of 32 to 256 tokens gain throughput by batching" in said
    assert said.count("  holds\n") == 2


def test_all_writes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FIGURES", {name: FIGURES[name] for name in ("fig3", "fig4")})
    command.main(["all", "--out", str(tmp_path)])
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| fig3", "| ", "| fig4", "| "]
    assert {"fig3.png", "fig4.png"} < {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig99"], "no figure 'fig99'; there are fig3, fig4,"),
        (["fig3", "all"], "no figure 'all'; there are"),
        (["fig9", "--backend", "torch"], "fig9 cannot be measured live; there are fig12, fig13"),
        (["fig12", "--model", "toy"], "--model is for --backend torch"),
        (["fig12", "--backend", "torch", "--workers", "2"], "--workers is for simulation"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        command.main([*arguments, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


# What figures are made of


def test_workers_do_the_same_work_once() -> None:
    async def twice() -> tuple[str, str, str]:
        with Workers(1) as workers:
            first, again = await asyncio.gather(workers(secrets.token_hex, 8), workers(secrets.token_hex, 8))
            return first, again, await workers(secrets.token_hex, 9)

    first, again, other = asyncio.run(twice())
    assert first == again
    assert len(other) == 18


class Attaining:
    """In the place of Workers: a run attains what `of` says."""

    def __init__(self, of: Callable[[Run], float]) -> None:
        self._of = of

    async def __call__(self, function: Callable[..., Any], run: Run) -> dict[str, float]:
        return {"ttft_attainment": self._of(run)}


def study(of: Callable[[Run], float]) -> Study:
    workers: Any = Attaining(of)
    return Study(workers, Deployment(), generated("qwen", 10), seeds=(1, 2))


def test_a_knee_is_found_for_each_seed() -> None:
    edges = asyncio.run(study(lambda run: 0.9 if run.rate <= 4 * run.seed else 0.89).knee("distserve"))
    for seed, edge in zip((1, 2), edges, strict=True):
        assert edge.value is not None and edge.beyond is not None
        assert edge.value <= 4 * seed < edge.beyond <= 1.045 * edge.value


def test_the_tightest_target_is_a_scale_at_one_rate() -> None:
    def of(run: Run) -> float:
        assert run.rate == 3.0
        return 1.0 if run.slo_scale >= 0.4 else 0.0

    edges = asyncio.run(study(of).tightest("flowprefill preempt=layer", 3.0))
    assert all(edge.value is not None and 1 / 0.4 / 1.045 <= edge.value <= 1 / 0.4 for edge in edges)
    [knee, tight] = searched("x", edges, edges, load=3.0)
    assert knee["rate_per_s"] == pytest.approx(edges[0].value)
    assert tight["slo_scale"] == pytest.approx(1 / (edges[0].value or 0.0))
    assert tight["low"] <= tight["slo_scale"] <= tight["high"]  # type: ignore[operator]
    assert times(edges, edges) == 1


def test_attainment_is_the_mean_over_seeds() -> None:
    assert asyncio.run(study(lambda run: run.seed / 4).attainment("distserve", 1.0)) == 0.375


def run_of(system: str, requests: int = 80, rate: float = 6.0) -> Run:
    return Run(variant(system), Deployment(), generated("qwen", requests), rate, 1.0, seed=1)


def test_served_counts_all_prompt_tokens_until_the_last_first_token() -> None:
    run = run_of("distserve")
    arrivals = run.load.arrivals(run.rate, 1.0, run.seed)
    rows = simulate(run.variant.system, map(simulated_arrival, arrivals), Deployment()).rows
    seconds = max(row.first_token or 0.0 for row in rows) - min(row.arrival for row in rows)
    result = served(run)
    assert result.tokens_per_s == pytest.approx(sum(arrival.prompt_tokens for arrival in arrivals) / seconds)
    assert result.met_per_s == pytest.approx(result.attainment * len(arrivals) / seconds)


def test_waits_are_those_that_the_metrics_count() -> None:
    run, sink, rows = run_of("flowprefill"), Waits(), RequestRows()
    arrivals = map(simulated_arrival, run.load.arrivals(run.rate, 1.0, run.seed))
    simulate(run.variant.system, arrivals, Deployment(), sinks=[sink], rows=rows)
    assert len(sink.seconds) == rows.blocking.n > 10
    assert sum(sink.seconds) == pytest.approx(rows.blocking.total)
    assert max(sink.seconds) == rows.blocking.max


def test_operators_block_shorter_than_layers() -> None:
    layer, operator = waits(run_of("flowprefill preempt=layer")), waits(run_of("flowprefill"))
    assert sum(layer) / len(layer) > 2 * sum(operator) / len(operator)


def test_the_papers_predictor_is_a_cubic_of_the_sum_of_tokens() -> None:
    def seconds(tokens: int) -> float:
        return 0.02 + 6e-5 * tokens + 1e-9 * tokens**2 + 1e-14 * tokens**3

    predict = cubic([Sample(((0, tokens),), seconds(tokens)) for tokens in range(256, 8193, 256)])
    assert predict(((0, 1000), (0, 2000))) == pytest.approx(seconds(3000), rel=1e-3)
    assert predict(((4000, 3000),)) == pytest.approx(seconds(3000), rel=1e-3)  # context counts for nothing
