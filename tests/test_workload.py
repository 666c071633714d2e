"""The generator against the figures of the real trace, and common random numbers across scales."""

from itertools import pairwise
from statistics import mean, pstdev

import pytest

from examples.workload import BASE_RATE, QWENTRACE, SLOS, bootstrap, qwentrace, scaled

# From the recovered trace: share, prompt mean, p50, p90, longest, output p50. Means and medians within tolerance.
TRACE = {
    "text": (0.691, 646, 744, 1118, 4613, 276),
    "image": (0.073, 393, 372, 394, 930, 70),
    "search": (0.202, 5055, 4378, 8066, 16744, 350),
    "file": (0.034, 4132, 3210, 9116, 10720, 701),
}


@pytest.fixture(scope="module")
def many():
    return qwentrace(20_000, seed=1)


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
    assert mine[0].slo is SLOS[label]
    if label != "file":  # eleven rows: its quantiles are not known to any accuracy
        assert prompts[len(prompts) // 2] == pytest.approx(prompt_p50, rel=0.1)
        assert prompts[len(prompts) * 9 // 10] == pytest.approx(prompt_p90, rel=0.1)


def test_arrivals_are_poisson_at_the_base_rate(many):
    gaps = [after.time - before.time for before, after in pairwise(many)]
    assert many[0].time == 0.0
    assert mean(gaps) == pytest.approx(1 / BASE_RATE, rel=0.03)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(1.0, abs=0.05)


def test_same_seed_same_work_other_seed_other_work():
    assert qwentrace(50, seed=7) == qwentrace(50, seed=7)
    assert qwentrace(50, seed=7) != qwentrace(50, seed=8)
    assert qwentrace(50, seed=7)[3].prompt(1000) == qwentrace(50, seed=7)[3].prompt(1000)


def test_a_longer_run_begins_with_the_shorter_one():
    assert qwentrace(100, seed=3)[:40] == qwentrace(40, seed=3)


def test_another_rate_stretches_time_and_nothing_else():
    slow, fast = qwentrace(50, rate=1.0), qwentrace(50, rate=4.0)
    assert [a.time for a in slow] == pytest.approx([4 * a.time for a in fast])
    assert [(a.label, a.prompt_tokens, a.output_tokens) for a in slow] == [
        (a.label, a.prompt_tokens, a.output_tokens) for a in fast
    ]


def test_prompts_are_token_ids_of_the_right_length_and_differ():
    arrivals = qwentrace(30)
    prompts = [arrival.prompt(256) for arrival in arrivals]
    assert [len(prompt) for prompt in prompts] == [arrival.prompt_tokens for arrival in arrivals]
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 30


def test_scaling():
    arrivals = qwentrace(200)
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
        scaled(qwentrace(1), slo=0)
    with pytest.raises(ValueError, match="rate must be above 0 requests per second, got -1"):
        qwentrace(1, rate=-1)


def test_bootstrap_draws_rows_of_the_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("idx,type,prompt_len,output_len\n0,text,791,532\n1,search,16744,540\n")
    arrivals = bootstrap(path, 100, seed=2)
    lengths = {(arrival.label, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals}
    assert lengths == {("text", 791, 532), ("search", 16744, 540)}
    assert [a.time for a in arrivals] == [a.time for a in qwentrace(100, seed=2)]  # the same arrivals
    assert arrivals[0].slo is SLOS[arrivals[0].label]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type,prompt_len\ntext,5\n", "no column output_len"),
        ("type,prompt_len,output_len\n", "no rows"),
        ("type,prompt_len,output_len\nvideo,5,5\n", "line 2: type 'video' is none of text, image, search, file"),
        ("type,prompt_len,output_len\ntext,5,5\ntext,many,5\n", "line 3: prompt_len and output_len must be whole"),
        ("type,prompt_len,output_len\ntext,0,5\n", "line 2: prompt_len and output_len must be at least 1, got 0, 5"),
    ],
)
def test_bootstrap_names_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        bootstrap(path, 10)
