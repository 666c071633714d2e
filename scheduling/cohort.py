"""The requests that cross the layers together, led by their head, and how far they have come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduling.plan import Slice
from scheduling.request import Request


class Phase(Enum):
    RUNNING = "running"
    PARKING = "parking"  # asked to pull over; exactly one reply will come
    PARKED = "parked"


@dataclass(eq=False, slots=True)
class Cohort:
    """One slice on its way through the layers. `id` is also the id of its drive.

    `members` loses those who abort; the slice, already on the device, keeps their rows. `done` is the fraction of the
    drive's operators passed, in [0, 1].
    """

    id: int
    slice: Slice
    members: list[Request]
    predicted: float  # seconds, of the whole slice
    phase: Phase = Phase.RUNNING
    done: float = 0.0
    held_bytes: int = 0  # what it keeps alive while parked: activations and blocks

    @property
    def head(self) -> Request:
        return self.members[0]

    @property
    def abandoned(self) -> bool:
        """Nobody waits for its results any more."""
        return not self.members

    @property
    def remaining(self) -> float:
        """Predicted seconds left of this slice: by operators done, not by wall time, so a park costs nothing."""
        return self.predicted * (1.0 - self.done)
