"""Explanations: the decisions of a hand-made case, that watching changes nothing, and the reasons in words."""

from pathlib import Path

import pytest

from engine.simulation import Deployment, simulate
from examples import explain
from examples.arrivals import Arrival
from examples.backends import simulated_arrival
from examples.decisions import Decisions
from examples.experiment import variant
from examples.reasons import priority
from examples.workload import RECORDED, open_workload
from scheduling.order import DEDF, EDF, FCFS, SEDF, Candidate
from scheduling.presets import PRESETS
from scheduling.request import SLO, Request

THREE = Path(explain.__file__).with_name("three.csv")
DEPLOYMENT = Deployment()


def explained(system, arrivals=None):
    arrivals = arrivals or open_workload(str(THREE)).draw(3, cv=RECORDED)
    return explain.explain(variant(system), arrivals, DEPLOYMENT)


def told(run):
    """(causes, action, members as letters) of each decision."""
    name = explain.letter_of(len(run.history.requests))
    return [(" + ".join(c.causes), c.action, "".join(map(name, c.members))) for c in run.choices]


def test_three_requests_decision_by_decision():
    run = explained("flowprefill")
    assert [(cause.split(",")[0], action, members) for cause, action, members in told(run)] == [
        ("A arrives", "start", "A"),
        ("B arrives", "park", "A"),
        ("C arrives", "nothing", ""),
        ("A has pulled over", "start", "BC"),
        ("B and C completed", "resume", "A"),
    ]
    start, park, wait, batch, resume = (choice.why for choice in run.choices)
    assert start == "start A: nobody else is there"
    assert park == "ask A to pull over: B is due before A (0.570 s, 6.000 s)"
    assert wait == "wait: A is pulling over, and its reply brings the next decision"
    assert "C joined: 1,100 tokens together" in batch
    assert resume == "resume A where it stopped: nobody else is there"


def test_contenders_have_their_figures():
    run = explained("flowprefill")
    first, second = run.choices[1].contenders
    assert (first.state, second.state) == ("waiting", "running")
    assert (first.request.label, first.tokens) == ("text", 700)
    assert first.slack == pytest.approx(0.570 - 0.320 - first.remaining)
    assert first.priority == pytest.approx(1 / 0.570)
    assert second.priority == pytest.approx(1 / 6.0)
    assert second.slack == pytest.approx(6.0 - 0.320 - second.remaining)
    parked = run.choices[3].contenders[-1]
    assert parked.state == "parked"
    assert parked.remaining < second.remaining
    assert run.choices[2].contenders[-1].state == "pulling over"


def test_first_come_first_served_makes_the_short_ones_late():
    run = explained("distserve")
    assert [action for _, action, _ in told(run)] == ["start", "nothing", "nothing", "start"]
    assert run.choices[1].why == "A runs on: A came before B"
    assert run.choices[1].contenders[0].priority is None
    late = {
        run.history.requests[id].label
        for id, t in run.history.first_tokens.items()
        if t > run.history.requests[id].deadline
    }
    assert late == {"text", "image"}


@pytest.mark.parametrize("system", [*PRESETS, "flowprefill order=sjf", "distserve-cp2k order=s-edf"])
def test_watching_changes_nothing(system):
    arrivals = [simulated_arrival(a) for a in open_workload("qwen").draw(40, seed=3)]
    system = variant(system).system
    plain = simulate(system, arrivals, DEPLOYMENT)
    decisions = Decisions(explain.letter_of(40))
    watched = simulate(system, arrivals, DEPLOYMENT, on_start=decisions.watch)
    assert watched.rows == plain.rows
    assert all(choice.why for choice in decisions.choices)
    started = {member.id for choice in decisions.choices if choice.action == "start" for member in choice.members}
    assert started == set(range(40))


def arrival(index, time, tokens, ttft):
    return Arrival(index, time, "text", tokens, 2, SLO(ttft=ttft))


@pytest.mark.parametrize(
    ("system", "arrivals", "reason"),
    [
        # B cannot make it any more when A completes; C, due later, still can.
        ("distserve order=s-edf", [(0.0, 8000, 9.0), (0.1, 500, 0.2), (0.2, 500, 5.0)],
         "start C with B: C can still be in time (slack +4"),
        ("flowprefill", [(0.0, 8000, 9.0), (0.1, 500, 0.3), (0.1001, 4000, 5.0)],
         "C waits: 4,500 tokens are over the budget of 4,096"),
        ("flowprefill", [(0.0, 8000, 9.0), (0.1, 500, 0.065), (0.1001, 3000, 5.0)],
         "C waits: together they would take 0.2"),
        ("distserve order=s-edf", [(0.0, 8000, 9.0), (0.1, 500, 0.3)],
         "A runs on: B ranks higher, but no prefill is stopped inside (preempt=never)"),
        ("flowprefill batch=alone", [(0.0, 8000, 9.0), (0.1, 500, 0.3), (0.1001, 500, 0.4)],
         "C waits: requests run alone"),
        ("flowprefill", [(0.0, 8000, 9.0), (0.1, 5000, 0.5), (0.1, 5000, 0.5)],
         "start B: B and C are due at the same moment, and B came first"),
        ("flowprefill order=sjf", [(0.0, 8000, 9.0), (0.1, 500, 9.0)],
         "ask A to pull over: B has less left (0.0"),
        ("flowprefill", [(0.0, 8000, 0.1), (0.1, 9000, 0.2)],
         "ask A to pull over: both are late, and with late=published B (0.300 s) goes before A (0.100 s)"),
    ],
)  # fmt: skip
def test_reasons(system, arrivals, reason):
    run = explained(system, [arrival(index, *each) for index, each in enumerate(arrivals)])
    assert any(reason in choice.why for choice in run.choices), [choice.why for choice in run.choices]


def test_priority_is_signed_as_the_order_sees_it():
    request = Request(0, range(10), slo=SLO(ttft=2.0), arrival=0.0)
    hopeless = Candidate(request, remaining=1.5)
    assert priority(SEDF(), hopeless, now=1.0) == -0.5  # no slack left
    assert priority(DEDF(), hopeless, now=1.0) == 0.5  # its deadline has not passed
    assert priority(DEDF(), hopeless, now=2.5) == -0.5
    assert priority(EDF(), hopeless, now=2.5) == 0.5
    assert priority(FCFS(), hopeless, now=1.0) is None
    assert priority(SEDF(), Candidate(Request(1, range(10)), 1.0), now=1.0) is None  # best effort


# The command


def test_the_command_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "explain.png"
    explain.main([str(THREE), "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "flowprefill, 3 requests:" in printed
    assert "2. 0.320 s: B arrives" in printed
    assert "> A     running             12,000" in printed
    assert "First tokens: A at " in printed
    assert "(late)" not in printed


def test_any_workload_can_be_explained_and_is_cut_short(tmp_path, capsys):
    arguments = ["qwen", "--requests", "30", "--rate", "9", "--decisions", "3", "--systems", "flowprefill"]
    explain.main([*arguments, "--plot", str(tmp_path / "a.png")])
    printed = capsys.readouterr().out
    assert "#29" in printed
    assert "more decisions (--decisions shows more)" in printed
    assert "4. " not in printed


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([str(THREE), "--systems", "nope"], "no system called 'nope'"),
        ([str(THREE), "--systems", "flowprefill preempt=often"], "preempt=often"),
        ([str(THREE), "--rate", "0"], "argument --rate: must be above 0, got 0"),
        (["equal.csv"], "equal.csv, line 3, time: the same as in the line above"),
        ([str(THREE), "--device", "abacus"], "no device called 'abacus'"),
    ],
)
def test_refusals(arguments, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "equal.csv").write_text("time,prompt,output,slo\n0,5,5,1\n0,5,5,1\n")
    with pytest.raises(SystemExit) as exit:
        explain.main([*arguments, "--plot", "a.png"])
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert error in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "a.png").exists()
