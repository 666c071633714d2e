"""A prompt of which only the length matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class Blank(Sequence[int]):
    """So many times token 0, without a list of them."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Blank: ...

    def __getitem__(self, index: int | slice) -> int | Blank:
        if isinstance(index, slice):
            return Blank(len(range(*index.indices(self._length))))
        if not -self._length <= index < self._length:
            raise IndexError(f"a prompt of {self._length} tokens has no token {index}")
        return 0
