"""Co-located systems on real threads and real time give what they give on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeModel
from engine.timeline import Event, Kind
from scheduling.placement import Disaggregated, Piggyback
from scheduling.presets import PRESETS, preset
from scheduling.request import SLO, Sampling

COLOCATED = [name for name, system in PRESETS.items() if not isinstance(system.placement, Disaggregated)]


@pytest.mark.parametrize("name", COLOCATED)
def test_long_prompts_come_in_while_others_decode(name: str) -> None:
    """Everyone gets their tokens. And piggybacked decodes never stall: in every pass that has begun since their last
    token they are, so that a gap is one pass long, whatever a pass takes."""
    events: list[Event] = []

    async def live() -> None:
        engine = Engine(
            FakeModel(num_layers=6), EngineConfig(system=preset(name), num_blocks=800, default_slo=SLO(9, 1))
        )
        engine.timeline.add(events.append)
        await engine.start()

        async def client(tokens: int, new: int) -> list[int]:
            prompt = [1 + i % 500 for i in range(tokens)]
            request = engine.submit(prompt, sampling=Sampling(max_tokens=new))
            got = [output.token async for output in engine.stream(request)]
            assert got == list(range(prompt[-1] + 1, prompt[-1] + 1 + new))
            return got

        decoding = asyncio.create_task(client(8, 150))
        while not any(event.kind == Kind.TOKEN for event in events):
            await asyncio.sleep(0.001)
        for _ in range(2):
            await asyncio.gather(*(client(tokens, 3) for tokens in (1700, 5, 900)))
        await decoding
        await engine.stop()
        assert engine.idle
        for instance in engine.instances:
            instance.quota.pool.check()
            assert instance.quota.used == 0

    asyncio.run(asyncio.wait_for(live(), 60))
    if isinstance(preset(name).placement, Piggyback):
        first = next(event for event in events if event.kind == Kind.FIRST_TOKEN)
        ended = next(event for event in events if event.kind == Kind.FINISHED and event.request is first.request)
        life = events[events.index(first) : events.index(ended)]
        passes = [event.data["requests"] for event in life if event.kind == Kind.STARTED]
        assert first.request is not None and len(passes) == 149
        assert all(first.request.id in requests for requests in passes)
