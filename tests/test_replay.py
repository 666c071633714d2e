"""The open-loop client before scripted servers: what it sends and measures, what it calls a miss, where it ends."""

import asyncio
import json
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from server_helpers import FakeEngine, serving, wait_until
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from test_ablate import RUN_FIELDS
from text_helpers import SPECIAL, TEMPLATE, byte_tokenizer

from engine.slo_classes import SLO_CLASSES
from engine.text import TextCodec
from engine.timeline import Kind
from examples import replay
from examples.arrivals import Arrival
from examples.client import DIALECTS, Exchange, Server
from scheduling.request import SLO
from server import Service


class Scripted:
    """Another project's server: answers each completion as its prompt's length says."""

    def __init__(self, owner="somebody"):
        self.owner = owner
        self.bodies = []
        self.headers = []
        self.gone = 0

    def app(self):
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/other/models", lambda request: PlainTextResponse("hello")),
            ]
        )

    async def models(self, request):
        return JSONResponse({"data": [{"id": "m", "owned_by": self.owner}, {"id": "n"}]})

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        prompt = body["prompt"]
        match len(prompt) if isinstance(prompt, list) else len(prompt.split()):
            case 400:
                return JSONResponse({"error": {"message": "too long"}}, 400)
            case 500:
                return JSONResponse({"error": {"message": "on fire"}}, 500)
            case 7:
                return PlainTextResponse("data: {broken")
            case _:
                return StreamingResponse(self.stream(body, len(prompt)), media_type="text/event-stream")

    async def stream(self, body, tokens):
        def event(content):
            return f"data: {json.dumps(content)}\n\n"

        try:
            yield ": a comment, as some servers send to keep a connection alive\n\n"
            for index in range(body["max_tokens"]):
                await asyncio.sleep(0.02)
                last = index == body["max_tokens"] - 1
                if tokens == 3 and index == 1:
                    yield event({"error": {"message": "out of memory"}})
                    return
                if tokens == 4 and index == 1:
                    return  # no finish_reason
                if tokens == 5 and index == 1:
                    await asyncio.sleep(3600)
                yield event({"choices": [{"index": 0, "text": "x", "finish_reason": "length" if last else None}]})
            yield event({"choices": [], "usage": {}})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone += 1
            raise


@contextmanager
def running(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error", access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture
def scripted():
    server = Scripted()
    with running(server.app()) as url:
        server.url = url + "/v1"
        yield server


def arrival(index, tokens, *, time=0.0, output=3, slo=None):
    return Arrival(index, time, "text", tokens, output, slo or SLO(ttft=5.0, tbt=5.0))


def send(server, arrivals, *, dialect="vllm", drain=5.0):
    async def run():
        async with httpx.AsyncClient(timeout=None) as connection:
            met = await Server.meet(connection, server.url, None, dialect)
            return await replay.replay(connection, met, arrivals, seed=0, drain=drain)

    return asyncio.run(run())


def test_what_is_measured(scripted):
    [done] = send(scripted, [arrival(0, 20)])
    row = done.row()
    assert (row.finish, row.output_tokens, done.error) == (Kind.FINISHED, 3, "")
    assert row.ttft >= 0.02
    assert row.tbt_max >= row.tbt_p99 >= row.tbt_mean >= 0.015
    assert row.meets
    assert row.ended >= row.first_token + 0.04


def test_every_way_to_go_wrong_is_a_miss_and_is_told(scripted):
    kinds = {
        400: Kind.REFUSED,
        500: Kind.FAILED,
        7: Kind.FAILED,
        3: Kind.FAILED,
        4: Kind.FAILED,
        5: None,
        20: Kind.FINISHED,
    }
    exchanges = send(scripted, [arrival(index, tokens) for index, tokens in enumerate(kinds)], drain=1.0)
    assert [each.finish for each in exchanges] == list(kinds.values())
    assert exchanges[-2].chunks  # it had a first token, but was given up
    wait_until(lambda: scripted.gone == 1)  # and its connection was closed
    told = "\n".join(replay.errors(exchanges))
    for reason in ("too long", "on fire", "out of memory", "without a finish_reason", "1 given up, unfinished"):
        assert reason in told
    record = replay.record(exchanges, 2.0)
    assert record["ttft_attainment"] == pytest.approx(1 / 7)
    assert record["unfinished"] == 6
    assert record["met_per_s"] == 0.5


def test_it_is_open_loop(scripted):
    hanging = [arrival(index, 5, time=0.05 * index) for index in range(4)]
    send(scripted, hanging, drain=1.0)
    assert len(scripted.bodies) == 4  # though none of them was ever answered


def test_arrival_is_when_a_request_was_due():
    late = Exchange(arrival(0, 5), due=10.0, chunks=[10.5])  # however late the client came to send it
    assert late.row().ttft == 0.5


@pytest.mark.parametrize(
    ("dialect", "extras"),
    [
        ("layby", {"ignore_eos": True, "return_token_ids": True, "slo": {"ttft_ms": 250.0, "tbt_ms": 100.0}}),
        ("vllm", {"ignore_eos": True}),
        ("openai", {}),
    ],
)
def test_dialects(dialect, extras):
    body = DIALECTS[dialect].body("m", arrival(0, 12, slo=SLO(0.25, 0.1)), seed=0)
    prompt = body.pop("prompt")
    assert body == {"model": "m", "max_tokens": 3, "temperature": 0, "stream": True, **extras}
    assert len(prompt.split()) == 12 if dialect == "openai" else all(0 <= token < 256 for token in prompt)


@pytest.mark.parametrize(("owner", "dialect"), [("layby", "layby"), ("sglang", "vllm"), ("somebody", "openai")])
def test_a_dialect_is_guessed_by_the_owner_of_the_model(owner, dialect):
    server = Scripted(owner)

    async def meet(url):
        async with httpx.AsyncClient() as connection:
            return await Server.meet(connection, url, None, None)

    with running(server.app()) as url:
        met = asyncio.run(meet(url + "/v1/"))
    assert (met.model, met.dialect.name) == ("m", dialect)


def test_our_own_server_gets_the_slos_and_the_lengths(tmp_path, capsys):
    engine = FakeEngine()
    codec = TextCodec(byte_tokenizer(), TEMPLATE, SPECIAL)
    out, table = tmp_path / "replay.json", tmp_path / "replay.csv"
    with serving(Service(engine, codec, "tiny", SLO_CLASSES, "best-effort", 16)) as url:
        replay.main(
            ["--url", f"{url}/v1", "--rates", "200", "--requests", "12", "--prompt-scale", "0.005", "--max-output", "3",
             "--slo-scales", "2", "--seeds", "0,1", "--json", str(out), "--csv", str(table), "--metric", "both"]
        )  # fmt: skip
    content = json.loads(out.read_text())
    assert [set(run) >= RUN_FIELDS for run in content["runs"]] == [True, True]
    assert [(run["system"], run["requests"], run["unfinished"], run["seed"]) for run in content["runs"]] == [
        ("tiny", 12, 0, 0),
        ("tiny", 12, 0, 1),
    ]
    assert content["runs"][0]["blocking_mean_ms"] is content["runs"][0]["utilisation"] is None
    assert len(engine.submitted) == 24
    assert {request.slo.ttft for request in engine.submitted} <= {0.5, 1.0, 8.0, 12.0}
    assert all(request.sampling.max_tokens <= 3 and request.sampling.ignore_eos for request in engine.submitted)
    assert len(table.read_text().splitlines()) == 3
    printed = capsys.readouterr().out
    assert "attainment" in printed and "against" not in printed


def test_it_is_bounded_in_time(scripted, tmp_path, capsys):
    out = tmp_path / "a.json"
    arguments = ["--url", scripted.url, "--rates", "10", "--requests", "50", "--seconds", "0.5", "--max-output", "1"]
    replay.main([*arguments, "--drain", "2", "--dialect", "vllm", "--prompt-scale", "0.01", "--json", str(out)])
    [run] = json.loads(out.read_text())["runs"]
    assert 0 < run["requests"] == len(scripted.bodies) < 15
    told = f"seed 0: {50 - run['requests']} of 50 are due after 0.5 s (--seconds), and not sent"
    assert told in capsys.readouterr().out


def test_one_that_is_interrupted_says_so_and_writes_nothing(scripted, tmp_path, monkeypatch, capsys):
    async def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(replay, "experiment", interrupted)
    with pytest.raises(SystemExit) as exit:
        replay.main(["--url", scripted.url, "--json", str(tmp_path / "a.json")])
    assert exit.value.code == 130
    assert capsys.readouterr().err == "replay: stopped; nothing has been written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_taken_from_the_environment(scripted, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "abc")
    arguments = ["--url", scripted.url, "--requests", "1", "--max-output", "1", "--prompt-scale", "0.001"]
    replay.main([*arguments, "--api-key-env", "SOME_KEY"])
    replay.main(arguments)
    assert [headers.get("authorization") for headers in scripted.headers] == ["Bearer abc", None]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--url", "http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1/models: "),
        (["--url", "{other}"], "/other/models does not answer like OpenAI's API"),
        (["--url", "{url}", "--model", "gone"], "has no model gone: it has m, n"),
        (["--url", "{url}", "--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: no such environment variable"),
        (["--url", "{url}", "--rates", "0"], "argument --rates: must be above 0, got 0"),
        (["--url", "{url}", "--trace", "missing.csv"], "no workload 'missing.csv'"),
        (["--url", "{url}", "--arrivals", "recorded"], "qwen is a generator and has no recorded arrivals"),
    ],
)
def test_refusals(scripted, arguments, error, tmp_path, capsys):
    places = {"url": scripted.url, "other": scripted.url.replace("/v1", "/other")}
    with pytest.raises(SystemExit) as exit:
        replay.main([*(argument.format(**places) for argument in arguments), "--json", str(tmp_path / "a.json")])
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.err.startswith("replay: error: ")
    assert error in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "a.json").exists()
