"""Ablations from the command line: the schema, pairing, resuming, the report, the live backend, and every refusal."""

import asyncio
import csv
import io
import json
import math
import re
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest

from engine.simulation import Deployment
from examples import ablate, backends
from examples.ablation import Ablation, carry_out
from examples.experiment import Load, Run, Variant, describe
from examples.findings import Findings
from examples.results import fold
from examples.runner import Cache, Cores, Progress, Runner
from scheduling.predictor import Predictor
from scheduling.presets import preset

RUN_FIELDS = {
    "system", "rate", "slo_scale", "seed", "requests", "ttft_attainment", "tbt_attainment", "attainment",
    "attainment_by_class", "met_per_s", "ttft_p50_s", "ttft_p99_s", "ttft_std_s", "tbt_p99_s", "blocking_mean_ms",
    "blocking_max_ms", "utilisation", "fairness", "worst_class",
}  # fmt: skip

SMALL = ["--requests", "25", "--workers", "1", "--max-output", "4"]


@pytest.fixture
def run(tmp_path, capsys):
    """Run the command in a folder of its own; gives what it printed."""

    def run(*arguments):
        ablate.main([*SMALL, "--cache", str(tmp_path / "cache.jsonl"), *map(str, arguments)])
        return capsys.readouterr()

    return run


def test_everything_at_once(run, tmp_path):
    json_file, csv_file, report = (tmp_path / "deep" / name for name in ("a.json", "a.csv", "a.md"))
    printed = run(
        "--systems", "distserve", "--set", "preempt=layer,order=s-edf", "--rates", "8", "--slo-scales", "1,2",
        "--seeds", "0,1", "--knee", "0.9", "--min-slo", "0.9", "--json", json_file, "--csv", csv_file,
        "--report", report, "--metric", "both",
    )  # fmt: skip
    content = json.loads(json_file.read_text())
    runs = content["runs"]
    assert all(set(run) >= RUN_FIELDS for run in runs)
    systems = ["distserve", "distserve preempt=layer order=s-edf"]
    grid = {(r["system"], r["rate"], r["slo_scale"], r["seed"]) for r in runs}
    assert grid >= {(s, rate, scale, seed) for s in systems for rate in (8,) for scale in (1, 2) for seed in (0, 1)}
    assert len(grid) == len(runs)
    assert {(knee["system"], knee["slo_scale"]) for knee in content["knees"]} == {
        (s, x) for s in systems for x in (1, 2)
    }
    for value, found in (("rate", content["knees"]), ("slo_scale", content["min_slo"])):
        ends = [[end for end in (each["low"], each[value], each["high"]) if end is not None] for each in found]
        assert all(each == sorted(each) for each in ends)
        assert any(len(each) == 3 for each in ends)
    assert {(found["system"], found["rate"]) for found in content["min_slo"]} == {(s, 8) for s in systems}

    lines = list(csv.DictReader(io.StringIO(csv_file.read_text())))
    assert len(lines) == len(runs)
    assert float(lines[0]["attainment"]) == runs[0]["attainment"]
    assert float(lines[0]["attainment_text"]) == runs[0]["attainment_by_class"]["text"]

    text = report.read_text()
    assert text.startswith("# How does distserve preempt=layer order=s-edf compare with distserve on qwen?")
    assert f"`{content['config_hash']}`" in text
    assert "Seeds: 0, 1" in text
    assert "![attainment by rate and SLO scale](a.png)" in text
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "python -m examples.ablate --requests 25" in text
    assert "| distserve preempt=layer order=s-edf | `SEDF(late=published, patience=4.0)`" in text
    assert re.search(r"\| 1 \| 8 \| distserve \| \d", text)
    assert "distserve preempt=layer order=s-edf" in printed.out
    assert str(report) in printed.out
    assert re.search(r"\d+/\d+ runs", printed.err)


def test_every_set_adds_a_variant_of_every_system():
    variants = ablate.variants_from(["distserve", "flowprefill preempt=never"], ["preempt=layer,order=edf"], None)
    assert [(each.name, each.system.preempt.name, type(each.system.order).__name__) for each in variants] == [
        ("distserve", "NEVER", "FCFS"),
        ("distserve preempt=layer order=edf", "LAYER", "EDF"),
        ("flowprefill preempt=never", "NEVER", "SEDF"),
        ("flowprefill preempt=never preempt=layer order=edf", "LAYER", "EDF"),
    ]
    with pytest.raises(ValueError, match="'preempt=layer,preempt=never' says preempt twice"):
        ablate.variants_from(["flowprefill"], ["preempt=layer,preempt=never"], None)
    [only] = ablate.variants_from(["flowprefill"], [], "fcfs")
    assert (only.name, type(only.system.order).__name__) == ("flowprefill order=fcfs", "FCFS")


def test_an_interrupted_ablation_goes_on_where_it_was(run, tmp_path, monkeypatch):
    arguments = ["--systems", "flowprefill", "--rates", "5,6", "--seeds", "0,1", "--json", tmp_path / "a.json"]
    carried = []
    real = ablate.simulated

    def broken_after_two(run):
        if len(carried) == 2:
            raise RuntimeError("the power is gone")
        carried.append(run.identity)
        return real(run)

    monkeypatch.setattr(ablate, "simulated", broken_after_two)
    with pytest.raises(RuntimeError):
        run(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.jsonl"]  # no output, not even a part of one
    with (tmp_path / "cache.jsonl").open("a") as cache:
        cache.write('{"key": "cut sh')

    def counted(run):
        carried.append(run.identity)
        return real(run)

    monkeypatch.setattr(ablate, "simulated", counted)
    printed = run(*arguments)
    assert len(carried) == 4
    assert "4/4 runs, 2 known before" in printed.err
    first = (tmp_path / "a.json").read_text()
    run(*arguments)
    assert len(carried) == 4
    assert (tmp_path / "a.json").read_text() == first  # the same bytes, whether run or remembered


def test_the_cache_knows_a_run_by_all_its_figures_depend_on(tmp_path):
    load = Load("qwen", "digest", 10, 1.0)
    base = Run(Variant("a", preset("flowprefill")), Deployment(), load, 2.0, 1.0, 0)
    others = [
        Run(Variant("a", preset("distserve")), Deployment(), load, 2.0, 1.0, 0),
        Run(base.variant, Deployment(tp=2), load, 2.0, 1.0, 0),
        Run(base.variant, Deployment(), Load("qwen", "other", 10, 1.0), 2.0, 1.0, 0),
        Run(base.variant, Deployment(), load, 2.5, 1.0, 0),
        Run(base.variant, Deployment(), load, 2.0, 1.5, 0),
        Run(base.variant, Deployment(), load, 2.0, 1.0, 1),
    ]
    assert len({base.key, *(run.key for run in others)}) == 7
    renamed = Run(Variant("b", preset("flowprefill")), Deployment(), load, 2.0, 1.0, 0)
    assert renamed.key == base.key
    cache = Cache(tmp_path / "cache.jsonl")
    cache.add(base, {**base.identity, "ttft_attainment": 1.0, "tbt_attainment": 0.5, "attainment": 0.5})
    cache.close()
    again = Cache(tmp_path / "cache.jsonl")
    found = again.get(renamed)
    again.close()
    assert found is not None and (found["system"], found["attainment"]) == ("b", 0.5)


def test_runs_of_another_version_of_the_code_are_not_taken(monkeypatch):
    run = Run(Variant("a", preset("flowprefill")), Deployment(), Load("qwen", "", 10, 1.0), 2.0, 1.0, 0)
    before = run.key
    monkeypatch.setattr("examples.experiment.code_digest", lambda: "another")
    assert run.key != before


def test_ones_own_order_is_told_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "from scheduling.order import Order\n"
        "class Longest(Order):\n"
        "    def rank(self, candidate, now):\n"
        "        return 0, -candidate.remaining\n"
    )
    (tmp_path / "my_order.py").write_text(source)
    [plain, mine] = ablate.variants_from(["flowprefill"], ["order=my_order:Longest"], None)
    assert mine.name == "flowprefill order=my_order:Longest"
    words = describe(mine.system)["order"]
    assert re.fullmatch(r"Longest.* of my_order, [0-9a-f]{8}", words)
    assert "0x" not in words
    (tmp_path / "my_order.py").write_text(source.replace("-candidate", "candidate"))
    assert describe(mine.system)["order"] != words
    assert describe(plain.system) == describe(preset("flowprefill"))


@pytest.mark.parametrize(
    ("stop", "code", "why"),
    [(KeyboardInterrupt, 130, "stopped"), (BrokenProcessPool, 1, "a process was killed, from outside")],
)
def test_one_that_is_stopped_says_how_to_go_on(run, tmp_path, monkeypatch, capsys, stop, code, why):
    async def stopped(*_):
        raise stop

    monkeypatch.setattr(ablate, "experiment", stopped)
    with pytest.raises(SystemExit) as exit:
        run("--json", tmp_path / "a.json")
    assert exit.value.code == code
    cache = tmp_path / "cache.jsonl"
    assert capsys.readouterr().err == f"ablate: {why}; the same command goes on from here, with what {cache} has\n"
    assert list(tmp_path.iterdir()) == [cache]


def test_a_damaged_cache_costs_what_is_damaged_and_no_more(tmp_path):
    path = tmp_path / "cache.jsonl"
    run = Run(Variant("a", preset("flowprefill")), Deployment(), Load("qwen", "digest", 10, 1.0), 2.0, 1.0, 0)
    other = Run(Variant("a", preset("distserve")), Deployment(), Load("qwen", "digest", 10, 1.0), 2.0, 1.0, 0)
    record = {**run.identity, "ttft_attainment": 1.0, "tbt_attainment": 0.5, "attainment": 0.5}
    parts = [1], None, {}, {"attainment": 1.0}
    damaged = [b"\xff\xfe", b"[1, 2]", b"null", b'{"key": ["a"], "record": {}}']
    damaged += [json.dumps({"key": other.key, "record": part}).encode() for part in parts]
    whole = json.dumps({"key": run.key, "record": record}).encode()
    path.write_bytes(b"\n".join([*damaged, whole, whole[:40]]))
    cache = Cache(path)
    assert cache.get(run) == record and cache.get(other) is None
    cache.add(other, record)
    cache.close()
    again = Cache(path)
    assert again.get(run) == record and again.get(other) is not None
    again.close()


def test_the_report_says_how_many_were_sent(run, tmp_path):
    trace, report = tmp_path / "few.csv", tmp_path / "a.md"
    trace.write_text("t_s,prompt_len,output_len\n0,5,5\n1,5,2\n")
    run("--systems", "flowprefill", "--trace", trace, "--arrivals", "recorded", "--seeds", "0", "--report", report)
    assert "Requests: 2 a run from" in report.read_text()


def test_changes_are_paired_by_seed():
    def record(system, seed, share):
        rows = []
        base = {"system": system, "rate": 1.0, "slo_scale": 1.0, "seed": seed}
        return {
            **fold(rows, seconds=1.0),
            **base,
            "ttft_attainment": share,
            "ttft_attainment_by_class": {"text": share},
        }

    shares = {"a": [0.2, 0.5, 0.8], "b": [0.3, 0.6, 0.9], "c": [0.3, 0.4, 0.9]}
    findings = Findings(
        config={},
        metric="ttft",
        systems=["a", "b", "c"],
        rates=[1.0],
        slo_scales=[1.0],
        seeds=[0, 1, 2],
        runs=[record(system, seed, value) for system, values in shares.items() for seed, value in enumerate(values)],
        knees=[],
        min_slo=[],
    )
    first, second, third = findings.spots()
    assert first.change is None
    assert second.change == pytest.approx((0.1, 0.1, 0.1))  # 0.1 in every seed, however much seeds differ
    assert second.attainment == pytest.approx(0.6)
    assert second.high - second.low == pytest.approx(2 * 4.303 * 0.3 / math.sqrt(3))
    assert third.change[1] < 0 < third.change[2]
    assert third.worst == ("text", pytest.approx(16 / 30))


def test_the_same_requests_for_every_system(monkeypatch):
    seen = {}

    def fake_play(variant, arrivals, deployment):
        seen.setdefault(tuple((a.prompt_tokens, a.output_tokens) for a in arrivals), []).append(variant.name)
        return SimpleNamespace(), None

    monkeypatch.setattr(backends, "play", fake_play)
    monkeypatch.setattr(backends, "fold_run", lambda rows, busy: {**fold([], seconds=1.0), "ttft_attainment": 1.0})
    variants = [Variant(name, preset(name)) for name in ("distserve", "flowprefill")]
    load = Load("qwen", "", 30, 1.0)
    ablation = Ablation(variants, Deployment(), load, [1.0, 3.0], [1.0], [4, 5], "ttft")

    async def all_runs(cache):
        return await carry_out(ablation, Runner(Cores(backends.simulated, 1), cache, Progress()))

    findings = asyncio.run(all_runs(SimpleNamespace(get=lambda run: None, add=lambda run, record: None)))
    assert len(findings.runs) == 8
    assert sorted(map(sorted, seen.values())) == [["distserve"] * 2 + ["flowprefill"] * 2] * 2  # one list for each seed


def test_processes_give_what_one_process_gives(tmp_path):
    variant = Variant("flowprefill", preset("flowprefill"))
    runs = [Run(variant, Deployment(), Load("qwen", "", 10, 1.0, max_output=2), 4.0, 1.0, seed) for seed in (0, 1)]

    async def carry(workers):
        cores = Cores(backends.simulated, workers)
        try:
            return await asyncio.gather(*map(cores, runs))
        finally:
            cores.close()

    assert asyncio.run(carry(2)) == asyncio.run(carry(1))


def test_live(tmp_path, monkeypatch, capsys):
    predictor = Predictor(1e-3, 2e-5)
    monkeypatch.setattr(backends, "load_or_measure", lambda *_: SimpleNamespace(predictor=lambda: predictor))
    monkeypatch.setattr(backends, "KV_BYTES", 32 << 20)
    out = tmp_path / "live.json"
    ablate.main(
        ["--backend", "torch", "--model", "toy", "--systems", "distserve,flowprefill", "--rates", "40", "--seeds", "0",
         "--requests", "8", "--max-output", "2", "--json", str(out), "--cache", str(tmp_path / "cache.jsonl")]
    )  # fmt: skip
    content = json.loads(out.read_text())
    assert [(run["system"], run["requests"], run["unfinished"]) for run in content["runs"]] == [
        ("distserve", 8, 0),
        ("flowprefill", 8, 0),
    ]
    assert all(0 < run["utilisation"] <= 1 for run in content["runs"])
    assert "slo_base=0.27" in content["config"]["load"]  # 1 ms and 20 us a token, over 80 ms
    assert "TTFT attainment" in capsys.readouterr().out


# Refusals


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--systems", "distserve,nope"], "no system called 'nope'; there are: distserve"),
        (["--systems", "distserve,distserve"], "argument --systems: 'distserve,distserve' says something twice"),
        (["--rates", "0"], "argument --rates: must be above 0, got 0"),
        (["--rates", "1,fast"], "argument --rates: 'fast' is not a number"),
        (["--slo-scales", "-1"], "argument --slo-scales: must be above 0, got -1"),
        (["--rates", "1e-320"], "the time scale must be finite, got inf"),
        (["--slo-scales", "1e308"], "slo.ttft must be a positive number of seconds, got inf"),
        (["--seeds", "0,one"], "argument --seeds: 'one' is not a whole number"),
        (["--slo", "txet=100,100"], "--slo txet: qwen has no requests of that type; it has text, image, search, file"),
        (["--systems", "layered,sarathi", "--decode-instances", "2"], "--decode-instances: none of these systems has"),
        (["--plot", "a.pdf"], "argument --plot: 'a.pdf' does not end in .png"),
        (["--json", "same", "--csv", "same"], "same: two outputs cannot be the same file"),
        (["--plot", "same.png", "--report", "same.png"], "same.png: two outputs cannot be the same file"),
        (["--json", "x" * 300], "File name too long"),
        (["--backend", "torch", "--model", "toy", "--device", "abacus"], "--device abacus: not a device torch knows"),
        (["--knee", "1.5"], "argument --knee: must be above 0 and at most 1, got 1.5"),
        (["--requests", "0"], "argument --requests: must be at least 1, got 0"),
        (["--set", "speed=more"], "speed"),
        (["--set", "preempt=sometimes"], "preempt=sometimes"),
        (["--order", "nowhere:Order"], "nowhere"),
        (["--trace", "missing.csv"], "no workload 'missing.csv'"),
        (["--trace", "bad.csv"], "bad.csv, line 3, output_len: -2 is not a number of tokens"),
        (
            ["--trace", "good.csv", "--arrivals", "recorded", "--seeds", "0,1"],
            "recorded arrivals are the same for every",
        ),
        (["--arrivals", "recorded", "--seeds", "0"], "qwen is a generator and has no recorded arrivals"),
        (["--model", "no-such-model"], "no model 'no-such-model': give llama3-8b, "),
        (["--device", "abacus"], "no device called 'abacus'; there are: a"),
        (["--model", "llama3-70b"], "llama3-70b with tp 1 leaves no memory"),
        (["--backend", "torch", "--tp", "2"], "--tp is for simulation"),
        (["--json", "bad.csv/a.json"], "bad.csv/a.json: cannot be written there"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing_behind(arguments, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("prompt_len,output_len\n5,5\n5,-2\n")
    (tmp_path / "good.csv").write_text("t_s,prompt_len,output_len\n0,5,5\n1,5,2\n")
    outputs = ["--json", "a.json", "--csv", "a.csv", "--plot", "a.png", "--report", "a.md", "--cache", "new/cache"]
    with pytest.raises(SystemExit) as exit:
        ablate.main([*outputs, *arguments])
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.err.startswith("ablate: error: ")
    assert error in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "good.csv"]
