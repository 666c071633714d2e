"""How long forward passes take: what a simulation asks of a device. engine/roofline.py computes it from figures,
engine/machine.py from measurements."""

from __future__ import annotations

from typing import Protocol

from engine.course import Leg
from models.costs import Volume


class Timing(Protocol):
    """How long one model's forward passes take on one device, in seconds."""

    def before(self, volume: Volume) -> float:
        """From the start of a drive to its first layer: the host's work on a step, the embedding."""
        ...

    def legs(self, first: int, last: int, *volumes: Volume) -> list[Leg]:
        """The layers [first, last). The rows of all volumes share every operator, but attention computes each volume by
        itself: prefills are bound by arithmetic there, decodes by reading K and V (POD-Attention, arXiv:2410.18038)."""
        ...

    def after(self, volume: Volume) -> float:
        """From the last layer to the reply: final norm, head, draws."""
        ...

    def hand_over(self, tokens: int) -> float:
        """To copy the K and V of so many tokens from the device of a prefill instance to that of a decode instance."""
        ...

    def slowdown(self, volume: Volume) -> float:
        """How many times as long a pass takes while another instance on the same machine is busy."""
        ...


def pass_seconds(timing: Timing, num_layers: int, volume: Volume) -> float:
    """Of one forward pass in which all rows cross all layers."""
    layers = sum(leg.seconds for leg in timing.legs(0, num_layers, volume))
    return timing.before(volume) + layers + timing.after(volume)
