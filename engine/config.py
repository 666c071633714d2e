"""How an engine is set up: the system, the instances, threads and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from scheduling.predictor import Predictor
from scheduling.presets import System, preset
from scheduling.request import SLO


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything but the model. 0 and None mean: choose for this machine."""

    system: System = field(default_factory=lambda: preset("flowprefill"))
    predictor: Predictor = field(default_factory=lambda: Predictor(per_step=0.01, per_token=0.001))
    prefill_instances: int = 1
    decode_instances: int = 1
    prefill_threads: int = 0  # of each prefill instance, on a CPU
    decode_threads: int = 0
    block_size: int = 16  # tokens in a KV block
    num_blocks: int = 0  # KV blocks of each device; 0: by `kv_bytes`
    kv_bytes: int = 0  # memory for K and V on each device; 0: a share of what is free
    prefill_share: float = 0.5  # of the blocks, where prefill and decode instances share a device
    max_model_len: int = 0  # prompt and output together; 0: what the model and the KV pool allow
    max_batch: int = 32  # choices in a decode step
    park_limit_bytes: int = 0  # of each prefill instance: what parked cohorts may keep alive; 0: most of its share
    run_ahead: int = 1  # boundaries that CUDA kernels may be queued ahead of a gate
    counters: bool = False  # count what every drive reads and computes (engine/counters.py)
    default_slo: SLO = field(default_factory=SLO)
    seed: int = 0  # draws the seeds of sampled requests that bring none

    def __post_init__(self) -> None:
        for name in ("prefill_instances", "decode_instances", "block_size", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "prefill_threads",
            "decode_threads",
            "num_blocks",
            "kv_bytes",
            "max_model_len",
            "park_limit_bytes",
            "run_ahead",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.system.colocated:
            for name, value in (("decode_instances", 1), ("decode_threads", 0), ("prefill_share", 0.5)):
                if getattr(self, name) != value:
                    raise ValueError(f"{name} has no meaning for a co-located system: it decodes where it prefills")
        if not 0 < self.prefill_share < 1:
            raise ValueError(f"prefill_share must be between 0 and 1, got {self.prefill_share}")

    def threads(self) -> tuple[int, int]:
        """(prefill, decode) threads of each instance; of a co-located one, (both, 0).

        Two busy threads on one core wreck each other's OpenMP regions, so the cores are dealt out: a quarter of them to
        decode, which is bound by memory and not by arithmetic. Co-located, one is left to the event loop, which would
        interrupt one thread of a pass and make all others wait: on two cores, SmolLM2-135M took 96 ms for passes of 56
        prompt tokens and a few decodes with two threads, and 72 ms with one.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.system.colocated:
            return self.prefill_threads or max(1, (cores - 1) // self.prefill_instances), 0
        for_decode = max(1, cores // 4)
        decode = self.decode_threads or max(1, for_decode // self.decode_instances)
        prefill = self.prefill_threads or max(1, (cores - for_decode) // self.prefill_instances)
        return prefill, decode
