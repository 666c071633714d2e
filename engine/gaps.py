"""The times between the tokens of a request, kept until it ends and then folded to three numbers."""

from __future__ import annotations

import math
from array import array

import numpy as np
import numpy.typing as npt

# Tokens of one choice, as float64 [stretches, 3]: the first and the last of so many tokens, evenly spaced, and their
# number. Times are seconds on the engine's clock.
Stretches = npt.NDArray[np.float64]


class Gaps:
    """`values[i]` seconds lay between two tokens of one choice, `counts[i]` times. Memory: 16 bytes a value."""

    __slots__ = ("_last", "counts", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self.counts = array("d")
        self._last: dict[int, float] = {}  # choice -> when its latest token came

    def begin(self, choices: int, time: float) -> None:
        """The first token of every choice has come."""
        self._last = dict.fromkeys(range(choices), time)

    def add(self, index: int, time: float) -> None:
        """One more token of a choice."""
        if (before := self._last.get(index)) is not None:
            self.values.append(time - before)
            self.counts.append(1)
        self._last[index] = time

    def add_stretches(self, index: int, stretches: Stretches) -> None:
        """The next tokens of a choice."""
        first, last, tokens = stretches.T
        before = self._last.get(index)
        between = first[1:] - last[:-1] if before is None else first - np.concatenate(([before], last[:-1]))
        inside = np.flatnonzero(tokens > 1)
        within = (last[inside] - first[inside]) / (tokens[inside] - 1)
        self.values.frombytes(np.concatenate((between, within)).tobytes())
        self.counts.frombytes(np.concatenate((np.ones(len(between)), tokens[inside] - 1)).tobytes())
        self._last[index] = float(last[-1])

    def fold(self, percent: float) -> tuple[float, float, float] | None:
        """(mean, nearest-rank percentile, maximum) of all gaps; None if there is none.

        The percentile is a value that occurred, the same as engine.metrics.percentile has of the gaps one by one.
        """
        if not self.values:
            return None
        values, counts = np.frombuffer(self.values), np.frombuffer(self.counts)
        order = values.argsort()
        upto = counts[order].cumsum()
        at = order[upto.searchsorted(math.ceil(percent * upto[-1] / 100))]
        return float(values @ counts / upto[-1]), float(values[at]), float(values[order[-1]])
