"""A sorted list that can pass over whole stretches of entries too large to be of use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from scheduling.order import Candidate, Rank

Key = tuple[Rank, int]  # rank and request id: no two places are alike


class Size(NamedTuple):
    """What a request asks of the slice it joins: tokens of its next share, and KV blocks it has yet to be given."""

    tokens: int
    blocks: int


@dataclass(slots=True)
class Room:
    """The largest that is of use: tokens of a share, KV blocks of a request."""

    tokens: float = inf
    blocks: float = inf


@dataclass(eq=False, slots=True)
class Place:
    """Where a waiting request stands in the queue: by `key`, until `changes`, when it has to be ranked anew."""

    candidate: Candidate
    size: Size
    key: Key | None = None  # None: not ranked yet
    changes: float = -inf


@dataclass(eq=False, slots=True)
class _Bucket:
    """Neighbours in the list, and the least that one of them asks for."""

    keys: list[Key] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    tokens: float = inf
    blocks: float = inf

    def insert(self, key: Key, place: Place) -> None:
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.places.insert(index, place)
        self.tokens = min(self.tokens, place.size.tokens)
        self.blocks = min(self.blocks, place.size.blocks)

    def remove(self, key: Key) -> None:
        index = bisect_left(self.keys, key)
        del self.keys[index]
        self._measure_without(self.places.pop(index).size)

    def split(self) -> _Bucket:
        """Cut off the rear half."""
        half = len(self.keys) // 2
        rear = _Bucket(self.keys[half:], self.places[half:])
        del self.keys[half:], self.places[half:]
        for bucket in (self, rear):
            bucket._measure()
        return rear

    def _measure_without(self, gone: Size) -> None:
        if gone.tokens == self.tokens or gone.blocks == self.blocks:
            self._measure()

    def _measure(self) -> None:
        self.tokens = min((place.size.tokens for place in self.places), default=inf)
        self.blocks = min((place.size.blocks for place in self.places), default=inf)


class RankedList:
    """Places sorted by key, in buckets of up to `2 * bucket`.

    To add or remove one takes two bisections and a move within a bucket. Walking the list within a `Room` looks at one
    number of a bucket in which nobody fits, and not at its places.
    """

    def __init__(self, bucket: int = 64) -> None:
        self._half = bucket
        self._buckets: list[_Bucket] = []
        self._last: list[Key] = []  # of each bucket

    def __len__(self) -> int:
        return sum(len(bucket.keys) for bucket in self._buckets)

    def add(self, key: Key, place: Place) -> None:
        if not self._buckets:
            self._buckets.append(_Bucket())
            self._last.append(key)
        index = min(bisect_left(self._last, key), len(self._buckets) - 1)
        bucket = self._buckets[index]
        bucket.insert(key, place)
        self._last[index] = bucket.keys[-1]
        if len(bucket.keys) > 2 * self._half:
            rear = bucket.split()
            self._buckets.insert(index + 1, rear)
            self._last[index : index + 1] = [bucket.keys[-1], rear.keys[-1]]

    def remove(self, key: Key) -> None:
        index = bisect_left(self._last, key)
        bucket = self._buckets[index]
        bucket.remove(key)
        if bucket.keys:
            self._last[index] = bucket.keys[-1]
        else:
            del self._buckets[index], self._last[index]

    def first(self) -> Place | None:
        return self._buckets[0].places[0] if self._buckets else None

    def within(self, room: Room) -> Iterator[Place]:
        """The places in order, without those for which there is no room. `room` is read anew for each, so it may shrink
        on the way; the list itself must not change."""
        for bucket in self._buckets:
            if bucket.tokens <= room.tokens and bucket.blocks <= room.blocks:
                for place in bucket.places:
                    if place.size.tokens <= room.tokens and place.size.blocks <= room.blocks:
                        yield place
