"""The HTTP API before a scripted engine: OpenAI's shapes, what is refused, who is aborted."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_helpers import FakeEngine, serving, wait_until
from starlette.applications import Starlette
from text_helpers import BOS, EOS, SPECIAL, TEMPLATE, byte_tokenizer

from engine.generation import Generation
from engine.http import Calls, DrainingServer
from engine.lab import Lab
from engine.prometheus import PrometheusMetrics
from engine.slo_classes import SLO_CLASSES, parse_slo_class
from engine.text import TextCodec
from engine.timeline import Kind, Timeline
from scheduling.request import SLO, Request, Sampling
from server import Service, create_app, main

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
REFUSED_AT = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": [USER]}}


def codec(template: str | None = TEMPLATE) -> TextCodec:
    return TextCodec(byte_tokenizer(add_bos=True), template, SPECIAL)


class Api:
    """One server for all tests; `engine` is reset before each."""

    def __init__(self, engine: FakeEngine, service: Service, url: str) -> None:
        self.engine, self.service, self.url = engine, service, url
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, /, expect: int = 200, **fields: Any) -> Json:
        answer = self.http.post(path, json=fields)
        assert answer.status_code == expect, answer.text
        return answer.json()

    def complete(self, prompt: Any = "hi", /, **fields: Any) -> Json:
        return self.post(COMPLETIONS, prompt=prompt, **fields)

    def chat(self, *messages: Json, **fields: Any) -> Json:
        return self.post(CHAT, messages=messages or [USER], **fields)

    def stream(self, path: str, **fields: Any) -> list[Json]:
        """The events of a stream that ends as it should."""
        *chunks, last = self.raw_stream(path, **fields)
        assert last == "[DONE]"
        return chunks

    def raw_stream(self, path: str, **fields: Any) -> list[Any]:
        answer = self.http.post(path, json={"stream": True, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, rest = answer.text.split("\n\n")
        assert rest == ""
        texts = [event.removeprefix("data: ") for event in events]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    engine = FakeEngine()
    service = Service(engine, codec(), "fake", default_slo="file", default_max_tokens=50)  # type: ignore[arg-type]
    with serving(service) as url:
        yield Api(engine, service, url)


@pytest.fixture
def api(server: Api) -> Api:
    server.engine.reset()
    return server


# Completions


def test_a_completion(api: Api) -> None:
    reply = api.complete("hi", model="fake")
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 0
    assert reply == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9},
    }
    assert api.engine.submitted[0].prompt == [BOS, *b"hi"]
    assert api.engine.submitted[0].sampling == Sampling(max_tokens=16, temperature=1.0)


def test_a_prompt_of_token_ids_is_taken_as_it_is(api: Api) -> None:
    api.complete([104, 105])
    assert api.engine.submitted[0].prompt == [104, 105]


def test_sampling_reaches_the_engine(api: Api) -> None:
    api.complete(max_tokens=7, temperature=0.5, top_p=0.9, seed=3, n=2, ignore_eos=True, logprobs=4)
    assert api.engine.submitted[0].sampling == Sampling(7, 0.5, 0.9, seed=3, n=2, ignore_eos=True, logprobs=4)


def test_several_prompts_and_choices_are_numbered_through(api: Api) -> None:
    reply = api.complete(["a", [98, 99]], n=2, max_tokens=2, return_token_ids=True)
    choices = reply["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in choices] == [[BOS, 97], [BOS, 97], [98, 99], [98, 99]]
    assert all(choice["text"] == "He" and choice["finish_reason"] == "length" for choice in choices)
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}  # each prompt once


def test_a_stream_says_the_same_as_the_whole(api: Api) -> None:
    api.engine.script = "Žluťoučký 😀".encode()
    chunks = api.stream(COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=99, stream_options={"include_usage": True})
    *pieces, usage = chunks
    texts = ["", "", "", ""]
    for piece in pieces:
        assert piece["object"] == "text_completion"
        assert piece["usage"] is None
        [choice] = piece["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["Žluťoučký 😀"] * 4
    assert [chunk["choices"][0]["finish_reason"] for chunk in pieces].count("stop") == 4
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 4 * 19, "total_tokens": 4 + 4 * 19}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_has_no_usage_unless_asked(api: Api) -> None:
    chunks = api.stream(COMPLETIONS, prompt="a")
    assert all("usage" not in chunk for chunk in chunks)


def test_token_ids_and_logprobs_of_a_completion(api: Api) -> None:
    api.engine.script = "aé".encode()
    choice = api.complete("p", logprobs=2, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [0x61, 0xC3, 0xA9, EOS]
    assert choice["prompt_token_ids"] == [BOS, ord("p")]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -2.0}  # the chosen token is one of the likeliest
    assert logprobs["top_logprobs"][1] == {"a": -1.0, "b": -2.0, "bytes:\\xc3": -0.5}  # and here it is beside them
    assert logprobs["text_offset"] == [0, 1, 1, 2]


def test_streamed_tokens_are_all_there_once(api: Api) -> None:
    """A piece of text brings all tokens since the last one: a token without text of its own is not lost."""
    api.engine.script = "é😀".encode()
    chunks = api.stream(COMPLETIONS, prompt="p", logprobs=0, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[0xC3, 0xA9], [*"😀".encode()], [EOS]]
    assert [choice["text"] for choice in choices] == ["é", "😀", ""]
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [2, 4, 1]
    assert ["prompt_token_ids" in choice for choice in choices] == [True, False, False]


# Chats


def test_a_chat(api: Api) -> None:
    reply = api.chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert reply["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert api.engine.submitted[0].prompt == [BOS, *b"[user]a\nb", EOS, *b"[assistant]"]
    assert api.engine.submitted[0].sampling.max_tokens == 50


def test_a_reply_can_be_sent_back(api: Api) -> None:
    message = api.chat()["choices"][0]["message"]
    api.chat(USER, {**message, "annotations": [], "tool_calls": None}, USER)
    turns = [[*b"[user]hi"], [*b"[assistant]Hello"], [*b"[user]hi"]]
    written = [token for turn in turns for token in [*turn, EOS]]
    assert api.engine.submitted[1].prompt == [BOS, *written, *b"[assistant]"]


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_completion_tokens": 3}])
def test_both_names_of_the_limit(api: Api, limit: Json) -> None:
    reply = api.chat(**limit)
    assert reply["choices"][0]["message"]["content"] == "Hel"
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_streamed_chat(api: Api) -> None:
    first, *pieces = api.stream(CHAT, messages=[USER], n=2, return_token_ids=True)
    roles = [(choice["index"], choice["delta"]) for choice in first["choices"]]
    assert roles == [(index, {"role": "assistant", "content": ""}) for index in (0, 1)]
    assert first["prompt_token_ids"] == [BOS, *b"[user]hi", EOS, *b"[assistant]"]
    for index in (0, 1):
        mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello"
        assert [choice["finish_reason"] for choice in mine] == [None] * 5 + ["stop"]
        assert mine[-1]["delta"] == {}
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}


def test_logprobs_of_a_chat(api: Api) -> None:
    api.engine.script = "é".encode()
    choice = api.chat(logprobs=True, top_logprobs=1)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[0xC3], [0xA9], [*b"</s>"]]
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"] == [{"token": "a", "logprob": -1.0, "bytes": [97]}]
    assert api.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert api.chat()["choices"][0]["logprobs"] is None


# Stop strings


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stop_string_ends_a_choice_and_never_shows(api: Api, path: str) -> None:
    api.engine.script = b"one STOP two"
    chunks = api.stream(path, **REFUSED_AT[path], stop=["STOP", "two"], max_tokens=50)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices) == "one "
    assert choices[-1]["finish_reason"] == "stop"
    assert api.engine.stopped == [(api.engine.submitted[0].id, 0)]
    assert api.engine.aborted == []


def test_text_held_for_a_stop_string_is_delivered_at_the_end(api: Api) -> None:
    api.engine.script = b"one ST"
    reply = api.complete(stop="STOP")
    assert reply["choices"][0]["text"] == "one ST"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert api.complete(stop="STOP", max_tokens=6)["choices"][0]["finish_reason"] == "length"
    assert api.engine.stopped == []


# SLOs


@pytest.mark.parametrize(
    ("asked", "slo", "label"),
    [
        ({}, SLO_CLASSES["file"], "file"),  # this server's default
        ({"slo": None}, SLO_CLASSES["file"], "file"),
        ({"slo": "chat"}, SLO(0.25, 0.1), "chat"),
        ({"slo": {"ttft_ms": 300, "tbt_ms": 50.5}}, SLO(0.3, 0.0505), ""),
        ({"slo": {"tbt_ms": 50}}, SLO(None, 0.05), ""),
        ({"slo": {}}, SLO(), ""),
        ({"slo": "best-effort"}, SLO(), "best-effort"),
    ],
)
def test_slos_reach_the_engine(api: Api, asked: Json, slo: SLO, label: str) -> None:
    api.complete(**asked)
    assert (api.engine.submitted[0].slo, api.engine.submitted[0].label) == (slo, label)


def test_slo_classes_of_the_command_line() -> None:
    assert parse_slo_class("chat=250,100") == ("chat", SLO(0.25, 0.1))
    assert parse_slo_class("a=250") == ("a", SLO(0.25))
    assert parse_slo_class("a=,100") == ("a", SLO(None, 0.1))
    for wrong in ("chat", "=1,2", "a=x", "a=-1", "a=1,2,3", "a=nan"):
        with pytest.raises(ValueError, match=r"slo|name=ttft_ms|number"):
            parse_slo_class(wrong)


# What is refused, and how


def problem(reply: Json) -> Json:
    assert reply.keys() == {"error"}
    assert reply["error"].keys() == {"message", "type", "param", "code"}
    assert reply["error"]["type"] == "invalid_request_error"
    return reply["error"]


def check_alive(api: Api) -> None:
    api.engine.reset()
    assert api.complete()["choices"][0]["text"] == "Hello"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
        ({"prompt": [[]]}, "prompt", "must not be empty"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": 5}, "prompt", "must be a text"),
        ({"prompt": [1, "a"]}, "prompt", "must be a text"),
        ({"prompt": [True]}, "prompt", "must be a text"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128 prompts, got 129"),
        ({"prompt": "x" * 120}, None, "121 tokens, and the context has 100"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "7"}, "max_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [5]}, "stop.0", "valid string"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, None, "needs stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ({"slo": "nope"}, "slo", "there are text, chat, image, search, file, best-effort"),
        ({"slo": {"ttft_ms": 0}}, "slo", "ttft_ms must be"),
        ({"slo": {"ttft": 1}}, "slo", "must be the name of a class, or targets"),
        ({"slo": 5}, "slo", "must be the name of a class, or targets"),
        ({"foo": 1}, "foo", "unknown field 'foo'"),
        ({"messages": [USER]}, "messages", "unknown field"),
    ],
)
def test_bad_completions(api: Api, fields: Json, param: str | None, says: str) -> None:
    """Cases C9 and C10: empty prompts, wrong types and values; the server lives on."""
    error = problem(api.post(COMPLETIONS, expect=400, **{"prompt": "hi", **fields}))
    assert error["param"] == param
    assert says in error["message"]
    assert api.engine.submitted == []
    check_alive(api)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": ["hi"]}, "messages.0", "valid dictionary"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'system', 'developer', 'user'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name", "unknown field"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls", "unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
            "'image_url' is not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content", "parts of the form"),
        ({"messages": [USER, USER]}, None, "roles must alternate"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None, "two names of one limit"),
        ({"top_logprobs": 2}, None, "needs logprobs"),
        ({"logprobs": 2}, "logprobs", "valid boolean"),
    ],
)
def test_bad_chats(api: Api, fields: Json, param: str | None, says: str) -> None:
    """Cases C9 and C10, of chats: no messages, wrong types; and C20, a template that raises."""
    error = problem(api.post(CHAT, expect=400, **{"messages": [USER], **fields}))
    assert error["param"] == param
    assert says in error["message"]
    check_alive(api)


OFF = [
    ("tools", [], [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "none", "auto"),
    ("response_format", {"type": "text"}, {"type": "json_object"}),
    ("logit_bias", {}, {"50256": -100}),
    ("presence_penalty", 0, 0.5),
    ("presence_penalty", 0.0, 0.5),
    ("frequency_penalty", 0, -1),
    ("frequency_penalty", 0.0, -1),
    ("best_of", 1, 2),
    ("echo", False, True),
    ("suffix", "", "end"),
    ("top_k", -1, 40),
    ("min_p", 0, 0.1),
    ("min_p", 0.0, 0.1),
    ("repetition_penalty", 1, 1.1),
    ("repetition_penalty", 1.0, 1.1),
    ("stop_token_ids", [], [5]),
    ("store", False, True),
    ("service_tier", "auto", "flex"),
    ("reasoning_effort", None, "low"),
    ("prompt_logprobs", None, 1),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "off", "on"), OFF)
def test_what_is_not_supported_is_refused_by_name(api: Api, path: str, name: str, off: Any, on: Any) -> None:
    error = problem(api.post(path, expect=400, **REFUSED_AT[path], **{name: on}))
    assert (error["message"], error["param"]) == (f"{name} is not supported", name)
    api.post(path, **REFUSED_AT[path], **{name: off})
    api.post(path, **REFUSED_AT[path], **{name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", 0),
        ("echo", 0.0),
        ("store", 0),
        ("best_of", True),
        ("best_of", 1.0),
        ("min_tokens", False),
        ("top_k", False),
        ("top_k", -1.0),
        ("frequency_penalty", False),
        ("presence_penalty", False),
        ("min_p", False),
        ("repetition_penalty", True),
        ("parallel_tool_calls", 1),
        ("suffix", []),
        ("logit_bias", []),
        ("tools", {}),
    ],
)
def test_off_is_exact_in_type(api: Api, name: str, value: Any) -> None:
    """For Python true is 1 and 1.0, for JSON it is not: as strict as the fields that are supported."""
    error = problem(api.post(COMPLETIONS, expect=400, prompt="hi", **{name: value}))
    assert (error["message"], error["param"]) == (f"{name} is not supported", name)


def test_fields_without_effect_are_accepted(api: Api) -> None:
    api.chat(user="me", metadata={"a": "b"}, safety_identifier="x")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),  # half a surrogate pair: no text
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be a JSON object, got list"),
        (b"7", "must be a JSON object, got int"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_malformed_bodies(api: Api, path: str, body: bytes, says: str) -> None:
    """Case C10."""
    answer = api.http.post(path, content=body)
    assert answer.status_code == 400
    assert says in problem(answer.json())["message"]
    check_alive(api)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "secret" * 100_000},
        {"messages": [{"role": "secret" * 100_000, "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "secret" * 100_000}]}]},
        {"messages": [{"role": "user", "content": "hi", "secret" * 100_000: 1}]},
        {"messages": ["secret"] * 100_000},
        {"messages": [USER], "tool_choice": "secret" * 100_000},
        {"prompt": ["secret", {}] * 100_000},
        {"prompt": "hi", "stop": ["secret" * 100_000]},
        {"prompt": "hi", "secret" * 100_000: 1},
        {"prompt": "hi", "slo": "secret" * 100_000},
        {"prompt": "hi", "model": "secret" * 100_000},
        {"prompt": "hi", "temperature": "secret" * 100_000},
    ],
)
def test_a_huge_bad_body_is_answered_in_short(api: Api, body: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C11: of a name that is not known the beginning is told, and of a value nothing."""
    monkeypatch.setattr("server.Service.max_body_bytes", 2**22)
    answer = api.http.post(CHAT if "messages" in body else COMPLETIONS, json=body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 700
    assert "secret" * 30 not in answer.text
    check_alive(api)


def test_a_body_beyond_all_measure_is_cut_off(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.Service.max_body_bytes", 1000)
    assert "longer than 1000 bytes" in problem(api.post(COMPLETIONS, expect=413, prompt="x" * 1000))["message"]


def test_unknown_model_route_and_method(api: Api) -> None:
    """Case C10."""
    error = problem(api.post(COMPLETIONS, expect=404, prompt="hi", model="gpt-4"))
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    for method, path, status in (("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("GET", "/v1/models/no/such", 404)):
        answer = api.http.request(method, path)
        assert answer.status_code == status
        problem(answer.json())


def test_models(api: Api) -> None:
    [card] = api.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 100)
    assert api.http.get("/v1/models/fake").json() == card


def test_one_prompt_of_several_is_refused(api: Api) -> None:
    """Then the call is: what was submitted before is aborted."""
    problem(api.post(COMPLETIONS, expect=400, prompt=["a", "x" * 200]))
    assert api.engine.aborted == [api.engine.submitted[0].id]


# When the engine fails


@pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"]])
def test_a_failed_forward_is_a_500(api: Api, prompt: Any) -> None:
    api.engine.fail_after = 2
    error = api.post(COMPLETIONS, expect=500, prompt=prompt)["error"]
    assert error["type"] == "server_error"
    assert "NaN logits" in error["message"]
    check_alive(api)


def test_an_error_during_a_stream_is_its_last_event(api: Api) -> None:
    api.engine.fail_after = 2
    *pieces, last = api.raw_stream(COMPLETIONS, prompt="hi")
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "He"
    assert last["error"]["type"] == "server_error"
    check_alive(api)


def test_an_engine_that_has_crashed_is_not_healthy(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.engine, "accepting", False)
    monkeypatch.setattr(api.engine, "error", "prefill-0 has crashed")
    health = api.http.get("/health")
    assert (health.status_code, health.text) == (503, "prefill-0 has crashed")
    assert api.post(COMPLETIONS, expect=503, prompt="hi")["error"]["message"] == "prefill-0 has crashed"


def test_a_bug_is_a_500_that_tells_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.engine, "submit", lambda *_, **__: 1 / 0)
    error = api.post(COMPLETIONS, expect=500, prompt="hi")["error"]
    assert error == {"message": "internal error", "type": "server_error", "param": None, "code": None}


# Who leaves is aborted


def leave(api: Api, path: str, *, after: bytes, **fields: Any) -> None:
    """Send a call, read until the answer contains `after`, and hang up."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while after not in received:
            received += connection.recv(4096)
        wait_until(lambda: bool(api.engine.submitted))


async def call_until(left: asyncio.Event, app: Starlette, path: str, body: Json) -> None:
    """A call in this event loop, whose client is gone as soon as `left` is set."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Json:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    await app({"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}, receive, send)


@pytest.mark.parametrize(
    ("tokens", "stream", "after"),
    [(0, False, b""), (3, False, b""), (0, True, b"200 OK"), (3, True, b'"text":"l"')],
    ids=["waiting", "waiting after tokens", "before the first token", "in the middle of a stream"],
)
def test_who_leaves_is_aborted(api: Api, tokens: int, stream: bool, after: bytes) -> None:
    """Cases B1 and B5, as far as the server goes; what then becomes of the blocks is below."""
    api.engine.hang_after = tokens
    leave(api, COMPLETIONS, after=after, prompt=["a", "b"], stream=stream)
    wait_until(lambda: sorted(api.engine.aborted) == [request.id for request in api.engine.submitted])
    wait_until(lambda: api.service.calls.idle)
    check_alive(api)


@pytest.mark.parametrize("system", ["flowprefill", "sarathi", "layered"])
@pytest.mark.parametrize("at", ["started", "token"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_blocks_of_who_leaves_are_free_within_one_step(system: str, at: str, stream: bool) -> None:
    """Cases B1 and B7, with the real engine: what runs ends at a gate or with its step, and nothing more is started."""
    with Lab(system) as lab:
        app = create_app(Service(lab.engine, TextCodec(byte_tokenizer(), None, SPECIAL), "fake"))
        body = {"prompt": [5] * 50, "max_tokens": 40, "stream": stream}
        left = asyncio.Event()
        call = lab.loop.create_task(call_until(left, app, COMPLETIONS, body))
        lab.step_until(at)
        assert sum(instance.quota.used for instance in lab.engine.instances) > 0
        gone = lab.now
        left.set()
        one_pass = 20 * (0.0001 + 0.0001 * 51)
        lab.run(one_pass)
        assert call.done() and lab.engine.idle
        assert [instance.quota.used for instance in lab.engine.instances] == [0] * len(lab.engine.instances)
        assert [event for event in lab.events if event.kind == Kind.STARTED and event.time > gone] == []


def test_a_call_that_finished_is_not_aborted(api: Api) -> None:
    api.complete()
    api.stream(CHAT, messages=[USER])
    leave(api, COMPLETIONS, after=b"[DONE]", prompt="hi", stream=True)
    wait_until(lambda: api.service.calls.idle)
    assert len(api.engine.submitted) == 3
    assert api.engine.aborted == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_who_leaves_while_the_prompt_is_tokenised_never_reaches_the_engine(path: str) -> None:
    """Case B5: the tokenising goes on for ever, unless it is ended by the client's leaving."""
    engine = FakeEngine()

    class Slow(TextCodec):
        async def encode(self, *_: object) -> list[int]:
            left.set()
            return await asyncio.Event().wait()  # type: ignore[return-value]

        encode_chat = encode

    left = asyncio.Event()
    slow = Slow(byte_tokenizer(), None, SPECIAL)
    app = create_app(Service(engine, slow, "fake"))  # type: ignore[arg-type]
    asyncio.run(call_until(left, app, path, {"prompt": "hi"} if path == COMPLETIONS else {"messages": [USER]}))
    assert left.is_set()
    assert engine.submitted == []


# Drain and metrics


def test_a_draining_server_finishes_what_it_has_and_takes_no_more(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    with httpx.Client(base_url=api.url, timeout=60) as client:
        api.engine.hang_after = 3
        with client.stream("POST", COMPLETIONS, json={"prompt": "hi", "stream": True}) as running:
            monkeypatch.setattr(api.service.calls, "draining", True)
            assert api.http.get("/health").status_code == 503
            assert api.post(COMPLETIONS, expect=503, prompt="hi")["error"]["type"] == "service_unavailable"
            assert api.http.get("/v1/models").status_code == 200
            api.engine.hang_after = None
            assert running.read().endswith(b"data: [DONE]\n\n")
    assert api.engine.aborted == []


def test_calls_that_a_drain_gives_up_are_told(api: Api) -> None:
    api.engine.hang_after = 3
    with api.http.stream("POST", COMPLETIONS, json={"prompt": "hi", "stream": True}) as running:
        wait_until(lambda: bool(api.engine.submitted))
        api.service.calls.abort_all()
        last = running.read().decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable"
    wait_until(lambda: api.service.calls.idle)


def test_a_second_signal_ends_what_is_running(api: Api) -> None:
    calls = Calls()
    server = DrainingServer(create_app(api.service), calls, drain_seconds=3600)
    running = Generation(
        api.service.engine, codec(), [[1], [2]], sampling=Sampling(), slo=SLO(), label="", stop=[]
    )  # nobody reads it, so it does not finish
    calls.begin(running)

    def tick() -> bool:
        return asyncio.run(server.on_tick(1))

    assert not tick()
    server.handle_exit(signal.SIGTERM, None)
    assert calls.draining
    assert not tick()
    assert api.engine.aborted == []
    server.handle_exit(signal.SIGTERM, None)
    assert not tick()  # its client is being told
    assert sorted(set(api.engine.aborted)) == [request.id for request in api.engine.submitted]
    calls.end(running)
    assert tick()


def read_metrics(text: str) -> dict[str, float]:
    samples = {}
    announced = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            announced.add(line.split()[2])
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            family = name.partition("{")[0]
            assert {family, family.rsplit("_", 1)[0]} & announced, line
            assert family.startswith("layby_")
            samples[name] = float(value)
    return samples


def test_metrics_over_http(api: Api) -> None:
    answer = api.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = read_metrics(answer.text)
    assert samples['layby_kv_blocks_used{instance="prefill-0"}'] == 3
    assert samples['layby_kv_blocks_limit{instance="decode-0"}'] == 70
    assert samples['layby_late_signals_total{instance="prefill-0"}'] == 2


def test_metrics_count_what_happened() -> None:
    now = 0.0
    timeline = Timeline(lambda: now)
    metrics = PrometheusMetrics()
    timeline.add(metrics)

    def happens(kind: Kind, request: Request | None = None, at: float = 0.0, **more: Any) -> None:
        timeline.record(kind, request=request, time=at, **more)

    two = Request(0, [1] * 10, Sampling(n=2), arrival=1.0)
    other, stuck = Request(1, [1]), Request(2, [1])
    for request in (two, other, stuck):
        happens(Kind.ARRIVED, request, 1.0)
    happens(Kind.PARK_REQUESTED, at=1.1, instance="prefill-0", drive=7)
    happens(Kind.PARKED, at=1.104, instance="prefill-0", drive=7)
    happens(Kind.FIRST_TOKEN, two, 1.2)
    happens(Kind.TOKEN, two, 1.25, index=0)
    happens(Kind.TOKEN, two, 1.28, index=1)  # 80 ms after its first token, not 30 after its sibling's
    happens(Kind.TOKEN, two, 1.29, index=0)
    happens(Kind.FINISHED, two, 1.3)
    happens(Kind.ABORTED, other, 1.3)

    samples = read_metrics(metrics.render(FakeEngine()))  # type: ignore[arg-type]
    assert samples['layby_requests_total{outcome="finished"}'] == 1
    assert samples['layby_requests_total{outcome="aborted"}'] == 1
    assert samples['layby_requests_total{outcome="failed"}'] == 0
    assert samples['layby_requests{state="waiting"}'] == 1
    assert samples["layby_parks_total"] == 1
    assert samples["layby_prompt_tokens_total"] == 10
    assert samples["layby_generated_tokens_total"] == 5
    assert samples['layby_ttft_seconds_bucket{le="0.1"}'] == 0
    assert samples['layby_ttft_seconds_bucket{le="0.25"}'] == 1
    assert samples['layby_ttft_seconds_bucket{le="+Inf"}'] == samples["layby_ttft_seconds_count"] == 1
    assert samples["layby_ttft_seconds_sum"] == pytest.approx(0.2)
    assert samples['layby_tbt_seconds_bucket{le="0.025"}'] == 0
    assert samples['layby_tbt_seconds_bucket{le="0.05"}'] >= 1
    assert samples['layby_tbt_seconds_bucket{le="0.1"}'] == samples["layby_tbt_seconds_count"] == 3
    assert samples['layby_park_blocking_seconds_bucket{le="0.002"}'] == 0
    assert samples['layby_park_blocking_seconds_bucket{le="0.005"}'] == 1


# The command line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--slo-class", "chat"], "name=ttft_ms,tbt_ms"),
        (["--default-slo", "nope"], "--default-slo nope: no such class"),
        (["--default-max-tokens", "0"], "--default-max-tokens must be at least 1, got 0"),
        (["--drain-seconds", "-1"], "--drain-seconds must be 0 or more, got -1"),
        (["--port", "70000"], "cannot listen on 127.0.0.1 port 70000"),
        (["--trace", "/no/such/folder/file"], "/no/such/folder/file"),
        (["--model", "toy", "--preempt", "sometimes"], "sometimes"),
        (["--model", "toy", "--max-batch", "0"], "max_batch must be at least 1, got 0"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--model", "toy", "--kv-gib", "inf"], "--kv-gib must be a number of GiB, 0 or more, got inf"),
        (["--model", "toy", "--park-gib", "nan"], "--park-gib must be a number of GiB, 0 or more, got nan"),
        (["--model", "toy", "--prefill-threads", "100000"], "--prefill-threads 100000 is more than the"),
        (["--model", "toy", "--run-ahead", "2"], "--run-ahead has no meaning on a CPU"),
        (["--model", "toy", "--decode-device", "cpu"], "--decode-device cpu is where the prefills run"),
    ],
)
def test_bad_options_end_at_once(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--port", "0", *options])
    assert exit.value.code == 2
    assert says in capsys.readouterr().err


def test_a_prompt_that_no_context_could_hold_is_refused_before_it_is_tokenised(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr("engine.text.TextCodec._encode", never)
    too_long = "x" * 20_000
    says = problem(api.post(COMPLETIONS, expect=400, prompt=too_long))["message"]
    assert "20000 characters" in says
    says = problem(api.post(CHAT, expect=400, messages=[{"role": "user", "content": too_long}]))["message"]
    assert "characters, and the context of" in says


def test_a_call_that_is_being_tokenised_counts_as_under_way() -> None:
    calls = Calls()
    assert calls.idle
    with calls.preparing():
        assert not calls.idle
    assert calls.idle
