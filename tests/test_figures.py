"""The papers' figures: their frame, what they are made of, and some of them from end to end."""

from __future__ import annotations

import asyncio
import csv
import secrets
import subprocess
import sys
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
from examples.figures import fig09_goodput, fig09_length, fig10_orders
from examples.figures.catalogue import FIGURES
from examples.figures.fig04_batching import pass_time
from examples.figures.fig12_blocking import Waits, waits
from examples.figures.fig13_predictor import cubic
from examples.figures.figure import Claim, Figure, csv_of, table
from examples.figures.served import served
from examples.figures.study import Study, generated, searched, times
from examples.figures.workers import Workers

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_claim_that_does_not_hold_says_why_or_that_nobody_knows() -> None:
    claims = [Claim("a", "1x", False), Claim("b", "1x", False, "Of d"), Claim("c", "2x", True)]
    assert [claim.reason for claim in claims] == ["Not explained", "Of d", ""]
    said = Figure("title", "setting", claims, [], b"").text().splitlines()
    assert [line.strip() for line in said if "hold" in line] == [
        "does not hold: Not explained",
        "does not hold: Of d",
        "holds",
    ]


def test_the_table_of_claims() -> None:
    one = Figure("title", "setting", [Claim("a | b", "3x", True), Claim("c", "1x", False, "of d")], [], b"")
    assert table({"fig1": one}).splitlines() == [
        "| figure | the paper | here | holds |",
        "|---|---|---|---|",
        "| fig1 | a \\| b | 3x | yes |",
        "|  | c | 1x | **no**. Of d |",
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


def test_more_than_one_write_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FIGURES", {name: FIGURES[name] for name in ("fig3", "fig4")})
    command.main(["all", "--out", str(tmp_path / "all")])
    command.main(["fig4", "fig3", "--out", str(tmp_path / "two")])
    assert "| fig4 |" in (tmp_path / "two" / "README.md").read_text()
    tmp_path /= "all"
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


# README's section

README = Path(__file__).parent.parent / "README.md"


def test_readme_has_every_figure() -> None:
    named = {line.split(" | ")[0].removeprefix("| ") for line in README.read_text().splitlines() if " | " in line}
    assert [name for name in FIGURES if name not in named] == []


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig13"])
def test_readme_says_what_comes_out(name: str) -> None:
    """Of those that take no time."""

    async def made() -> Figure:
        with Workers(1) as workers:
            return await FIGURES[name](workers)

    said = README.read_text().splitlines()
    assert [row for row in table({name: asyncio.run(made())}).splitlines() if row not in said] == []


# What figures are made of


def test_workers_do_the_same_work_once() -> None:
    async def twice() -> tuple[str, str, str]:
        with Workers(1) as workers:
            first, again = await asyncio.gather(workers(secrets.token_hex, 8), workers(secrets.token_hex, 8))
            return first, again, await workers(secrets.token_hex, 9)

    first, again, other = asyncio.run(twice())
    assert first == again
    assert len(other) == 18


def test_workers_end_with_a_command_that_is_killed() -> None:
    code = (
        "import asyncio, os, sys\n"
        "from examples.figures.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    with Workers(1) as workers:\n"
        "        print(asyncio.run(workers(os.getpid)), flush=True)\n"
        "        sys.stdin.read()\n"
    )
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as command:
        assert command.stdout is not None
        command.stdout.readline()  # there is a worker
        command.kill()
        command.communicate(timeout=30)  # returns once the worker, too, has let go of its end


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


# Figures, of systems that attain what they are told to


def bearing(limits: dict[str, float]) -> Any:
    """Workers whose runs meet all targets up to a rate of `limits`, in proportion to the SLO scale, and none beyond.

    Its key is the longest that the system's name starts with.
    """

    def of(run: Run) -> float:
        limit = limits[max((key for key in limits if run.variant.name.startswith(key)), key=len)]
        return float(run.rate <= limit * run.slo_scale * 1.0001)

    return Attaining(of)


def test_figure_9_compares_knees_and_tightest_targets() -> None:
    limits = {"distserve": 2.0, "distserve-cp2k": 4.0, "distserve-cp2k order=s-edf": 5.0, "distserve-cp8k": 2.0}
    figure = asyncio.run(fig09_goodput.make(bearing({**limits, "flowprefill": 10.0, "flowprefill-release": 8.0})))
    paper, release, chunked, tighter = figure.claims
    assert paper.holds and paper.ours.count("5.0x") == 3  # once for each model
    assert not release.holds and release.ours.count("4.0x") == 3
    assert chunked.holds and chunked.ours.startswith("most urgent first: 2.0x and 5.0x")
    assert tighter.holds and tighter.ours.startswith("2.0x and 5.0x")
    assert "Most urgent first reproduces" in chunked.why
    knees = {row["system"]: row["rate_per_s"] for row in figure.rows if row["what"] == "knee"}
    assert knees["distserve"] == pytest.approx(2.0, rel=0.05)
    assert figure.png.startswith(PNG)


def test_what_figure_9_depends_on() -> None:
    figure = asyncio.run(
        fig09_length.make(bearing({"distserve": 2.0, "flowprefill": 8.0, "flowprefill budget=2048": 16.0}))
    )
    by_length, by_batch = figure.claims
    assert not by_length.holds and by_length.ours.count("4.0x (4.0 to 4.0)") == len(fig09_length.LENGTHS)
    assert "one draw of 327 gives 4.0x to 4.0x" in by_length.ours
    assert not by_batch.holds and "with 2,048 8.0x" in by_batch.ours
    assert len(figure.rows) == 2 * 3 + 1 + len(fig09_length.BATCHES)
    assert figure.png.startswith(PNG)


def test_figure_10_compares_orders() -> None:
    figure = asyncio.run(
        fig10_orders.make(bearing({"flowprefill": 8.0, "flowprefill order=d-edf": 8.0, "flowprefill order=edf": 4.0}))
    )
    goodput, tighter = figure.claims
    assert goodput.ours.startswith("1.00x and 2.00x") and not goodput.holds
    assert tighter.ours.startswith("1.00x and 2.00x") and not tighter.holds


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
