"""One request to an OpenAI-compatible server, streamed and timed as its client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.metrics import Row, percentile
from engine.timeline import Kind
from examples.arrivals import Arrival

VOCABULARY = 256  # token ids that every model has


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server understands beyond OpenAI's API. Without token ids a prompt is so many words, of about a token."""

    name: str
    token_ids: bool = False  # prompts as lists of them
    ignore_eos: bool = False  # so that outputs have the length that they are meant to have
    slo: bool = False
    return_token_ids: bool = False  # so that tokens without text are seen as well

    def body(self, model: str, arrival: Arrival, seed: int) -> dict[str, Any]:
        """The request, for /v1/completions."""
        prompt = arrival.prompt(VOCABULARY, seed) if self.token_ids else "the " * arrival.prompt_tokens
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.return_token_ids:
            body["return_token_ids"] = True
        if self.slo:
            targets = {"ttft_ms": arrival.slo.ttft, "tbt_ms": arrival.slo.tbt}
            body["slo"] = {name: 1000 * seconds for name, seconds in targets.items() if seconds is not None}
        return body


DIALECTS = {
    "layby": Dialect("layby", token_ids=True, ignore_eos=True, slo=True, return_token_ids=True),
    "vllm": Dialect("vllm", token_ids=True, ignore_eos=True),  # SGLang's too
    "openai": Dialect("openai"),
}


@dataclass(frozen=True, slots=True)
class Server:
    """`url` ends before /completions, as clients of OpenAI's API want it."""

    url: str
    model: str
    dialect: Dialect

    @classmethod
    async def meet(cls, client: httpx.AsyncClient, url: str, model: str | None, dialect: str | None) -> Server:
        """Ask the server for its models and guess its dialect, as far as they are not given. ValueError if nobody
        answers there, or not like OpenAI's API."""
        url = url.rstrip("/")
        try:
            answer = await client.get(f"{url}/models")
            answer.raise_for_status()
            models = {card["id"]: card.get("owned_by") for card in answer.json()["data"]}
        except httpx.HTTPError as error:
            raise ValueError(f"{url}/models: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{url}/models does not answer like OpenAI's API") from None
        if not models or (model is not None and model not in models):
            raise ValueError(f"{url} has no model {model or 'at all'}: it has {', '.join(models) or 'none'}")
        model = model or next(iter(models))
        owner = {"sglang": "vllm"}.get(models[model] or "", models[model])
        return cls(url, model, DIALECTS[dialect or (owner if owner in DIALECTS else "openai")])


@dataclass(slots=True)
class Exchange:
    """What has come of a request so far. Times on the client's clock; `due`, not when it was really sent, is its
    arrival: a client that falls behind must not flatter the server."""

    arrival: Arrival
    due: float
    chunks: list[float] = field(default_factory=list)  # when each chunk with a token or a text came
    tokens: int = 0
    ended: float | None = None
    finish: Kind | None = None
    error: str = ""

    def row(self) -> Row:
        """Gaps are those between chunks: a server that sends several tokens at once has longer and fewer ones."""
        gaps = [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]
        return Row(
            id=self.arrival.index,
            label=self.arrival.label,
            slo=self.arrival.slo,
            arrival=self.due,
            prompt_tokens=self.arrival.prompt_tokens,
            output_tokens=self.tokens,
            first_token=self.chunks[0] if self.chunks else None,
            ended=self.ended,
            finish=self.finish,
            tbt_mean=sum(gaps) / len(gaps) if gaps else None,
            tbt_p99=percentile(gaps, 99) if gaps else None,
            tbt_max=max(gaps) if gaps else None,
        )


async def exchange(
    client: httpx.AsyncClient, server: Server, exchange: Exchange, body: bytes, now: Callable[[], float]
) -> None:
    """Send it and read the answer to its end. Never raises but when cancelled: what went wrong is in the exchange."""
    finished = False
    try:
        headers = {"content-type": "application/json"}
        async with client.stream("POST", f"{server.url}/completions", content=body, headers=headers) as answer:
            if answer.status_code != 200:
                exchange.error = f"{answer.status_code}: {(await answer.aread())[:300].decode(errors='replace')}"
                exchange.finish = Kind.REFUSED if answer.status_code < 500 else Kind.FAILED
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                    continue
                finished = _take(exchange, json.loads(data), now()) or finished
        exchange.finish = Kind.FINISHED if finished and not exchange.error else Kind.FAILED
        exchange.error = exchange.error or ("" if finished else "the stream ended without a finish_reason")
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        exchange.finish, exchange.error = Kind.FAILED, f"{type(error).__name__}: {error}"
    finally:
        exchange.ended = now()


def _take(exchange: Exchange, event: dict[str, Any], time: float) -> bool:
    """Note one event of the stream. Returns whether it says that the choice has finished."""
    if "error" in event:
        exchange.error = str(event["error"])[:300]
        return False
    finished = False
    for choice in event["choices"]:
        tokens = len(choice.get("token_ids") or ()) or bool(choice.get("text"))
        if tokens:
            exchange.chunks.append(time)
            exchange.tokens += tokens
        finished = finished or choice.get("finish_reason") is not None
    return finished
