"""Whole deployments in virtual time: deterministic, within their memory, honest about what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from random import Random

import pytest

from engine.engine import Engine
from engine.hardware import DEVICES
from engine.metrics import RequestRows, Row
from engine.simulation import Arrival, Deployment, simulate
from engine.timeline import Event, Kind
from models.architectures import ARCHITECTURES
from models.costs import model_costs
from scheduling.presets import PRESETS, preset
from scheduling.request import SLO


def arrivals(n: int, *, rate: float = 4.0, seed: int = 0) -> list[Arrival]:
    random, time, made = Random(seed), 0.0, []
    for _ in range(n):
        time += random.expovariate(rate)
        tokens = random.choice((60, 400, 800, 5000))
        slo = SLO(ttft=0.25 if tokens < 1000 else 4.0, tbt=0.1)
        made.append(Arrival(time, tokens, random.randint(1, 300), "search" if tokens > 1000 else "text", slo))
    return made


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], default=str)


@pytest.mark.parametrize("system", PRESETS)
def test_the_same_arrivals_give_the_same_bytes(system: str) -> None:
    def run() -> str:
        return as_json(simulate(preset(system), arrivals(60), Deployment()).rows)

    assert run() == run()


@pytest.mark.parametrize(
    "deployment",
    [
        Deployment(),
        Deployment(prefill_instances=2, decode_instances=2),
        Deployment("qwen2.5-14b", "a100-80g", tp=2),
        Deployment("llama3-70b", "a800-80g", tp=4, decode_instances=2),
        Deployment("qwen3-8b", "h200"),
        Deployment(max_batch=8),
    ],
    ids=["1P1D", "2P2D", "14B TP2", "70B TP4", "H200", "small batch"],
)
def test_every_request_gets_all_its_tokens_in_order(deployment: Deployment) -> None:
    wanted = arrivals(80)
    rows = sorted(simulate(preset("flowprefill"), wanted, deployment).rows, key=lambda row: row.id)
    assert [row.finish for row in rows] == [Kind.FINISHED] * 80
    for row, arrival in zip(rows, wanted, strict=True):
        assert row.arrival == arrival.time and row.label == arrival.label
        assert (row.prompt_tokens, row.output_tokens) == (arrival.prompt_tokens, arrival.output_tokens)
        assert row.first_token is not None and row.ended is not None
        assert row.arrival < row.first_token <= row.ended
        if row.output_tokens > 1:
            assert row.tbt_mean is not None and row.tbt_max is not None
            gaps = row.output_tokens - 1
            assert row.ended - row.first_token == pytest.approx(row.tbt_mean * gaps)
            assert row.tbt_mean <= row.tbt_max


def test_more_instances_and_faster_devices_serve_sooner() -> None:
    def mean_ttft(**change: object) -> float:
        rows = simulate(preset("distserve"), arrivals(150, rate=6), replace(Deployment(), **change)).rows  # type: ignore[arg-type]
        return sum(row.ttft or 0.0 for row in rows) / len(rows)

    one = mean_ttft()
    assert mean_ttft(prefill_instances=2) < one / 2
    assert mean_ttft(hardware="h100-80g") < one / 2


def test_a_lone_prefill_takes_what_its_operators_take_and_tokens_come_step_by_step() -> None:
    seen: list[Event] = []
    deployment = Deployment()
    (row,) = simulate(preset("flowprefill"), [Arrival(1.0, 746, 11)], deployment, sinks=[seen.append]).rows
    assert row.first_token == pytest.approx(1.060, abs=0.001)  # 746 tokens on A800 are measured at 60 ms
    kv = 746 * 128 * 1024
    hand_over = DEVICES["a800-80g"].transfer(kv)
    assert row.ended is not None and row.first_token is not None
    step = (row.ended - row.first_token - hand_over) / 10
    assert row.tbt_p99 == pytest.approx(step + hand_over, rel=0.01)
    weights = model_costs(ARCHITECTURES["llama3-8b"]).weight_bytes
    assert step > weights / 2.039e12  # no decode step is faster than the reading of all weights
    assert [e.kind for e in seen if e.instance == "decode-0"].count(Kind.STARTED) == 1  # ten steps in one go


def test_the_kv_pool_is_what_the_weights_leave() -> None:
    assert Deployment().kv_blocks * 256 == pytest.approx((0.9 * 80e9 - 16.06e9 - 2e9) / (128 * 1024), rel=0.001)
    on_two = Deployment(tp=2)
    assert on_two.kv_blocks > 2 * Deployment().kv_blocks
    with pytest.raises(ValueError, match=r"llama3-70b with tp 1 leaves no memory .* weights take 141\.1 of 80\.0 GB"):
        simulate(preset("flowprefill"), [], Deployment("llama3-70b"))


def test_a_small_pool_makes_requests_wait_and_loses_none() -> None:
    books: list[Engine] = []
    tight = Deployment(memory_share=0.25)  # room for two long prompts on each side
    rows = simulate(preset("distserve"), arrivals(60), tight, on_start=books.append).rows
    assert len(rows) == 60 and all(row.finish is Kind.FINISHED for row in rows)
    (engine,) = books
    for device in engine.devices:
        device.pool.check()
        assert all(quota.used == 0 for quota in device.pool.quotas.values())


def test_what_can_never_be_served_is_refused_and_a_miss() -> None:
    rows = simulate(
        preset("flowprefill"), [Arrival(0.0, 200_000, 5, slo=SLO(ttft=9)), Arrival(1.0, 5, 5)], Deployment()
    )
    assert [row.finish for row in rows.rows] == [Kind.REFUSED, Kind.FINISHED]
    assert rows.results().total.ttft_attainment == 0.0


def test_rows_can_be_handed_on_instead_of_kept() -> None:
    seen: list[int] = []
    rows = RequestRows(lambda row: seen.append(row.id))
    assert simulate(preset("flowprefill"), arrivals(30), Deployment(), rows=rows) is rows
    assert sorted(seen) == list(range(30)) and rows.rows == rows.unfinished == []


def test_arrivals_are_taken_one_by_one_and_must_be_in_order() -> None:
    late = [Arrival(0.0, 10, 1), Arrival(2.0, 10, 1), Arrival(1.0, 10, 1)]
    with pytest.raises(ValueError, match=r"one at 1\.0 s follows one at 2\.0 s"):
        simulate(preset("flowprefill"), late, Deployment())
    with pytest.raises(ValueError, match="at least 1, got 0 and 4"):
        Arrival(0.0, 0, 4)
    with pytest.raises(ValueError, match="0 seconds or more, got -1"):
        Arrival(-1.0, 1, 4)
    assert simulate(preset("flowprefill"), iter([]), Deployment()).rows == []


def test_a_bug_in_a_sink_is_not_swallowed() -> None:
    def broken(event: Event) -> None:
        if event.kind is Kind.FIRST_TOKEN:
            raise ZeroDivisionError("a sink's own")

    with pytest.raises(ZeroDivisionError, match="a sink's own"):
        simulate(preset("flowprefill"), arrivals(3), Deployment(), sinks=[broken])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"prefill_instances": 0}, "prefill_instances must be at least 1, got 0"),
        ({"memory_share": 1.5}, r"memory_share must be above 0 and at most 1, got 1\.5"),
    ],
)
def test_impossible_deployments_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deployment(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no device called 'abacus'"):
        _ = Deployment(hardware="abacus").device
