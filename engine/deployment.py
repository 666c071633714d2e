"""What a simulated model runs on: which model, on which devices, in how many instances."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.devices import Device
from engine.hardware import DeviceSpec, device
from engine.profile import SHAPES, Sample, fit
from engine.roofline import Roofline
from engine.timing import Timing, pass_seconds
from models.architectures import ARCHITECTURES
from models.config import ModelConfig
from models.costs import ModelCosts, Volume, model_costs
from models.decoder import Model
from models.hub import ModelNotFound
from models.load import load_config
from scheduling.predictor import Extent, Predictor
from scheduling.presets import System

# Measured beyond what a laptop's profile has, as FlowPrefill's goes to 20,480 tokens.
_LONG: tuple[tuple[Extent, ...], ...] = tuple(((0, tokens),) for tokens in (4096, 8192, 12288, 16384, 20480))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Every instance, prefill or decode, has `tp` devices of its own. Co-located systems have `prefill_instances`.

    model      an architecture (models/architectures.py), whatever `load_model` takes, or a config
    hardware   a device of engine/hardware.py, by name or as a spec
    """

    model: str | ModelConfig = "llama3-8b"
    hardware: str | DeviceSpec = "a800-80g"
    tp: int = 1
    prefill_instances: int = 1
    decode_instances: int = 1
    memory_share: float = 0.9  # of a device's memory that weights, activations and KV may take, as in vLLM
    activation_bytes: float = 2e9  # of that, set aside for a forward pass
    block_size: int = 256  # tokens; what flash-attn's paged kernels want
    max_batch: int = 256  # choices in a decode step
    max_model_len: int = 0  # 0: what the model and the KV pool allow

    def __post_init__(self) -> None:
        for name in ("tp", "prefill_instances", "decode_instances", "block_size", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")

    @property
    def config(self) -> ModelConfig:
        if isinstance(self.model, ModelConfig):
            return self.model
        if self.model in ARCHITECTURES:
            return ARCHITECTURES[self.model]
        try:
            return load_config(self.model)
        except ModelNotFound:
            others = "toy, toy-moe, smollm2, an existing folder, or org/name of the hub"
            raise ModelNotFound(f"no model {self.model!r}: give {', '.join(ARCHITECTURES)}, {others}") from None

    @property
    def device(self) -> DeviceSpec:
        """ValueError for a name that no device has."""
        return self.hardware if isinstance(self.hardware, DeviceSpec) else device(self.hardware)

    @property
    def costs(self) -> ModelCosts:
        return model_costs(self.config, tp=self.tp)

    @property
    def timing(self) -> Roofline:
        return Roofline(self.costs, self.device)

    @property
    def kv_blocks(self) -> int:
        """KV blocks of one instance: what its memory holds beside the weights. ValueError if that is none."""
        costs, device = self.costs, self.device
        room = device.memory_bytes * self.memory_share - costs.weight_bytes - self.activation_bytes
        blocks = int(room // (costs.kv_bytes_per_token * self.block_size))
        if blocks < 1:
            raise ValueError(
                f"{self.model} with tp {self.tp} leaves no memory for K and V on {device.name}: weights take "
                f"{costs.weight_bytes / 1e9:.1f} of {device.memory_bytes / 1e9:.1f} GB on each"
            )
        return blocks

    # What `simulate` asks

    def engine_config(self, system: System) -> EngineConfig:
        return EngineConfig(
            system=system,
            predictor=profile(self.timing, self.config.num_layers),
            prefill_instances=self.prefill_instances,
            decode_instances=1 if system.colocated else self.decode_instances,
            block_size=self.block_size,
            max_batch=self.max_batch,
            max_model_len=self.max_model_len,
        )

    def devices(self, system: System) -> list[Device]:
        """Those of the prefill and of the decode instances, or of the co-located ones. Their tensors have no memory."""
        model, blocks = Model(self.config, torch.bfloat16, "meta"), self.kv_blocks

        def lay_out(kind: str, count: int) -> Device:
            return Device.of(model, self.block_size, count * blocks, {f"{kind}-{i}": blocks for i in range(count)})

        if system.colocated:
            return [lay_out("colocated", self.prefill_instances)]
        return [lay_out("prefill", self.prefill_instances), lay_out("decode", self.decode_instances)]

    def timing_of(self, instance: str) -> Timing:
        """The same for all instances."""
        return self.timing

    @property
    def shared(self) -> bool:
        """Every instance has devices of its own."""
        return False


def profile(timing: Timing, num_layers: int) -> Predictor:
    """The TTFT predictor that measuring such a device would give (engine/profile.py)."""
    samples = []
    for shape in (*SHAPES, *_LONG):
        total = Volume()
        for context, tokens in shape:
            total += Volume.of(context, tokens, drawn=1)
        samples.append(Sample(shape, pass_seconds(timing, num_layers, total)))
    return fit(samples)
