"""The engine by hand: submit, step until something happens, look. No threads, no waiting, same result every time.

lab = Lab("flowprefill")
long = lab.submit(tokens=1000, slo=SLO(ttft=10.0))
lab.step_until("started")
short = lab.submit(tokens=10, slo=SLO(ttft=0.5))
lab.step_until("parked")           # the long prefill has pulled over
lab.run()                          # until nothing is left to do
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import Executor, Forwards
from engine.fake import FakeModel
from engine.forward import LanguageModel
from engine.output import LiveRequest
from engine.stepping import SteppingExecutor
from engine.timeline import Event, Kind
from engine.virtual import Stalled, VirtualLoop
from scheduling.predictor import Predictor
from scheduling.presets import System, preset
from scheduling.request import SLO, Sampling


class Lab:
    """An engine on virtual time. Every operator takes `per_operator + per_token * rows` seconds, and the predictor
    knows it. `events` is all that has happened, in order."""

    def __init__(
        self,
        system: str | System = "flowprefill",
        *,
        model: LanguageModel | None = None,
        decode_model: LanguageModel | None = None,
        config: EngineConfig | None = None,
        per_operator: float = 0.0001,
        per_token: float = 0.0001,
    ) -> None:
        self.model = model or FakeModel()
        operators = sum(len(self.model.layer_operators(i)) for i in range(self.model.config.num_layers))
        base = config or EngineConfig(num_blocks=1024)
        self.loop = VirtualLoop()
        self.engine = Engine(
            self.model,
            replace(
                base,
                system=preset(system) if isinstance(system, str) else system,
                predictor=Predictor(per_step=per_operator * operators, per_token=per_token * operators),
            ),
            decode_model=decode_model,
            clock=self.loop,
            make_executor=self._make_executor,
        )
        self._per_operator = per_operator
        self._per_token = per_token
        self.events: list[Event] = []
        self.engine.timeline.add(self.events.append)
        self.loop.run_until_complete(self.engine.start())

    def _make_executor(self, name: str, threads: int, forwards: Forwards) -> Executor:
        return SteppingExecutor(self.loop, forwards, lambda _, rows: self._per_operator + self._per_token * rows)

    @property
    def now(self) -> float:
        return self.loop.now()

    def submit(
        self,
        prompt: Sequence[int] | None = None,
        *,
        tokens: int = 1,
        slo: SLO | None = None,
        sampling: Sampling | None = None,
        label: str = "",
    ) -> LiveRequest:
        """Submit now a prompt, or one of `tokens` tokens."""
        prompt = list(prompt) if prompt is not None else [1 + i % 500 for i in range(tokens)]
        return self.engine.submit(prompt, slo=slo, sampling=sampling, label=label)

    def submit_at(self, time: float, **request: object) -> None:
        """Submit later, at `time` on the virtual clock."""
        self.loop.call_at(time, lambda: self.submit(**request))  # type: ignore[arg-type]

    def step_until(self, kind: str | Kind) -> Event:
        """Let time pass until the next event of this kind. RuntimeError if nothing is left that could cause one."""
        wanted = Kind(kind)
        seen = self.loop.create_future()

        def watch(event: Event) -> None:
            if event.kind == wanted and not seen.done():
                seen.set_result(event)

        self.engine.timeline.add(watch)
        try:
            event: Event = self.loop.run_until_complete(seen)
        except Stalled:
            raise RuntimeError(f"everything is done, and no {wanted} has come") from None
        finally:
            self.engine.timeline.remove(watch)
        return event

    def run(self, seconds: float | None = None) -> None:
        """Let `seconds` of virtual time pass; without a number, until nothing is left to do."""
        with contextlib.suppress(Stalled):
            self.loop.run_until_complete(self._pass(seconds))

    async def _pass(self, seconds: float | None) -> None:
        if seconds is None:
            await self.loop.create_future()  # never done: the loop stalls when all is quiet
        else:
            await asyncio.sleep(seconds)

    def outputs(self, request: LiveRequest) -> list[int]:
        """Tokens of the request's first choice so far."""
        return list(request.choices[0].tokens) if request.choices else []

    def check(self) -> None:
        """All books balance: raises kv.pool.IntegrityError if not."""
        for device in self.engine.devices:
            device.pool.check()

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.stop())
        self.loop.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
