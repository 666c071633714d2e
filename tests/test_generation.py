"""From the engine's outputs to the deltas of a call: what a client must not see, whatever the engine sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from text_helpers import EOS, SPECIAL, byte_tokenizer

from engine.generation import Delta, Generation
from engine.output import LiveRequest, Output
from engine.text import TextCodec
from scheduling.request import SLO, Sampling


class Scripted:
    """An engine that sends `outputs` for its one request, and takes no notice of a stop: it may be tokens ahead."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = outputs
        self.stopped: list[int] = []
        self.aborted: list[int] = []

    def submit(self, prompt: Sequence[int], *, sampling: Sampling, slo: SLO, label: str) -> LiveRequest:
        return LiveRequest(0, prompt, sampling, slo, label=label)

    async def stream(self, request: LiveRequest) -> AsyncIterator[Output]:
        for output in self.outputs:
            yield output

    def stop_choice(self, request: LiveRequest, index: int) -> None:
        self.stopped.append(index)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


def deltas(outputs: Sequence[Output], n: int = 1, stop: Sequence[str] = ()) -> tuple[list[Delta], Generation, Scripted]:
    engine = Scripted(outputs)
    codec = TextCodec(byte_tokenizer(), None, SPECIAL)
    generation = Generation(
        engine,  # type: ignore[arg-type]
        codec,
        [[1, 2]],
        sampling=Sampling(max_tokens=50, n=n),
        slo=SLO(),
        label="",
        stop=stop,
    )

    async def collect() -> list[Delta]:
        return [delta async for delta in generation]

    found = asyncio.run(collect())
    generation.close()
    return found, generation, engine


def test_what_the_engine_computes_beyond_a_stop_string_is_never_shown_or_counted() -> None:
    """A choice has met its stop string; its next tokens, and its end, arrive while its sibling still goes on."""
    ahead = [Output(0, token) for token in b"xy"] + [Output(0, ord("z"), finish="length")]
    before = [Output(0, ord("a")), Output(1, ord("b")), Output(0, ord("!"))]
    script = [*before, *ahead, Output(1, ord("c"), finish="length")]
    found, generation, engine = deltas(script, n=2, stop=["!"])
    assert [(delta.index, delta.text, delta.finish) for delta in found] == [
        (0, "a", None),
        (1, "b", None),
        (0, "", "stop"),
        (1, "c", "length"),
    ]
    assert [token.id for delta in found for token in delta.tokens] == [ord("a"), ord("b"), ord("!"), ord("c")]
    assert generation.completion_tokens == 4
    assert (engine.stopped, engine.aborted) == ([0], [])


def test_the_end_of_text_is_no_text_even_where_its_token_is_a_word() -> None:
    """A config may name any token as EOS, an ordinary one included: it ends the text and is not part of it."""
    found, generation, _ = deltas([Output(0, ord("a")), Output(0, ord("."), finish="stop")])
    assert [(delta.text, delta.finish) for delta in found] == [("a", None), ("", "stop")]
    assert generation.completion_tokens == 2
    # The same token within a text, or as the last that the limit allows, is shown.
    found, _, _ = deltas([Output(0, ord(".")), Output(0, ord("."), finish="length")])
    assert "".join(delta.text for delta in found) == ".."


def test_the_end_of_text_completes_no_stop_string() -> None:
    found, _, engine = deltas([Output(0, ord("a")), Output(0, ord("!"), finish="stop")], stop=["a!"])
    assert [(delta.text, delta.finish) for delta in found] == [("a", "stop")]
    assert engine.stopped == []
    found, _, _ = deltas([Output(0, ord("a")), Output(0, EOS, finish="stop")], stop=["a</s>"])
    assert "".join(delta.text for delta in found) == "a"
