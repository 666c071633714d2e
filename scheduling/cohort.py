"""The requests that cross the layers together, led by their head, and how far they have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from scheduling.order import Candidate
from scheduling.plan import Group, Share
from scheduling.predictor import Extent
from scheduling.request import Request


class Phase(Enum):
    RUNNING = "running"
    PARKING = "parking"  # asked to pull over; exactly one reply will come
    PARKED = "parked"  # suspended inside a slice, or between two layer groups


@dataclass(eq=False, slots=True)
class Cohort:
    """Shares of some prompts on their way through the layers, in one slice for each of `groups`.

    `members` loses those who abort; the shares, already on the device, keep their rows. `group` counts the slices done,
    `inside` is the fraction of the present one's operators that have been passed, in [0, 1].
    """

    id: int
    shares: tuple[Share, ...]
    members: list[Request]
    groups: Sequence[Group]
    predicted: float  # seconds, of all slices together
    later: float = 0.0  # predicted seconds of the passes that the head still needs after this one
    phase: Phase = Phase.RUNNING
    group: int = 0
    inside: float = 0.0
    held_bytes: int = 0  # what it keeps alive while parked: activations and blocks

    @property
    def head(self) -> Request:
        return self.members[0]

    @property
    def abandoned(self) -> bool:
        """Nobody waits for its results any more."""
        return not self.members

    @property
    def layers(self) -> Group:
        """The layers [first, last) of the present slice."""
        return self.groups[self.group]

    @property
    def last_slice(self) -> bool:
        """Whether the present slice ends with the model's last layer, so that first tokens can be sampled."""
        return self.group == len(self.groups) - 1

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.shares)

    @property
    def extents(self) -> list[Extent]:
        return [share.extent for share in self.shares]

    @property
    def remaining(self) -> float:
        """Predicted seconds left: by layers and operators done, not by wall time, so a park costs nothing."""
        first, last = self.layers
        done = (first + self.inside * (last - first)) / self.groups[-1][1]
        return self.predicted * (1.0 - done)

    @property
    def candidate(self) -> Candidate:
        """The cohort as an order sees it: its head, with all that stands between it and its first token."""
        return Candidate(self.head, self.remaining + self.later)
