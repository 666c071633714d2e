"""Forward passes driven one at a time, for measuring: the engine's own executor and gates, without the engine."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Coroutine, Sequence
from itertools import count
from random import Random
from typing import Any, TypeVar

import torch

from engine.clock import LiveClock
from engine.config import EngineConfig
from engine.executor import Drive, Failed, Finished, Forwards, Reply, ThreadExecutor
from engine.gate import Gate
from engine.sampling import Draw
from engine.work import Part, Work
from kv.cache import KVCache
from models.decoder import Model
from scheduling.preempt import Preempt
from scheduling.request import Sampling

BLOCK_SIZE = 16

T = TypeVar("T")


class DriveFailed(RuntimeError):
    """The forward pass raised; the message is its traceback."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop, as the server does, or on asyncio's own loop where there is none."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class Driver:
    """One executor and a cache of `max_tokens` tokens. Make it inside a running event loop."""

    def __init__(self, model: Model, max_tokens: int, *, threads: int = 1) -> None:
        config = model.config
        self.model = model
        self.clock = LiveClock()
        blocks = -(-max_tokens // BLOCK_SIZE)
        shape = (config.num_kv_heads, config.head_dim)
        self.cache = KVCache(config.num_layers, blocks, BLOCK_SIZE, *shape, model.cache_dtype, model.device)
        self._forwards = Forwards(model, self.cache)
        self._executor = ThreadExecutor("driver", self.clock, self._forwards, threads=threads)
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()
        self._executor.on_reply = self._replies.put_nowait
        self._ids = count()

    @property
    def gates(self) -> int:
        """Gates of one forward pass."""
        return sum(len(self.model.layer_operators(i)) for i in range(self.model.config.num_layers))

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """Random token ids."""
        return Random(seed).choices(range(self.model.config.vocab_size), k=tokens)

    def gate(self, level: Preempt = Preempt.OPERATOR) -> Gate:
        return self._executor.gate(level)

    def prefill(self, prompt: Sequence[int], gate: Gate, *, first_block: int = 0) -> Drive:
        """A forward pass over a whole prompt, not yet started; it samples the first token, with five logprobs.

        K and V go to the blocks from `first_block` on: prefills under way together must not share any.
        """
        draws = (Draw(Sampling(logprobs=5), seed=0, index=0, position=len(prompt)),)
        layers, blocks = self.model.config.num_layers, tuple(range(first_block, self.cache.num_blocks))
        work = Work(layers, (Part(prompt, 0, blocks, draws),), last=layers)
        return self._forwards.drive(next(self._ids), work, gate)

    def start(self, drive: Drive) -> None:
        self._executor.start(drive)

    def resume(self, drive: Drive) -> None:
        self._executor.resume(drive)

    async def reply(self) -> Reply:
        """The next reply. Raises DriveFailed where the forward pass did."""
        reply = await self._replies.get()
        if isinstance(reply, Failed):
            raise DriveFailed(reply.error)
        return reply

    async def drive(self, drive: Drive) -> Reply:
        """Start a drive and wait for its reply."""
        self.start(drive)
        return await self.reply()

    async def seconds(self, prompt: Sequence[int], gate: Gate | None = None) -> float:
        """How long one prefill takes, from hand-off to reply."""
        drive = self.prefill(prompt, gate or self.gate())
        began = self.clock.now()
        return (await self.drive(drive)).time - began

    async def call(self, work: Coroutine[Any, None, T]) -> T:
        """Run any coroutine on the executor's thread."""
        reply = await self.drive(Drive(next(self._ids), work, Gate()))
        assert isinstance(reply, Finished)
        value: T = reply.value
        return value

    async def close(self) -> None:
        await self._executor.close()


def serving_threads() -> int:
    """Threads that a prefill instance gets on this machine."""
    return EngineConfig().threads()[0]


def describe(device: torch.device) -> dict[str, Any]:
    """What a figure was measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": str(device), "name": name, "cores": os.cpu_count(), "torch": torch.__version__}
