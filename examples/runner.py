"""Carry out the runs of an experiment: on all cores, each once, never again what the cache file knows.

The cache is a file of JSON lines, a finished run each, written as they come: an experiment that was interrupted goes on
where it was.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import TextIO

from examples.experiment import Run
from examples.results import ATTAINMENT, Record

Carry = Callable[[Run], Awaitable[Record]]


class Cache:
    """Records of finished runs by their keys. A last line cut short by a crash is no record, nor is a damaged one."""

    def __init__(self, path: Path) -> None:
        """OSError if the file cannot be read or written."""
        self._records: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", encoding="utf-8", errors="replace")  # until close()
        self._file.seek(0)
        content = self._file.read()
        for line in content.splitlines():
            try:
                entry = json.loads(line)
                key, record = entry["key"], entry["record"]
                if set(ATTAINMENT.values()) <= set(record):
                    self._records[key] = dict(record)
            except (ValueError, KeyError, TypeError):
                continue
        if content and not content.endswith("\n"):
            self._file.write("\n")

    def get(self, run: Run) -> Record | None:
        """Under the name that the system has this time."""
        record = self._records.get(run.key)
        return None if record is None else {**record, **run.identity}

    def add(self, run: Run, record: Record) -> None:
        self._records[run.key] = record
        self._file.write(json.dumps({"key": run.key, "record": record}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Cores:
    """Carries runs out beside this process, `workers` at a time. One worker is a thread of this process."""

    def __init__(self, carry: Callable[[Run], Record], workers: int) -> None:
        self._carry = carry
        self._workers = workers
        self._pool: Executor | None = None

    async def __call__(self, run: Run) -> Record:
        if self._pool is None:
            self._pool = self._start()
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._carry, run)

    def _start(self) -> Executor:
        if self._workers == 1:
            return ThreadPoolExecutor(1)
        # Spawned, since a forked process would inherit torch's threads as they happen to stand.
        return ProcessPoolExecutor(self._workers, mp_context=multiprocessing.get_context("spawn"))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class OneAtATime:
    """Carries runs out in this process, in real time."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry
        self._free = asyncio.Lock()

    async def __call__(self, run: Run) -> Record:
        async with self._free:
            return await self._carry(run)


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Runner:
    """`await runner(run)` gives the run's record. `records` are all of them, by the runs' keys and systems' names."""

    def __init__(self, carry: Carry, cache: Cache, progress: Progress) -> None:
        self.records: dict[tuple[str, str], Record] = {}
        self._carry = carry
        self._cache = cache
        self._progress = progress
        self._pending: dict[tuple[str, str], asyncio.Task[Record]] = {}

    async def __call__(self, run: Run) -> Record:
        name = run.variant.name, run.key
        if name not in self._pending:
            self._pending[name] = asyncio.create_task(self._once(run))
            self._progress.asked()
        return await self._pending[name]

    async def _once(self, run: Run) -> Record:
        record = self._cache.get(run)
        if record is None:
            record = await self._carry(run)
            self._cache.add(run, record)
            self._progress.done(fresh=True)
        else:
            self._progress.done(fresh=False)
        self.records[run.variant.name, run.key] = record
        return record


class Progress:
    """How many runs are done: one line that keeps changing on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, noun: str = "runs", stream: TextIO | None = None) -> None:
        self._noun = noun
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._began = self._shown = monotonic()
        self._asked = self._done = self._fresh = 0

    def asked(self) -> None:
        self._asked += 1

    def done(self, *, fresh: bool) -> None:
        self._done += 1
        self._fresh += fresh
        now = monotonic()
        if now - self._shown >= (0.1 if self._terminal else 10.0):
            self._shown = now
            self._stream.write(("\r" if self._terminal else "") + self.line() + ("" if self._terminal else "\n"))
            self._stream.flush()

    def line(self) -> str:
        seconds = monotonic() - self._began
        known = f", {self._done - self._fresh} known before" if self._done > self._fresh else ""
        return f"{self._done}/{self._asked} {self._noun}{known}, {seconds:.0f} s"

    def close(self) -> None:
        self._stream.write(("\r" if self._terminal else "") + self.line() + "\n")
        self._stream.flush()
