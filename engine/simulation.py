"""A whole deployment in virtual time: the engine as it is, on simulated devices.

    rows = simulate(preset("flowprefill"), arrivals, Deployment(model="llama3-8b", hardware="a800-80g"))
    rows.results().total.ttft_attainment

Scheduler, proxy, instances, KV pools and timeline are the real ones; only the executors are simulated
(engine/simulated.py), by a cost model (models/costs.py) on a device (engine/hardware.py). Same arrivals, same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from engine.config import EngineConfig
from engine.counting import Counting
from engine.devices import Device
from engine.engine import Engine
from engine.errors import Refused
from engine.executor import Executor, Forwards
from engine.hardware import DeviceSpec, device
from engine.metrics import RequestRows
from engine.profile import SHAPES, Sample, fit
from engine.prompt import Blank
from engine.roofline import Roofline
from engine.simulated import SimulatedExecutor, Timing, pass_seconds
from engine.timeline import Sink
from engine.virtual import Stalled, VirtualLoop
from models.architectures import ARCHITECTURES
from models.config import ModelConfig
from models.costs import Volume, model_costs
from models.decoder import Model
from models.load import load_config
from scheduling.placement import Disaggregated
from scheduling.predictor import Extent, Predictor
from scheduling.presets import System
from scheduling.request import SLO, Sampling


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: `time` in seconds from the start, lengths in tokens."""

    time: float
    prompt_tokens: int
    output_tokens: int
    label: str = ""
    slo: SLO = field(default_factory=SLO)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the model runs on. Every instance has `tp` devices of its own.

    model      an architecture (models/architectures.py), whatever `load_model` takes, or a config
    hardware   a device of engine/hardware.py, by name or as a spec
    """

    model: str | ModelConfig = "llama3-8b"
    hardware: str | DeviceSpec = "a800-80g"
    tp: int = 1
    prefill_instances: int = 1
    decode_instances: int = 1
    memory_share: float = 0.9  # of a device's memory that weights, activations and KV may take
    activation_bytes: float = 2e9  # of that, set aside for a forward pass
    block_size: int = 256
    max_batch: int = 256  # choices in a decode step
    max_model_len: int = 0  # 0: what the model and the KV pool allow

    @property
    def config(self) -> ModelConfig:
        if isinstance(self.model, ModelConfig):
            return self.model
        return ARCHITECTURES[self.model] if self.model in ARCHITECTURES else load_config(self.model)

    @property
    def device(self) -> DeviceSpec:
        return self.hardware if isinstance(self.hardware, DeviceSpec) else device(self.hardware)

    @property
    def timing(self) -> Roofline:
        return Roofline(model_costs(self.config, tp=self.tp), self.device)

    @property
    def kv_blocks(self) -> int:
        """KV blocks of one instance: what its memory holds beside the weights. ValueError if that is none."""
        costs, device = model_costs(self.config, tp=self.tp), self.device
        room = device.memory_bytes * self.memory_share - costs.weight_bytes - self.activation_bytes
        blocks = int(room // (costs.kv_bytes_per_token * self.block_size))
        if blocks < 1:
            raise ValueError(
                f"{self.model} with tp {self.tp} leaves no memory for K and V on {device.name}: weights take "
                f"{costs.weight_bytes / 1e9:.1f} of {device.memory_bytes / 1e9:.1f} GB on each"
            )
        return blocks


_LONG: tuple[tuple[Extent, ...], ...] = tuple(((0, tokens),) for tokens in (4096, 8192, 12288, 16384, 20480))


def profile(timing: Timing, num_layers: int) -> Predictor:
    """The TTFT predictor that measuring such a device would give (engine/profile.py)."""
    samples = []
    for shape in (*SHAPES, *_LONG):
        total = Volume()
        for context, tokens in shape:
            total += Volume.of(context, tokens, drawn=1)
        samples.append(Sample(shape, pass_seconds(timing, num_layers, total)))
    return fit(samples)


def simulate(
    system: System,
    arrivals: Iterable[Arrival],
    deployment: Deployment,
    *,
    sinks: Sequence[Sink] = (),
    counters: bool = False,
    on_start: Callable[[Engine], None] = lambda engine: None,
) -> RequestRows:
    """Play `arrivals`, in order of their times, against `system` until the last has ended.

    `counters`: whether the COMPLETED events say what was read and computed (engine/counters.py), for one of the sinks.
    `on_start(engine)` is called when its instances stand, before the first arrival: to watch them.
    """
    loop = VirtualLoop()
    model = Model(deployment.config, torch.bfloat16, "meta")
    timing = deployment.timing

    def make_executor(name: str, threads: int, forwards: Forwards) -> Executor:
        return SimulatedExecutor(loop, timing, Counting(timing.costs) if counters else None)

    def device_of(kind: str, count: int) -> Device:
        blocks = deployment.kv_blocks
        return Device.of(model, deployment.block_size, count * blocks, {f"{kind}-{i}": blocks for i in range(count)})

    colocated = not isinstance(system.placement, Disaggregated)
    prefill, decode = deployment.prefill_instances, deployment.decode_instances
    devices = [device_of("colocated", prefill)]
    if not colocated:
        devices = [device_of("prefill", prefill), device_of("decode", decode)]
    engine = Engine(
        model,
        EngineConfig(
            system=system,
            predictor=profile(timing, model.config.num_layers),
            prefill_instances=prefill,
            decode_instances=1 if colocated else decode,
            block_size=deployment.block_size,
            max_batch=deployment.max_batch,
            max_model_len=deployment.max_model_len,
        ),
        devices=devices,
        clock=loop,
        make_executor=make_executor,
    )
    rows = RequestRows()
    engine.timeline.add(rows)
    for sink in sinks:
        engine.timeline.add(sink)
    loop.run_until_complete(engine.start())
    on_start(engine)
    _feed(loop, engine, iter(arrivals))
    with contextlib.suppress(Stalled):
        loop.run_until_complete(loop.create_future())
    loop.run_until_complete(engine.stop())
    loop.close()
    return rows


def _feed(loop: VirtualLoop, engine: Engine, arrivals: Iterator[Arrival]) -> None:
    """Submit the next arrival when it is due, then wait for the one behind it."""
    arrival = next(arrivals, None)
    if arrival is not None:
        loop.call_at(arrival.time, _submit, loop, engine, arrival, arrivals)


def _submit(loop: VirtualLoop, engine: Engine, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
    sampling = Sampling(max_tokens=arrival.output_tokens, ignore_eos=True)
    with contextlib.suppress(Refused):
        engine.submit(
            Blank(arrival.prompt_tokens), sampling=sampling, slo=arrival.slo, label=arrival.label, streamed=False
        )
    _feed(loop, engine, arrivals)
