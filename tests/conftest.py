"""What every test file may use."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads would only wait for each other

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import settings

from engine.lab import Lab
from kv.cache import KVCache

settings.register_profile("layby", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("layby")


def poison(cache: KVCache, blocks: list[int]) -> None:
    """Fill blocks with NaN."""
    for tensor in (*cache.key, *cache.value):
        tensor[blocks] = float("nan")


def poison_freed_blocks(lab: Lab) -> None:
    """Fill every block that returns to a pool with NaN, so that any later read of it shows in the tokens."""
    for device in lab.engine.devices:
        device.pool.on_block_free = partial(poison, device.cache)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """FlowPrefill on the counting model and virtual time, freed blocks poisoned, the books checked at the end."""
    with Lab("flowprefill") as lab:
        poison_freed_blocks(lab)
        yield lab
        lab.run()
        lab.check()
        assert lab.engine.idle
