"""The engine: prefill and decode instances, the proxy before them, and the life of every request from submit to end.

    engine = Engine(model, EngineConfig(system=preset("flowprefill")))
    await engine.start()
    request = engine.submit(prompt_ids, sampling=Sampling(max_tokens=64), slo=SLO(ttft=0.25, tbt=0.1))
    async for output in engine.stream(request): ...
    await engine.stop()

Every request ends with exactly one terminal event, whatever happens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from engine.admission import Limits
from engine.assembly import AnyInstance, Assembly, MakeExecutor
from engine.clock import Clock, LiveClock
from engine.colocated import ColocatedInstance
from engine.config import EngineConfig
from engine.decode import DecodeInstance
from engine.devices import Device
from engine.errors import EngineStopped, Refused, RequestFailed
from engine.executor import Executor, Forwards, ThreadExecutor
from engine.forward import LanguageModel
from engine.gaps import Stretches
from engine.output import Choice, Finish, LiveRequest, Output
from engine.prefill import PrefillInstance
from engine.prompt import Blank
from engine.proxy import Handover, Proxy
from engine.sampling import Sampled
from engine.timeline import Kind, Timeline
from kv.table import BlockTable
from scheduling.request import SLO, Request, Sampling, State


class Engine:
    """One engine serves one model. `decode_model` is the same model on another device, if decodes run there: K and V
    are then copied at hand-over. Call everything on the event loop's thread.

    `make_executor(name, threads, forwards)` is for tests and simulation; live it makes threads. So is `devices`: those
    of the prefill and of the decode instances, laid out already.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig | None = None,
        *,
        decode_model: LanguageModel | None = None,
        devices: Sequence[Device] | None = None,
        clock: Clock | None = None,
        make_executor: MakeExecutor | None = None,
    ) -> None:
        self.model = model
        self.config = config or EngineConfig()
        self.config.system.plan.groups(1, model.config.num_layers)  # ValueError where it needs more layers than these
        self.clock = clock or LiveClock()
        self.timeline = Timeline(self.clock.now)
        self.prefill: list[PrefillInstance | ColocatedInstance] = []  # those that take prefills
        self.decode: list[DecodeInstance | ColocatedInstance] = []  # those that take decodes
        self.error: str | None = None  # why the engine can serve no more, if a task of its own has crashed
        self._make_executor = make_executor or self._thread_executor
        self.devices = devices or Device.lay_out(model, decode_model, self.config)
        self.proxy = Proxy([], [])  # until `start`
        self._live: dict[int, LiveRequest] = {}
        self._ids = count()
        self._seeds = random.Random(self.config.seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._accepting = False
        self._limits = Limits.of(self.devices, self.config)
        self._eos = model.config.eos_token_ids

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._limits.max_model_len

    # Life of the engine

    async def start(self) -> None:
        """Make executors and instances, and begin to accept requests."""
        assembly = Assembly(self.config, self.devices, self.clock, self.timeline, self, self._make_executor)
        self.prefill, self.decode = assembly.instances()
        colocated = self.config.system.colocated
        self.proxy = Proxy(self.prefill, self.decode, colocated=colocated)
        self.proxy.on_wait = lambda request: self.timeline.record(Kind.HANDOVER_WAIT, request=request)
        self.proxy.on_admitted = self._on_admitted
        for each in self.instances:
            await each.executor.ready()
            task = asyncio.get_running_loop().create_task(each.run(self.clock), name=each.name)
            task.add_done_callback(self._on_task_done)
            self._tasks.append(task)
        self._accepting = True

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests; give those under way `drain_seconds` to finish, abort the rest, end the threads."""
        self._accepting = False
        give_up = self.clock.now() + drain_seconds
        while self._live and self.clock.now() < give_up:
            await asyncio.sleep(0.01)
        for request_id in list(self._live):
            self.abort(request_id)
        while not self.idle and self.error is None:
            await asyncio.sleep(0.001)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self.instances:
            await each.executor.close()

    @property
    def idle(self) -> bool:
        """No request is live, nothing runs or is parked, and all blocks are free."""
        return not self._live and self.proxy.idle and all(each.idle for each in self.instances)

    @property
    def instances(self) -> list[AnyInstance]:
        """Every instance once."""
        return list(dict.fromkeys([*self.prefill, *self.decode]))

    def _thread_executor(self, name: str, threads: int, forwards: Forwards) -> Executor:
        return ThreadExecutor(name, self.clock, forwards, threads=threads, run_ahead=self.config.run_ahead)

    @property
    def accepting(self) -> bool:
        return self._accepting and self.error is None

    # What clients call

    def submit(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling | None = None,
        slo: SLO | None = None,
        label: str = "",
        streamed: bool = True,
    ) -> LiveRequest:
        """Take a request in and stamp its arrival. Raises Refused if it can never be served, EngineStopped if none are
        taken any more. `max_tokens` is cut to what the context allows. Not `streamed`: nobody will read its outputs."""
        if not self.accepting:
            raise EngineStopped(self.error or "the engine is not running")
        sampling = sampling or Sampling()
        request = LiveRequest(
            next(self._ids),
            prompt if isinstance(prompt, Blank) else tuple(prompt),
            sampling,
            self.config.default_slo if slo is None else slo,
            arrival=self.clock.now(),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            label=label,
            outputs=asyncio.Queue() if streamed else None,
        )
        self.timeline.record(Kind.ARRIVED, request=request, time=request.arrival)
        self._live[request.id] = request
        if (why_not := self._limits.why_not(request.prompt, sampling)) is not None:
            self._end(request, State.REFUSED, Kind.REFUSED, error=why_not)
            raise Refused(why_not)
        room = self.max_model_len - len(request.prompt)
        if sampling.max_tokens > room:
            request.sampling = replace(sampling, max_tokens=room)
        self.proxy.submit(request)
        return request

    async def stream(self, request: LiveRequest) -> AsyncIterator[Output]:
        """The request's outputs as they come. Raises RequestFailed or Refused if that is how it ended."""
        if request.outputs is None:
            raise ValueError(f"request {request.id} was submitted as not streamed: it has no outputs")
        while (output := await request.outputs.get()) is not None:
            if isinstance(output, Exception):
                raise output
            yield output

    def abort(self, request_id: int) -> bool:
        """End a request, whatever its state. False if there is no such live request: aborting twice does no harm."""
        request = self._live.get(request_id)
        if request is None:
            return False
        finished = {choice.index for choice in request.choices if choice.finish is not None}
        for index in range(request.sampling.n):
            if index not in finished:
                request.tell(Output(index, finish="abort"))
        self._end(request, State.ABORTED, Kind.ABORTED)
        return True

    def stop_choice(self, request: LiveRequest, index: int) -> None:
        """A stop string was seen in the text of this choice: it has finished, and its further tokens are dropped."""
        if request.state.terminal:
            return
        choice = request.choices[index]
        if choice.finish is None:
            choice.finish = "stop"
            self._finish_if_complete(request, from_outside=True)

    # What instances report

    def on_prefilled(self, request: Request, table: BlockTable, sampled: Sequence[Sampled], time: float) -> None:
        """The prompt is in the cache: deliver the first tokens, and find a decode instance for what goes on.

        After a recompute the choices have their tokens already, and nothing was sampled.
        """
        live = self._live[request.id]
        if not live.choices:
            live.choices = [Choice(live, index, token_at=time) for index in range(live.sampling.n)]
            self.timeline.record(Kind.FIRST_TOKEN, request=request, time=time)
            for choice, token in zip(live.choices, sampled, strict=True):
                self._take(choice, token)
        going_on = [choice for choice in live.choices if choice.finish is None]
        if going_on:
            self.proxy.hand_over(Handover(live, table, self.devices[0].cache, going_on))
        else:
            table.free()
            self._finish_if_complete(live)

    def _on_admitted(self, request: Request, instance: str) -> None:
        request.state = State.DECODING
        self.timeline.record(Kind.DECODING, request=request, instance=instance)

    def on_token(self, choice: Choice, sampled: Sampled, time: float) -> None:
        self.timeline.record(Kind.TOKEN, request=choice.request, time=time, index=choice.index)
        self._take(choice, sampled)
        self._finish_if_complete(self._live[choice.request.id])

    def on_tokens(self, choice: Choice, count: int, stretches: Stretches) -> None:
        """The last `count` tokens of a choice, from a simulation: all of them 0."""
        live = self._live[choice.request.id]
        self.timeline.record(Kind.TOKENS, request=live, index=choice.index, count=count, stretches=stretches)
        choice.tokens.extend([0] * count)
        choice.finish = "length"
        if live.outputs is not None:
            for left in reversed(range(count)):
                live.tell(Output(choice.index, 0, finish=None if left else choice.finish))
        self._finish_if_complete(live)

    def _take(self, choice: Choice, sampled: Sampled) -> None:
        """Append one token, decide whether it was the last, and send it to the client."""
        request = choice.request
        choice.tokens.append(sampled.token)
        if sampled.token in self._eos and not request.sampling.ignore_eos:
            choice.finish = "stop"
        elif len(choice.tokens) >= request.sampling.max_tokens:
            choice.finish = "length"
        self._live[request.id].tell(Output(choice.index, sampled.token, sampled.logprob, sampled.top, choice.finish))

    def on_refused(self, request: Request, error: str) -> None:
        self._end(self._live[request.id], State.REFUSED, Kind.REFUSED, error=error)

    def on_failed(self, request: Request, error: str) -> None:
        live = self._live.get(request.id)
        if live is not None:
            self._end(live, State.FAILED, Kind.FAILED, error=error)

    # Ends

    def _finish_if_complete(self, request: LiveRequest, *, from_outside: bool = False) -> None:
        if all(choice.finish is not None for choice in request.choices):
            reasons: list[Finish | None] = [choice.finish for choice in request.choices]
            reason = "length" if "length" in reasons else "stop"
            self._end(request, State.FINISHED, Kind.FINISHED, reason=reason, from_outside=from_outside)

    def _end(self, request: LiveRequest, state: State, kind: Kind, *, from_outside: bool = True, **data: Any) -> None:
        """The one place where a request ends."""
        del self._live[request.id]
        request.state = state
        self.timeline.record(kind, request=request, **data)
        if from_outside:
            self.proxy.release(request)
        else:
            self.proxy.forget(request)
        end: Exception | None = None
        if state == State.FAILED:
            end = RequestFailed(data["error"].splitlines()[-1])  # the timeline has the whole traceback
        elif state == State.REFUSED:
            end = Refused(data["error"])
        request.tell(end)
        if request.outputs is None:
            request.choices = []  # nobody looks at them any more, and they point back

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """An instance's own task has ended: by `stop`, or by a bug, and then nobody may wait for ever."""
        if task.cancelled() or task.exception() is None:
            return
        self.error = f"{task.get_name()} has crashed: {task.exception()!r}"
        for request in list(self._live.values()):
            self._end(request, State.FAILED, Kind.FAILED, error=self.error)
        asyncio.get_running_loop().call_exception_handler(
            {"message": self.error, "exception": task.exception(), "task": task}
        )
