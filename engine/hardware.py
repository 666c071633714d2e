"""Devices as data: what they can do, and where each figure is from.

    seconds = max(kernels * launch, FLOPs / (peak * efficiency), bytes / (bandwidth * efficiency)) + all-reduce

A roofline (Williams et al., CACM 2009) with a floor: a gate bounds how far kernels are queued ahead, so an operator
takes at least as long as the host needs to launch it. engine/roofline.py puts a model on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.costs import Operator, Volume


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator and the host beside it. Efficiencies are shares of the peak that real kernels reach."""

    name: str
    source: str
    peak_flops: float  # dense bfloat16, per second
    bandwidth: float  # of its memory, bytes per second
    link_bandwidth: float  # to its neighbours, bytes per second each way
    memory_bytes: float
    matmul_efficiency: float
    grouped_efficiency: float  # of the experts' products
    attention_efficiency: float
    bandwidth_efficiency: float
    link_efficiency: float
    link_latency: float  # seconds, of one collective or one transfer
    launch: float  # seconds of host time for each kernel
    decode_launch: float  # the same where only decode rows are computed: less with CUDA graphs
    step: float  # seconds of host time for each forward pass: scheduling, inputs, draws, the way to the client
    static_watts: float  # whatever it does
    joules_per_flop: float
    joules_per_byte: float

    def __post_init__(self) -> None:
        for name in ("peak_flops", "bandwidth", "link_bandwidth", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"device {self.name}: {name} must be above 0, got {getattr(self, name)}")
        for name in ("matmul", "grouped", "attention", "bandwidth", "link"):
            name = f"{name}_efficiency"
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"device {self.name}: {name} must be above 0 and at most 1, got {getattr(self, name)}")

    def seconds(self, operator: Operator, volume: Volume, tp: int = 1) -> float:
        """Of one operator on each of `tp` such devices."""
        return self.seconds_of(operator, tp)(volume)

    def seconds_of(self, operator: Operator, tp: int = 1) -> Callable[[Volume], float]:
        """The same as a function of the volume; what does not depend on it is worked out once."""
        efficiency = self.attention_efficiency if operator.flops_per_pair else self.matmul_efficiency
        flops_rate = self.peak_flops * (self.grouped_efficiency if operator.grouped else efficiency)
        bytes_rate = self.bandwidth * self.bandwidth_efficiency
        launch, decode_launch = operator.kernels * self.launch, operator.kernels * self.decode_launch
        row_compute, pair_compute = operator.flops_per_row / flops_rate, operator.flops_per_pair / flops_rate
        weights, coverage = operator.weight_bytes / bytes_rate, operator.coverage
        row_moves, key_moves = operator.bytes_per_row / bytes_rate, operator.bytes_per_key / bytes_rate
        reduced = operator.reduced_bytes_per_row

        def seconds(volume: Volume) -> float:
            rows, pairs, keys, sequences, _, alike = volume
            alone = max(
                decode_launch if rows == sequences else launch,
                row_compute * rows + pair_compute * pairs,
                weights * coverage(rows - alike) + row_moves * rows + key_moves * keys,
            )
            return alone + self.all_reduce(reduced * rows, tp) if reduced else alone

        return seconds

    def all_reduce(self, size: float, tp: int) -> float:
        """Seconds to sum `size` bytes over `tp` devices in a ring: each sends 2 (tp - 1) / tp of them."""
        return self.transfer(2 * (tp - 1) / tp * size) if size else 0.0

    def transfer(self, size: float) -> float:
        """Seconds to move `size` bytes to a neighbour."""
        return self.link_latency + size / (self.link_bandwidth * self.link_efficiency)


# Fitted by `python -m examples.calibrate` to the prefill of Llama-3.1-8B on A800 in FlowPrefill's published log (vLLM,
# eager, seen from the client): 128, 746 and 4,982 tokens, one length for each regime of the roofline. Errors on the
# lengths left out: -4.7 % (1,737), -6.5 % (2,458), +0.1 % (3,874).
_LAUNCH, _STEP, _MATMUL_EFFICIENCY = 24.1e-6, 12.2e-3, 0.721

# Fitted by the same command to Qwen3-30B-A3B on two H100 (TP2) under the engine of Layered Prefill's authors, a
# nano-vLLM: their figure 2, a prompt of 8,192 tokens in chunks of 512 to 8,192, time in and outside the experts' part.
# Ten times read off a plot, five figures, errors up to 3.8 %; none of it was measured with layers in groups. What one
# prompt takes outside the experts however it is cut is called attention here: the plot cannot tell it from the rest.
_GROUPED_EFFICIENCY = 0.268
_NANO_VLLM = {
    "launch": 19.3e-6,
    "step": 0.90e-3,
    "grouped_efficiency": _GROUPED_EFFICIENCY,
    "attention_efficiency": 0.120,
    "bandwidth_efficiency": 0.593,
}
# Fitted by `python -m examples.calibrate_serving` to the same authors' runs of chunked prefill on arXiv: the time that
# a request decodes, and the energy at two chunk sizes. None of these was measured with layers in groups either. 7.5 us
# a kernel is what a small one takes on the device where nobody has to launch it.
_NANO_VLLM_SERVING = {"decode_launch": 7.5e-6, "static_watts": 245, "joules_per_flop": 0.435e-12}

_A100 = DeviceSpec(
    name="A100-80G",
    source=(
        "peak, bandwidths, memory: NVIDIA A100 80GB SXM data sheet (NVLink 600 GB/s in both directions together). "
        "launch, step, matmul_efficiency: fitted, see above; that the host's share is the same in prefill and decode "
        "is an assumption. attention_efficiency: FlashAttention-2 forward, causal, head size 128, 2K to 8K tokens "
        "(arXiv:2307.08691, figure 5). grouped_efficiency: as fitted on H100, see above. bandwidth_efficiency, "
        "link_efficiency: assumed. link_latency: small all-reduces over NVLink in nccl-tests take 10 to 30 us. Energy: "
        "a fifth of the 400 W limit is static (assumed), a byte takes 31 pJ (HBM2, 3.9 pJ a bit: O'Connor et al., "
        "MICRO 2017), and a FLOP what is left at the limit."
    ),
    peak_flops=312e12,
    bandwidth=2.039e12,
    link_bandwidth=300e9,
    memory_bytes=80e9,
    matmul_efficiency=_MATMUL_EFFICIENCY,
    grouped_efficiency=_GROUPED_EFFICIENCY,
    attention_efficiency=0.6,
    bandwidth_efficiency=0.8,
    link_efficiency=0.8,
    link_latency=20e-6,
    launch=_LAUNCH,
    decode_launch=_LAUNCH,
    step=_STEP,
    static_watts=80,
    joules_per_flop=320 / (312e12 * _MATMUL_EFFICIENCY),
    joules_per_byte=31e-12,
)
_H100 = replace(
    _A100,
    name="H100-80G",
    source=(
        "peak, bandwidths, memory: NVIDIA H100 SXM data sheet (NVLink 900 GB/s in both directions together). Host "
        "times and efficiencies as on A100: assumed. attention_efficiency: FlashAttention-3 (arXiv:2407.08608). Energy "
        "as for A100, with the limit of 700 W."
    ),
    peak_flops=989e12,
    bandwidth=3.35e12,
    link_bandwidth=450e9,
    static_watts=140,
    joules_per_flop=560 / (989e12 * _MATMUL_EFFICIENCY),
)

DEVICES: dict[str, DeviceSpec] = {
    "a100-80g": _A100,
    "a800-80g": replace(
        _A100,
        name="A800-80G",
        source=f"an A100 whose NVLink is cut to 400 GB/s in both directions together. {_A100.source}",
        link_bandwidth=200e9,
    ),
    "h100-80g": _H100,
    "h100-80g-nano-vllm": replace(
        _H100,
        name="H100-80G, nano-vLLM",
        source=(
            f"an H100 as Layered Prefill was measured on, with decodes replayed as CUDA graphs. "
            f"{', '.join(_NANO_VLLM | _NANO_VLLM_SERVING)}: fitted, see above. {_H100.source}"
        ),
        **_NANO_VLLM,
        **_NANO_VLLM_SERVING,
    ),
    "h200": replace(
        _H100,
        name="H200",
        source=f"an H100 with 141 GB of HBM3e at 4.8 TB/s (NVIDIA H200 data sheet). {_H100.source}",
        bandwidth=4.8e12,
        memory_bytes=141e9,
    ),
}


def device(name: str) -> DeviceSpec:
    """The device called `name`. ValueError names those there are."""
    try:
        return DEVICES[name]
    except KeyError:
        raise ValueError(f"no device called {name!r}; there are: {', '.join(DEVICES)}") from None
