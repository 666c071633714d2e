"""All cores of this machine, for figures: the same work is done once, and nothing is kept for the next command."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Hashable
from concurrent.futures import ProcessPoolExecutor
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Workers:
    """`await workers(function, *arguments)` in another process. The function is one of a module, the arguments can be
    hashed: a call that was made before gives the same result again."""

    def __init__(self, count: int | None = None) -> None:
        # Spawned, since a forked process would inherit torch's threads as they happen to stand.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count or cores(), mp_context=spawn, initializer=end_with_parent)
        self._calls: dict[tuple[Hashable, ...], asyncio.Future[Any]] = {}

    async def __call__(self, function: Callable[..., T], *arguments: Hashable) -> T:
        call = (function, *arguments)
        if call not in self._calls:
            self._calls[call] = asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        return cast(T, await self._calls[call])

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """However it ends: one that is killed does not tell its workers, who would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
