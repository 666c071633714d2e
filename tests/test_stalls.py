"""Decodes never stall where prefills share their passes: between two tokens of a request lies one iteration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.lab import Lab
from engine.timeline import Event, Kind
from models.load import load_model
from scheduling.presets import preset
from scheduling.request import SLO, Sampling

STALL_FREE = ["sarathi", "vllm-cp2k", "layered", "layered-chunked", "layered-s-edf"]


def passes_between_tokens(events: Sequence[Event]) -> list[int]:
    """How many passes were started between each two tokens of one request, all requests together."""
    between: list[int] = []
    started = 0
    before: dict[int, int] = {}  # request -> passes started when it had its latest token
    for event in events:
        if event.kind is Kind.STARTED:
            started += 1
        elif event.kind in (Kind.FIRST_TOKEN, Kind.TOKEN) and event.request is not None:
            if event.kind is Kind.TOKEN:
                between.append(started - before[event.request.id])
            before[event.request.id] = started
    return between


@pytest.mark.parametrize("name", STALL_FREE)
@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(1, 60), st.integers(1000, 3000)),  # prompt tokens
            st.floats(0, 8),  # arrival
            st.integers(2, 30),  # output tokens
            st.sampled_from([0.5, 5.0, None]),  # TTFT target
        ),
        min_size=2,
        max_size=12,
    )
)
def test_on_the_virtual_clock(name: str, requests: list[tuple[int, float, int, float | None]]) -> None:
    with Lab(name, config=EngineConfig(num_blocks=4096)) as lab:
        for tokens, time, outputs, ttft in requests:
            lab.submit_at(time, tokens=tokens, sampling=Sampling(max_tokens=outputs), slo=SLO(ttft=ttft))
        lab.run()
        between = passes_between_tokens(lab.events)
        assert len(between) == sum(outputs - 1 for _, _, outputs, _ in requests)
        assert set(between) == {1}
        # In seconds: no gap is longer than the longest pass, which had the decode in it.
        started = {e.drive: e.time for e in lab.events if e.kind is Kind.STARTED}
        longest = max(e.time - started[e.drive] for e in lab.events if e.kind is Kind.COMPLETED)
        latest: dict[int, float] = {}
        for event in lab.events:
            if event.kind in (Kind.FIRST_TOKEN, Kind.TOKEN) and event.request is not None:
                assert event.time - latest.get(event.request.id, event.time) <= longest + 1e-9
                latest[event.request.id] = event.time


def test_whole_prompts_stall_decodes_where_prefills_go_first() -> None:
    """So the count above can fail."""
    with Lab("prefill-first") as lab:
        lab.submit(tokens=4, sampling=Sampling(max_tokens=20))
        lab.step_until("token")
        for _ in range(3):
            lab.submit(tokens=3000)
        lab.run()
        assert max(passes_between_tokens(lab.events)) > 1


@pytest.mark.parametrize("name", STALL_FREE)
def test_live_on_a_mixture_of_experts(name: str) -> None:
    events: list[Event] = []

    async def serve() -> None:
        engine = Engine(load_model("toy-moe"), EngineConfig(system=preset(name), num_blocks=1024, prefill_threads=1))
        engine.timeline.add(events.append)
        await engine.start()
        prompts = [8 + i for i in range(4)] + [700, 20, 600]
        requests = []
        for number, tokens in enumerate(prompts):
            sampling = Sampling(max_tokens=12 + number, ignore_eos=True)
            requests.append(engine.submit([1 + i % 250 for i in range(tokens)], sampling=sampling))
            await asyncio.sleep(0.01)
        for request in requests:
            async for _ in engine.stream(request):
                pass
        await engine.stop()

    asyncio.run(serve())
    between = passes_between_tokens(events)
    assert len(between) == sum(11 + number for number in range(7))
    assert set(between) == {1}
    assert any(event.data.get("phase") == "both" for event in events)
