"""One KV pool and one set of cache tensors per device; the instances on a device hold quotas of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.counting import Counting
from engine.executor import Forwards
from engine.forward import LanguageModel
from kv.cache import KVCache
from kv.pool import BlockPool, Quota
from models.costs import model_costs

_MOST_KV_BYTES_ON_CPU = 4 << 30  # a laptop has other things to do with its memory


@dataclass(frozen=True, slots=True)
class Device:
    """A model where it runs, and the K and V of its sequences. `held_bytes_per_token`: what one token of a parked
    prefill keeps alive, activations and KV together."""

    model: LanguageModel
    pool: BlockPool
    cache: KVCache
    held_bytes_per_token: int

    @classmethod
    def lay_out(cls, model: LanguageModel, decode_model: LanguageModel | None, config: EngineConfig) -> list[Device]:
        """One device for all instances, or one for the prefill and one for the decode instances; pools and quotas are
        made here. Quotas are named after the instances."""
        if config.system.colocated:
            if decode_model is not None:
                raise ValueError("a co-located system decodes where it prefills: it has no second device for decodes")
            count = config.prefill_instances
            return [cls._with_quotas(model, config, {f"colocated-{i}": 1 / count for i in range(count)})]
        prefills = [f"prefill-{i}" for i in range(config.prefill_instances)]
        decodes = [f"decode-{i}" for i in range(config.decode_instances)]
        if decode_model is not None:
            return [
                cls._with_quotas(model, config, {name: 1 / len(prefills) for name in prefills}),
                cls._with_quotas(decode_model, config, {name: 1 / len(decodes) for name in decodes}),
            ]
        shares = {name: config.prefill_share / len(prefills) for name in prefills}
        shares |= {name: (1 - config.prefill_share) / len(decodes) for name in decodes}
        return [cls._with_quotas(model, config, shares)]

    @classmethod
    def _with_quotas(cls, model: LanguageModel, config: EngineConfig, shares: dict[str, float]) -> Device:
        size = config.block_size
        blocks = config.num_blocks or (config.kv_bytes or _free_bytes(model.device)) // (_kv_bytes(model) * size)
        if blocks < len(shares):
            raise ValueError(f"{blocks} KV blocks of {size} tokens are too few for {len(shares)} instances")
        return cls.of(model, size, blocks, {name: max(1, int(blocks * share + 1e-6)) for name, share in shares.items()})

    @classmethod
    def of(cls, model: LanguageModel, block_size: int, blocks: int, limits: dict[str, int]) -> Device:
        """A device with `blocks` KV blocks, of which the instances named in `limits` may use so many each."""
        shape = model.config
        heads, head_dim = shape.num_kv_heads, shape.head_dim
        try:
            cache = KVCache(shape.num_layers, blocks, block_size, heads, head_dim, model.cache_dtype, model.device)
        except RuntimeError as error:
            size = blocks * block_size * _kv_bytes(model) / 2**30
            raise ValueError(
                f"{blocks} KV blocks of {block_size} tokens take {size:,.1f} GiB, which {model.device} does not give; "
                "use a smaller num_blocks or kv_bytes"
            ) from error
        pool = BlockPool(blocks, block_size)
        for name, limit in limits.items():
            pool.quota(name, limit)
        # Alive between two operators at worst: the residual stream, and the gated and up halves of the MLP, or copies
        # of the row for each of its experts.
        copies = shape.moe.experts_per_token * shape.hidden_size if shape.moe is not None else 0
        activations = (2 * shape.hidden_size + max(3 * shape.intermediate_size, copies)) * model.dtype.itemsize
        return cls(model, pool, cache, activations + _kv_bytes(model))

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    def forwards(self, *, counters: bool) -> Forwards:
        """Forward passes here, counted or not."""
        if not counters:
            return Forwards(self.model, self.cache)
        costs = model_costs(self.model.config, itemsize=self.model.dtype.itemsize)
        return Forwards(self.model, self.cache, Counting(costs))

    def park_limit_bytes(self, quota: Quota) -> int:
        """By default three quarters of an instance's blocks may belong to parked cohorts: the rest is for those who
        overtake them. Their activations are counted too, and a GPU keeps memory free for them."""
        return 3 * quota.limit * quota.block_size * self.held_bytes_per_token // 4


def _kv_bytes(model: LanguageModel) -> int:
    """Of one token."""
    shape = model.config
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.cache_dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    """Memory to give to K and V: most of what a GPU has left, a quarter of what a host has."""
    if device.type == "cuda":
        return int(0.7 * torch.cuda.mem_get_info(device)[0])
    return min(_MOST_KV_BYTES_ON_CPU, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
