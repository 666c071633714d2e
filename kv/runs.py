"""Free blocks as runs of consecutive ids, so that a sequence's cache can be read as one slice instead of a gather."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator


class FreeRuns:
    """The free ids of [0, num_blocks), kept as maximal runs. Deterministic: same calls, same ids.

    A run is found by length in O(log runs) and joined to its neighbours in O(1): the cost follows the number of runs,
    never the number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._size = 0
        self._length: dict[int, int] = {}  # first id of a run -> its length
        self._first: dict[int, int] = {}  # id just behind a run -> its first id
        self._by_length: list[tuple[int, int]] = []  # (length, first id), sorted
        self._add(0, num_blocks)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Free ids, run by run; for the integrity check."""
        for length, first in self._by_length:
            yield from range(first, first + length)

    def take(self, count: int, *, after: int | None = None, growth: int = 0) -> list[int]:
        """Remove `count` ids and return them, in as few pieces as is cheap to find: first the ids right behind `after`,
        then the shortest run that holds what is left, else the longest runs. The caller has checked that they exist.

        `growth` is how many ids will be wanted behind these later. Where a run is long enough for both, its end serves:
        the gap left there is a run of its own, too short to tempt anyone but the small.
        """
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            taken += self._take_from(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            at = bisect_left(self._by_length, (missing + growth, 0))
            if at < len(self._by_length):
                length, first = self._by_length[at]
                taken += self._take_from(first, missing, skip=length - missing - growth if growth else 0)
                continue
            at = bisect_left(self._by_length, (missing, 0))
            _, first = self._by_length[min(at, len(self._by_length) - 1)]
            taken += self._take_from(first, missing)
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Put ids back, each joined to the free runs on either side of it."""
        ordered = sorted(blocks)
        start = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                self._join(ordered[start], i - start)
                start = i

    def _join(self, first: int, length: int) -> None:
        stop = first + length
        if stop in self._length:
            length += self._remove(stop)
        if first in self._first:
            first = self._first[first]
            length += self._remove(first)
        self._add(first, length)

    def _take_from(self, first: int, count: int, skip: int = 0) -> range:
        """At most `count` ids of the run at `first`, behind its first `skip`."""
        stop = first + self._remove(first)
        if skip:
            self._add(first, skip)
        first += skip
        count = min(count, stop - first)
        if first + count < stop:
            self._add(first + count, stop - first - count)
        return range(first, first + count)

    def _add(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length] = first
        insort(self._by_length, (length, first))
        self._size += length

    def _remove(self, first: int) -> int:
        """Take the whole run at `first` out; returns its length."""
        length = self._length.pop(first)
        del self._first[first + length]
        del self._by_length[bisect_left(self._by_length, (length, first))]
        self._size -= length
        return length
