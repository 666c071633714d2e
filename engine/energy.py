"""What serving takes in joules: a static power, so much for each FLOP, and so much for each byte that is moved.

The coefficients are a device's (engine/hardware.py), the FLOPs and bytes those that were counted (engine/counters.py).
"""

from __future__ import annotations

from engine.counters import Counters
from engine.hardware import DeviceSpec


def joules(device: DeviceSpec, devices: int, seconds: float, counters: Counters) -> float:
    """Of `devices` of them that were up for so many seconds and together did what `counters` says."""
    static = devices * device.static_watts * seconds
    return static + device.joules_per_flop * counters.flops + device.joules_per_byte * counters.bytes
