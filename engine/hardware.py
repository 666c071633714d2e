"""Devices as data: what they can do, where the figures are from, and how long an operator takes on one.

    seconds = max(kernels * launch, FLOPs / (peak * efficiency), bytes / (bandwidth * efficiency)) + all-reduce

A roofline (Williams et al., CACM 2009) over the launching of the kernels: in eager mode, with a gate that bounds how
far kernels are queued ahead, an operator takes at least as long as the host needs to launch it.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.costs import Operator, Volume


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator. Efficiencies are shares of the peak that real kernels reach."""

    name: str
    source: str
    peak_flops: float  # dense bfloat16, FLOP/s
    bandwidth: float  # of its memory, bytes/s
    link_bandwidth: float  # to its neighbours, bytes/s each way
    memory_bytes: float
    matmul_efficiency: float
    attention_efficiency: float
    bandwidth_efficiency: float
    link_efficiency: float
    link_latency: float  # seconds, of one collective or one transfer
    launch: float  # seconds of host time for each kernel
    step: float  # seconds of host time for each forward pass: scheduling, inputs, sampling, the reply
    idle_watts: float
    joules_per_flop: float
    joules_per_byte: float

    def seconds(self, operator: Operator, volume: Volume, tp: int = 1) -> float:
        """Of one operator on each of `tp` such devices."""
        efficiency = self.attention_efficiency if operator.flops_per_pair else self.matmul_efficiency
        return max(
            operator.kernels * self.launch,
            operator.flops(volume) / (self.peak_flops * efficiency),
            operator.bytes(volume) / (self.bandwidth * self.bandwidth_efficiency),
        ) + self.reduction(operator.reduced_bytes_per_row * volume.rows, tp)

    def reduction(self, size: float, tp: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes: each rank sends 2 (tp - 1) / tp of them."""
        if not size:
            return 0.0
        return self.link_latency + 2 * (tp - 1) / tp * size / (self.link_bandwidth * self.link_efficiency)

    def transfer(self, size: float) -> float:
        """Seconds to hand `size` bytes over to a neighbour."""
        return self.link_latency + size / (self.link_bandwidth * self.link_efficiency)


DEVICES: dict[str, DeviceSpec] = {
    "a800-80g": DeviceSpec(
        name="A800-80G",
        source="NVIDIA data sheet",
        peak_flops=312e12,
        bandwidth=2.039e12,
        link_bandwidth=200e9,
        memory_bytes=80e9,
        matmul_efficiency=0.64,
        attention_efficiency=0.6,
        bandwidth_efficiency=0.8,
        link_efficiency=0.8,
        link_latency=30e-6,
        launch=56e-6,
        step=0.007,
        idle_watts=90,
        joules_per_flop=1.5e-12,
        joules_per_byte=31e-12,
    ),
}


def device(name: str) -> DeviceSpec:
    """The device called `name`. ValueError names those there are."""
    try:
        return DEVICES[name]
    except KeyError:
        raise ValueError(f"no device called {name!r}; there are: {', '.join(DEVICES)}") from None
