"""The generators against the figures of the real traces, and common random numbers across rates, scales and sources."""

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from engine.metrics import percentile
from examples import workload
from examples.arrivals import renewal, scaled
from examples.lengths import QWENTRACE, Quantiles
from examples.slos import SLO_TABLES
from examples.workload import RECORDED, at_rate, open_workload, parse_process
from scheduling.request import SLO

# From the recovered trace: share, prompt mean, p50, p90, longest, output p50. Means and medians within tolerance.
TRACE = {
    "text": (0.691, 646, 744, 1118, 4613, 276),
    "image": (0.073, 393, 372, 394, 930, 70),
    "search": (0.202, 5055, 4378, 8066, 16744, 350),
    "file": (0.034, 4132, 3210, 9116, 10720, 701),
}


def qwen(n, **options):
    return open_workload("qwen").draw(n, **options)


@pytest.fixture(scope="module")
def many():
    return qwen(20_000, seed=1)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("t_s,type,prompt_len,output_len\n5,text,791,532\n7,search,16744,540\n11,text,20,3\n")
    return str(path)


@pytest.mark.parametrize("label", QWENTRACE)
def test_lengths_and_shares_are_the_traces(many, label):
    share, prompt_mean, prompt_p50, prompt_p90, longest, output_p50 = TRACE[label]
    mine = [arrival for arrival in many if arrival.label == label]
    prompts = sorted(arrival.prompt_tokens for arrival in mine)
    outputs = sorted(arrival.output_tokens for arrival in mine)
    assert len(mine) / len(many) == pytest.approx(share, abs=0.01)
    assert mean(prompts) == pytest.approx(prompt_mean, rel=0.15)
    assert outputs[len(outputs) // 2] == pytest.approx(output_p50, rel=0.2)
    assert prompts[-1] <= longest
    assert mine[0].slo is SLO_TABLES["llama3-8b"][label]
    if label != "file":  # eleven rows: its quantiles are not known to any accuracy
        assert prompts[len(prompts) // 2] == pytest.approx(prompt_p50, rel=0.1)
        assert prompts[len(prompts) * 9 // 10] == pytest.approx(prompt_p90, rel=0.1)


def test_the_long_tail_is_a_tenth_of_the_searches():
    searches = [a.prompt_tokens for a in open_workload("qwen-long").draw(20_000) if a.label == "search"]
    long = [tokens for tokens in searches if tokens > 16_744]
    assert len(long) / len(searches) == pytest.approx(0.1, abs=0.02)
    assert 32_768 <= min(long) < 40_000 < 120_000 < max(long) <= 131_072


@pytest.mark.parametrize(
    ("name", "prompt_p50", "prompt_p99", "output_p50"),
    [("sharegpt", 1730, 7434, 415), ("azure", 1020, 4142, 129), ("mooncake", 6909, 85401, 350)],
)
def test_quantile_generators_have_the_quantiles_of_their_traces(name, prompt_p50, prompt_p99, output_p50):
    drawn = open_workload(name).draw(20_000)
    prompts, outputs = [a.prompt_tokens for a in drawn], [a.output_tokens for a in drawn]
    assert percentile(prompts, 50) == pytest.approx(prompt_p50, rel=0.05)
    assert percentile(prompts, 99) == pytest.approx(prompt_p99, rel=0.05)
    assert percentile(outputs, 50) == pytest.approx(output_p50, rel=0.05)


def test_an_inverse_cdf_is_linear_between_its_points():
    class Fixed(Random):
        def __init__(self, value):
            self.value = value

        def random(self):
            return self.value

    length = Quantiles(((0, 10), (50, 20), (100, 120)))
    assert [length(Fixed(value)) for value in (0.0, 0.25, 0.5, 0.75, 0.999)] == [10, 15, 20, 70, 120]


def test_arrivals_are_poisson_at_the_base_rate(many):
    gaps = [after.time - before.time for before, after in pairwise(many)]
    assert many[0].time == 0.0
    assert mean(gaps) == pytest.approx(1 / 2.746, rel=0.03)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gamma_arrivals_are_as_bursty_as_asked_at_the_same_rate(cv):
    times = renewal(0, 5.0, cv)
    gaps = [after - before for before, after in pairwise(next(times) for _ in range(40_000))]
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.05)


def test_same_seed_same_work_other_seed_other_work():
    assert qwen(50, seed=7) == qwen(50, seed=7)
    assert qwen(50, seed=7) != qwen(50, seed=8)
    assert qwen(50, seed=7)[3].prompt(1000) == qwen(50, seed=7)[3].prompt(1000)


def test_a_longer_run_begins_with_the_shorter_one():
    assert qwen(100, seed=3)[:40] == qwen(40, seed=3)


def test_another_rate_stretches_time_and_nothing_else():
    source = open_workload("qwen")
    slow, fast = (at_rate(source.draw(50), source, rate) for rate in (1.0, 4.0))
    assert [a.time for a in slow] == pytest.approx([4 * a.time for a in fast])
    assert slow[-1].time == pytest.approx(2.746 * qwen(50)[-1].time)
    assert [(a.label, a.prompt_tokens, a.output_tokens, a.slo) for a in slow] == [
        (a.label, a.prompt_tokens, a.output_tokens, a.slo) for a in fast
    ]


def test_burstiness_changes_the_times_and_nothing_else():
    calm, bursty = qwen(50), qwen(50, cv=4.0)
    assert [a.time for a in calm] != [a.time for a in bursty]
    assert [(a.label, a.prompt_tokens) for a in calm] == [(a.label, a.prompt_tokens) for a in bursty]


def test_prompts_are_token_ids_of_the_right_length_and_differ():
    arrivals = qwen(30)
    prompts = [arrival.prompt(256) for arrival in arrivals]
    assert [len(prompt) for prompt in prompts] == [arrival.prompt_tokens for arrival in arrivals]
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 30


def test_prompts_begin_alike_as_far_as_their_blocks_do(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 0, "input_length": 1400, "output_length": 5, "hash_ids": [7, 8, 10]}\n'
    )
    first, second = (arrival.prompt(50_000) for arrival in open_workload(str(path)).draw(2, cv=RECORDED))
    assert (len(first), len(second)) == (1100, 1400)
    assert first[:1024] == second[:1024]
    assert first[1024:1034] != second[1024:1034]


def test_scaling():
    arrivals = qwen(200)
    small = scaled(arrivals, prompt=0.1, output=0.25, max_output=64, slo=3.0, time=2.0)
    assert len(small) == 200
    for before, after in zip(arrivals, small, strict=True):
        assert after.prompt_tokens == max(1, round(before.prompt_tokens * 0.1))
        assert after.output_tokens == min(64, max(1, round(before.output_tokens * 0.25)))
        assert (after.slo.ttft, after.slo.tbt) == (before.slo.ttft * 3.0, before.slo.tbt * 3.0)
        assert (after.time, after.label, after.index) == (before.time * 2.0, before.label, before.index)
    assert min(arrival.prompt_tokens for arrival in scaled(arrivals, prompt=1e-6)) == 1


def test_scales_and_rates_must_be_positive():
    with pytest.raises(ValueError, match="the slo scale must be above 0, got 0"):
        scaled(qwen(1), slo=0)
    with pytest.raises(ValueError, match="rate must be above 0 requests per second, got -1"):
        at_rate(qwen(1), open_workload("qwen"), -1)
    with pytest.raises(ValueError, match="rate must be above 0 requests per second, got 0"):
        next(renewal(0, 0.0))


def test_bootstrap_draws_rows_of_the_file_with_new_arrivals(rows):
    arrivals = open_workload(rows).draw(100, seed=2)
    lengths = {(arrival.label, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals}
    assert lengths == {("text", 791, 532), ("search", 16744, 540), ("text", 20, 3)}
    times = renewal(2, 2 / 6)  # two gaps in six seconds
    assert [arrival.time for arrival in arrivals] == [next(times) for _ in range(100)]
    assert {arrival.slo for arrival in arrivals} == {SLO(0.25, 0.1), SLO(4.0, 0.2)}


def test_a_recorded_trace_is_itself_whatever_the_seed(rows):
    arrivals = open_workload(rows).draw(2, seed=9, cv=RECORDED)
    assert [(a.time, a.label, a.prompt_tokens) for a in arrivals] == [(0.0, "text", 791), (2.0, "search", 16744)]
    assert len(open_workload(rows).draw(50, cv=RECORDED)) == 3


def test_requests_without_a_type_get_the_one_asked_for(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_len,output_len\n10,20\n")
    source = open_workload(str(path), slo_class="file", slos={"file": SLO(ttft=9.0)})
    [arrival] = source.draw(1)
    assert (arrival.label, arrival.slo, source.rate) == ("file", SLO(ttft=9.0), 1.0)
    assert {a.label for a in open_workload("sharegpt", slo_class="sharegpt").draw(5)} == {"sharegpt"}
    assert open_workload("qwen", model="qwen2.5-14b").draw(1)[0].slo == SLO(0.4, 0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: open_workload("qwn"), "no workload 'qwn': neither a file nor one of qwen, qwen-long, arxiv"),
        (lambda rows: open_workload("azure", slo_class="video"), "type 'video' is none of text, image, search, file"),
        (lambda rows: open_workload("qwen", slo_class="file"), "qwen has types of its own, text, image, search, file"),
        (lambda rows: qwen(3, cv=RECORDED), "qwen is a generator and has no recorded arrivals"),
        (
            lambda rows: open_workload("azure", slos={"search": SLO(1.0)}),
            "--slo search: azure has no requests of that type; it has text",
        ),
        (lambda rows: open_workload(rows, slos={"video": SLO(1.0)}), "--slo video: .* has no requests of that type"),
        (lambda rows: open_workload(rows, slo_class="file"), "has types of its own, text, search: --slo-class is for"),
        (lambda rows: parse_process("gamma=1e9"), "'gamma=1e9' are none of .* at most 100"),
        (lambda rows: parse_process("gamma=0"), "'gamma=0' are none of poisson, gamma=CV"),
        (lambda rows: parse_process("burst"), "'burst' are none of poisson"),
    ],
)
def test_what_cannot_be_drawn_is_named(rows, wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(rows)


def test_lengths_without_times_cannot_be_replayed(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_len,output_len\n10,20\n")
    with pytest.raises(ValueError, match=r"lengths.csv has lengths and no times: use poisson or gamma=CV"):
        open_workload(str(path)).draw(1, cv=RECORDED)


def test_arrival_processes_by_name():
    assert [parse_process(text) for text in ("poisson", "gamma=2.5", "recorded")] == [1.0, 2.5, None]


# The command


def test_the_command_tells_and_draws(rows, tmp_path, capsys):
    picture = tmp_path / "new" / "figure1.png"
    workload.main([rows, "--rate", "2", "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line}
    assert lines["search"][1:3] == ["1", "33.3%"]
    assert lines["text"][1:3] == ["2", "66.7%"]
    assert "1.0 s of arrivals, 2 a second" in printed  # two gaps


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["qwen", "--rate", "0"], "argument --rate: must be above 0, got 0"),
        (["qwen", "--requests", "0"], "argument --requests: must be at least 1, got 0"),
        (["qwen", "--arrivals", "recorded"], "qwen is a generator and has no recorded arrivals"),
        (["qwen", "--slo", "text"], "argument --slo: 'text' is not of the form"),
        (["missing.csv"], "no workload 'missing.csv'"),
        (["bad.csv"], "bad.csv, line 3, prompt_len: -5 is not a number of tokens, at least 1"),
    ],
)
def test_the_command_tells_what_is_wrong_in_one_line_and_writes_nothing(
    arguments, error, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("prompt_len,output_len\n5,5\n-5,5\n")
    with pytest.raises(SystemExit) as exit:
        workload.main([*arguments, "--plot", "figure1.png"])
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.err.startswith(f"workload: error: {error}")
    assert printed.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    with pytest.raises(SystemExit):
        (tmp_path / "a.png").mkdir()
        workload.main(["qwen", "--plot", str(tmp_path / "a.png")])
    printed = capsys.readouterr()
    assert f"workload: error: {tmp_path}/a.png: is a directory, not a file to write" in printed.err
    assert printed.out == ""
