"""The OpenAI-compatible HTTP server: `python server.py --model smollm2`, then any OpenAI client on port 8000.

The life of a call: its body is read and checked, its text becomes tokens off the event loop, the engine takes it in,
and text comes back as it is generated. Who leaves early has their requests aborted. A first SIGTERM or Ctrl-C drains.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine.engine import Engine
from engine.errors import EngineStopped, Refused, RequestFailed
from engine.generation import Delta, Generation
from engine.http import Calls, DrainingServer, EventStream, bind, new_event_loop, unless_gone, url
from engine.openai import AnyRequest, ChatRequest, CompletionRequest, GenerationRequest, parse
from engine.openai_replies import ApiError, ChatReplies, CompletionReplies, Json, Replies, ReplyOptions
from engine.options import add_engine_arguments, engine_from_args
from engine.prometheus import CONTENT_TYPE, PrometheusMetrics
from engine.slo_classes import BEST_EFFORT, SLO_CLASSES, parse_slo_class
from engine.text import PromptError, TextCodec
from engine.trace import ChromeTrace
from models.tokenizer import load_tokenizer
from scheduling.request import SLO

logger = logging.getLogger("layby")


@dataclass
class Service:
    """What the routes share. `model` is the name that clients know it by."""

    engine: Engine
    codec: TextCodec
    model: str
    slo_classes: Mapping[str, SLO] = field(default_factory=lambda: SLO_CLASSES)
    default_slo: str = BEST_EFFORT
    default_max_tokens: int = 1024  # of a chat that names no limit: decode sets memory aside for all of it
    calls: Calls = field(default_factory=Calls)
    metrics: PrometheusMetrics = field(default_factory=PrometheusMetrics)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.engine.timeline.add(self.metrics)

    @property
    def max_body_bytes(self) -> int:
        """Room for a full context as text or as token ids, however it is escaped; a larger body would only keep the
        event loop from its work while it is read."""
        return 2**18 + 64 * self.engine.max_model_len

    @property
    def unready(self) -> str | None:
        """Why no calls are taken now; None if they are."""
        if self.calls.draining:
            return "the server is shutting down"
        return None if self.engine.accepting else self.engine.error or "the server is starting"


def create_app(service: Service) -> Starlette:
    errors = (ApiError, PromptError, Refused, EngineStopped, RequestFailed, HTTPException, ClientDisconnect, Exception)
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers=dict.fromkeys(errors, on_error),
    )
    app.state.service = service
    return app


# One handler for each route


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = await read(request, CompletionRequest)
    with service.calls.preparing():
        prompts = await unless_gone(request.receive, encode(service, asked.prompt))
        replies = submit(service, asked, prompts, CompletionReplies)
    return await answer(request, asked, replies)


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = await read(request, ChatRequest)
    messages = [message.for_template() for message in asked.messages]
    with service.calls.preparing():
        prompt = await unless_gone(request.receive, service.codec.encode_chat(messages, service.engine.max_model_len))
        replies = submit(service, asked, [prompt], ChatReplies)
    return await answer(request, asked, replies)


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [model_card(request.app.state.service)]})


async def model(request: Request) -> Response:
    check_model(request.app.state.service, request.path_params["name"])
    return JSONResponse(model_card(request.app.state.service))


async def health(request: Request) -> Response:
    unready = request.app.state.service.unready
    return PlainTextResponse(unready or "ready", 503 if unready else 200)


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.render(service.engine), headers={"content-type": CONTENT_TYPE})


# The steps of a call


async def read(request: Request, kind: type[AnyRequest]) -> AnyRequest:
    """1. The body, checked; or an error that says what is wrong with it, or that no calls are taken now."""
    service: Service = request.app.state.service
    if service.unready is not None:
        raise EngineStopped(service.unready)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > service.max_body_bytes:
            raise ApiError(f"the body is longer than {service.max_body_bytes} bytes", status=413)
    asked = parse(kind, body)
    if asked.model is not None:
        check_model(service, asked.model)
    return asked


async def encode(service: Service, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """2. Tokens."""
    codec, limit = service.codec, service.engine.max_model_len
    return [await codec.encode(prompt, limit) if isinstance(prompt, str) else prompt for prompt in prompts]


def submit(
    service: Service, asked: GenerationRequest, prompts: Sequence[Sequence[int]], kind: type[Replies]
) -> Replies:
    """3. To the engine. From here on the call is under way, until `service.calls.end`."""
    slo, label = resolve_slo(service, asked.slo)
    generation = Generation(
        service.engine,
        service.codec,
        prompts,
        sampling=asked.sampling(asked.token_limit or service.default_max_tokens),
        slo=slo,
        label=label,
        stop=asked.stop,
    )
    service.calls.begin(generation)
    options = ReplyOptions(
        logprobs=asked.top_logprobs_wanted is not None,
        token_ids=asked.return_token_ids,
        usage_chunk=asked.stream_options is not None and asked.stream_options.include_usage,
    )
    return kind(service.model, service.codec, generation, options)


async def answer(request: Request, asked: GenerationRequest, replies: Replies) -> Response:
    """4. Text, as it comes or as a whole."""
    calls: Calls = request.app.state.service.calls
    generation = replies.generation
    if asked.stream:
        return EventStream(events(replies), on_end=lambda: calls.end(generation))
    try:
        deltas = await unless_gone(request.receive, collect(generation))
    finally:
        calls.end(generation)
    return JSONResponse(replies.whole(deltas))


async def collect(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


async def events(replies: Replies) -> AsyncIterator[Json | str]:
    """What a stream consists of. An error is an event too, and the last one."""
    try:
        for chunk in replies.opening():
            yield chunk
        async for delta in replies.generation:
            yield replies.chunk(delta)
        for chunk in replies.closing():
            yield chunk
        yield "[DONE]"
    except Exception as error:
        yield as_api_error(error).body


def resolve_slo(service: Service, asked: str | SLO | None) -> tuple[SLO, str]:
    """The targets, and the name of their class if they have one."""
    if isinstance(asked, SLO):
        return asked, ""
    name = service.default_slo if asked is None else asked
    if name not in service.slo_classes:
        raise ApiError(f"slo: no such class; there are {', '.join(service.slo_classes)}", param="slo")
    return service.slo_classes[name], name


def check_model(service: Service, name: str) -> None:
    if name != service.model:
        message = f"there is no such model here; this server has {service.model!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def model_card(service: Service) -> Json:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "layby",
        "max_model_len": service.engine.max_model_len,
    }


# Errors


def as_api_error(error: Exception) -> ApiError:
    """The one place that says whose fault an exception is, and what the client is told."""
    match error:
        case ApiError():
            return error
        case Refused() | PromptError():
            return ApiError(str(error))
        case EngineStopped():
            return ApiError(str(error), status=503, type="service_unavailable")
        case RequestFailed():
            logger.error("a request failed: %s", error)
            return ApiError(f"the request failed: {error}", status=500, type="server_error")
        case HTTPException():  # Starlette's: no such route, wrong method
            return ApiError(error.detail, status=error.status_code)
        case _:
            logger.error("a bug", exc_info=error)
            return ApiError("internal error", status=500, type="server_error")


async def on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody is there to read it
    told = as_api_error(error)
    return JSONResponse(told.body, told.status)


# The process


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        classes = {**SLO_CLASSES, **dict(map(parse_slo_class, args.slo_class))}
        check_arguments(args, classes)
        listener = bind(args.host, args.port)
        trace = None if args.trace is None else ChromeTrace(args.trace)
        engine = engine_from_args(args, default_slo=classes[args.default_slo])
        files = load_tokenizer(args.model)
        codec = TextCodec(files.tokenizer, files.chat_template, files.special)
    except (ValueError, OSError) as error:
        refuse(parser, error)
    name = args.served_model_name or args.model
    service = Service(engine, codec, name, classes, args.default_slo, args.default_max_tokens)
    if trace is not None:
        engine.timeline.add(trace)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(service, listener, args.drain_seconds))
    finally:
        if trace is not None:
            trace.close()


async def serve(service: Service, listener: socket.socket, drain_seconds: float) -> None:
    """Answer calls until a signal comes."""
    server = DrainingServer(create_app(service), service.calls, drain_seconds)
    listening = asyncio.create_task(server.serve(sockets=[listener]))
    await service.engine.start()
    print(f"Layby serves {service.model} on {url(listener)}", flush=True)
    try:
        await listening
    finally:
        await service.engine.stop()


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="server.py", description="Layby: an OpenAI-compatible server.")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed")
    group.add_argument("--served-model-name", help="what clients call the model; default: as in --model")
    group.add_argument(
        "--slo-class",
        action="append",
        default=[],
        metavar="NAME=TTFT_MS,TBT_MS",
        help="add a class of requests or change one; may be repeated",
    )
    group.add_argument("--default-slo", default=BEST_EFFORT, metavar="NAME", help="class of requests that name none")
    group.add_argument("--default-max-tokens", type=int, default=1024, help="of chats that name no limit")
    group.add_argument("--drain-seconds", type=float, default=30.0, help="time to finish after a first signal")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace of all that happened")
    add_engine_arguments(parser)
    return parser


def check_arguments(args: argparse.Namespace, classes: Mapping[str, SLO]) -> None:
    if args.default_slo not in classes:
        raise ValueError(f"--default-slo {args.default_slo}: no such class; there are {', '.join(classes)}")
    if args.served_model_name == "":
        raise ValueError("--served-model-name must not be empty")
    if args.default_max_tokens < 1:
        raise ValueError(f"--default-max-tokens must be at least 1, got {args.default_max_tokens}")
    if not args.drain_seconds >= 0:
        raise ValueError(f"--drain-seconds must be 0 or more, got {args.drain_seconds}")


def refuse(parser: argparse.ArgumentParser, error: Exception) -> NoReturn:
    parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
