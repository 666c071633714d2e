"""One API call on its way: its requests to the engine, and the text of every choice as it comes.

A call has one request per prompt and n choices per request; choice `index` counts through them as OpenAI does: prompt 0
has 0..n-1, prompt 1 has n..2n-1. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.errors import EngineStopped
from engine.output import Finish, Output
from engine.text import TextCodec, TextStream
from scheduling.request import SLO, Sampling


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token; `offset` is where its text begins, in characters of the choice's text."""

    id: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a choice. `tokens` are those since the last piece: text may wait for the ones to come.
    `finish` is set in a choice's last piece, and only there."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish: Finish | None = None


@dataclass(slots=True)
class _Choice:
    text: TextStream
    unsent: list[Token] = field(default_factory=list)
    finished: bool = False


class Generation:
    """Iterate over it once for the deltas; `close` it whatever happens, which aborts what has not finished."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        slo: SLO,
        label: str,
        stop: Sequence[str],
    ) -> None:
        """Submits all prompts or none. Raises the engine's Refused or EngineStopped."""
        self.prompts = prompts
        self.choices_per_prompt = sampling.n
        self.completion_tokens = 0
        self._engine = engine
        self._choices = [_Choice(codec.stream(stop)) for _ in range(len(prompts) * sampling.n)]
        self._requests = []
        try:
            for prompt in prompts:
                self._requests.append(engine.submit(prompt, sampling=sampling, slo=slo, label=label))
        except BaseException:
            self.close()
            raise

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(map(len, self.prompts))

    @property
    def count(self) -> int:
        """Choices in all."""
        return len(self._choices)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Raises RequestFailed, Refused or EngineStopped if that is how one of the requests ends."""
        going_on = self.count
        async with aclosing(_merge([self._engine.stream(request) for request in self._requests])) as outputs:
            async for number, output in outputs:
                delta = self._take(number, output)
                if delta is not None:
                    yield delta
                    going_on -= delta.finish is not None
                if not going_on:
                    return

    def _take(self, number: int, output: Output) -> Delta | None:
        """What the output of request `number` adds to its choice: nothing, if all of its text must wait."""
        index = number * self.choices_per_prompt + output.index
        choice = self._choices[index]
        if choice.finished:
            return None  # it met a stop string, and the engine was a token ahead
        if output.finish == "abort":
            raise EngineStopped("the server stopped before the request was finished")
        text = ""
        if output.token is not None:
            self.completion_tokens += 1
            choice.unsent.append(Token(output.token, choice.text.position, output.logprob, output.top))
            if output.finish != "stop":  # then it is the end-of-text token, which is no text
                text = choice.text.push(output.token)
        finish = output.finish
        if finish is not None:
            text += choice.text.flush()
        if choice.text.stopped:
            if finish is None:
                self._engine.stop_choice(self._requests[number], output.index)
            finish = "stop"
        if not text and finish is None:
            return None
        tokens, choice.unsent = tuple(choice.unsent), []
        choice.finished = finish is not None
        return Delta(index, text, tokens, finish)

    def close(self) -> None:
        """Abort the requests of which a choice has not finished. Closing twice does no harm."""
        for number, request in enumerate(self._requests):
            first = number * self.choices_per_prompt
            if not all(choice.finished for choice in self._choices[first : first + self.choices_per_prompt]):
                self._engine.abort(request.id)


async def _merge(streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output]]:
    """(which stream, output) of all streams as they come. The first error ends it."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    merged: asyncio.Queue[tuple[int, Output | Exception | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[Output]) -> None:
        end: Exception | None = None
        try:
            async for output in stream:
                merged.put_nowait((number, output))
        except Exception as error:
            end = error
        merged.put_nowait((number, end))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_streams = len(pumps)
        while open_streams:
            number, item = await merged.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield number, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
