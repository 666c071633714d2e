"""Open-loop replay: every request is submitted when it is due, however far behind the engine may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.engine import Engine
from engine.errors import Refused, RequestFailed
from examples.arrivals import Arrival
from scheduling.request import Sampling


async def replay(engine: Engine, arrivals: Sequence[Arrival], *, drain_seconds: float) -> None:
    """Submit `arrivals` at their times from now on and read their streams to the end.

    What is unfinished `drain_seconds` after the last arrival is aborted. How it all went is told by the engine's
    Timeline; nothing is measured here.
    """
    vocab_size = engine.model.config.vocab_size
    prompts = [arrival.prompt(vocab_size) for arrival in arrivals]  # made before the clock starts
    began = engine.clock.now()

    async def one(arrival: Arrival, prompt: list[int]) -> None:
        await asyncio.sleep(max(0.0, began + arrival.time - engine.clock.now()))
        sampling = Sampling(max_tokens=arrival.output_tokens, ignore_eos=True)
        try:
            request = engine.submit(prompt, sampling=sampling, slo=arrival.slo, label=arrival.label)
        except Refused:
            return  # on the Timeline as a miss
        try:
            async for _ in engine.stream(request):
                pass
        except (Refused, RequestFailed):
            pass  # likewise
        except asyncio.CancelledError:
            engine.abort(request.id)

    tasks = [asyncio.create_task(one(arrival, prompt)) for arrival, prompt in zip(arrivals, prompts, strict=True)]
    last = max((arrival.time for arrival in arrivals), default=0.0)
    _, late = await asyncio.wait(tasks, timeout=last + drain_seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=False)
