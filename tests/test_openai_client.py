"""The whole server as users have it, a process of its own, driven by OpenAI's own client and by clients that die."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from server_helpers import wait_until

from models import smollm2
from models.hub import cache_dir

ROOT = Path(__file__).parent.parent


@contextmanager
def launched(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address. It is killed at the end, if it has not ended by itself."""
    command = [sys.executable, "server.py", "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()
            found = re.search(r"on (http://127\.0\.0\.1:\d+)$", greeting.strip())
            assert found, greeting
            yield process, found[1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with launched("--model", "toy", "--num-blocks", "4096", "--slo-class", "hasty=50,50") as (_, url):
        yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def blocks_in_use(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    return {name: float(used) for name, used in re.findall(r'layby_kv_blocks_used\{instance="(.+)"\} (\S+)', text)}


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "toy", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    ask["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**ask)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (16, 20)
    streamed = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in streamed[:-1]) == whole.choices[0].text
    assert streamed[-1].usage == whole.usage


@pytest.mark.parametrize("slo", [None, "chat", "hasty", {"ttft_ms": 250, "tbt_ms": 100}])
def test_a_chat_whole_and_streamed(client: openai.OpenAI, slo: Any) -> None:
    ask: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
    ask |= {"temperature": 0, "logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True, "slo": slo}}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 10
    streamed = list(client.chat.completions.create(**ask, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == whole.choices[0].message.content
    assert streamed[0].choices[0].delta.role == "assistant"
    assert streamed[-1].choices[0].finish_reason == "length"


def test_seeds_and_choices(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        reply = client.completions.create(model="toy", prompt="hi", n=3, seed=seed, temperature=1.5, max_tokens=12)
        return [choice.text for choice in reply.choices]

    first = texts(1)
    assert texts(1) == first
    assert texts(2) != first
    assert len(set(first)) == 3


def test_errors_are_what_the_client_expects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model="gpt-4", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
        client.completions.create(model="toy", prompt="hi", logit_bias={"5": 1})
    with pytest.raises(openai.BadRequestError, match=r"5000 tokens.* context of 4096"):
        client.completions.create(model="toy", prompt=[65] * 5000)
    with pytest.raises(openai.BadRequestError, match="token id 70000"):
        client.completions.create(model="toy", prompt=[70000])


def test_max_tokens_beyond_the_context_are_cut(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="toy", prompt=[65] * 4090, max_tokens=10**6, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.total_tokens == 4096


def test_32_at_a_time(url: str) -> None:
    """All kinds together: everyone gets what they would have got alone."""

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        prompt = [65 + number % 4] * (5, 700)[number % 8 == 0]
        ask: dict[str, Any] = {"model": "toy", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        ask["extra_body"] = {"ignore_eos": True, "slo": (None, "chat", "hasty")[number % 3]}
        if number % 2:
            return (await client.completions.create(**ask)).choices[0].text
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
        assert chunks[-1].choices[0].finish_reason == "length"
        return "".join(chunk.choices[0].text for chunk in chunks)

    async def alone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as client:
            return [await one(client, number) for number in range(8)]

    expected = asyncio.run(alone())
    assert asyncio.run(everyone()) == expected * 4
    assert set(blocks_in_use(url).values()) == {0}


def test_clients_that_die_leave_nothing_behind(url: str, client: openai.OpenAI) -> None:
    """At any moment: sending, tokenising, in the prefill, decoding; politely or not. Deaths come from one seed."""
    dice = random.Random(7)
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    aborted_before = metric(url, 'layby_requests_total{outcome="aborted"}')

    async def die(number: int) -> None:
        stream = number % 2 == 0
        prompt = "x" * dice.choice([20, 500, 3000])
        fields = {"prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": stream, "n": 1 + number % 2}
        fields["slo"] = dice.choice([None, "hasty", "file"])
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection(*address)
        if dice.random() < 0.1:  # in the middle of its own sentence
            writer.write(head + body[: len(body) // 2])
        else:
            writer.write(head + body)
        await writer.drain()
        await asyncio.sleep(dice.random() * 0.5)
        if dice.random() < 0.5:  # no goodbye: the connection is reset
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def all_die() -> None:
        await asyncio.gather(*(die(number) for number in range(40)))

    asyncio.run(all_die())
    assert client.completions.create(model="toy", prompt="still there?").choices[0].text
    states = ("waiting", "running", "parked", "handover", "decoding")
    wait_until(lambda: all(metric(url, f'layby_requests{{state="{state}"}}') == 0 for state in states))
    wait_until(lambda: set(blocks_in_use(url).values()) == {0})
    assert metric(url, 'layby_requests_total{outcome="aborted"}') >= aborted_before + 20
    assert metric(url, 'layby_requests_total{outcome="failed"}') == 0


def test_sigterm_drains(tmp_path: Path) -> None:
    """Who is being served is served to the end, newcomers are turned away, and the trace is whole."""
    trace = tmp_path / "trace.json"
    options = ("--model", "toy", "--num-blocks", "1024", "--served-model-name", "lorry", "--trace", str(trace))
    with launched(*options) as (process, url):
        ask = {"model": "lorry", "prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True, "slo": "chat"}
        with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=100) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "hi"})
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "service_unavailable"
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait() == 0
    recorded = json.loads(trace.read_text())["traceEvents"]
    assert {"prefill-0", "decode-0"} <= {each["args"]["name"] for each in recorded if each["name"] == "thread_name"}
    assert "finished" in {each["name"] for each in recorded}


def test_a_client_that_reads_nothing_does_not_keep_the_server_from_ending() -> None:
    with launched("--model", "toy", "--num-blocks", "512", "--drain-seconds", "0") as (process, url):
        address = urlsplit(url)
        body = json.dumps({"prompt": [1], "max_tokens": 3500, "logprobs": 20, "stream": True, "ignore_eos": True})
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((address.hostname, address.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            deaf.sendall((head + body).encode())
            wait_until(lambda: 'state="decoding"} 1' in httpx.get(f"{url}/metrics").text)
            time.sleep(1)  # until its buffers are full
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.mark.skipif(smollm2.converted(cache_dir()) is None, reason="SmolLM2 is not on this machine")
def test_smollm2_speaks() -> None:
    with launched("--model", "smollm2", "--num-blocks", "256") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100)
        reply = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France? Answer in one word."}],
            max_tokens=12,
            temperature=0,
        )
        assert "Paris" in (reply.choices[0].message.content or "")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
