"""Build the instances of an engine: schedulers, books, executors, and who reports to whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.clock import Clock
from engine.colocated import ColocatedInstance
from engine.config import EngineConfig
from engine.convoy import Convoy
from engine.decode import DecodeInstance, Decodes
from engine.devices import Device
from engine.executor import Executor, Forwards
from engine.gaps import Stretches
from engine.output import Choice
from engine.prefill import PrefillInstance, Prefills
from engine.sampling import Sampled
from engine.timeline import Timeline
from kv.pool import Quota
from kv.table import BlockTable
from scheduling.placement import Disaggregated
from scheduling.request import Request
from scheduling.scheduler import Blocks, Scheduler

MakeExecutor = Callable[[str, int, Forwards], Executor]
AnyInstance = PrefillInstance | DecodeInstance | ColocatedInstance


class Owner(Protocol):
    """Who hears what becomes of requests: the engine."""

    def on_prefilled(self, request: Request, table: BlockTable, sampled: Sequence[Sampled], time: float) -> None: ...

    def on_token(self, choice: Choice, sampled: Sampled, time: float) -> None: ...

    def on_tokens(self, choice: Choice, count: int, stretches: Stretches) -> None: ...

    def on_refused(self, request: Request, error: str) -> None: ...

    def on_failed(self, request: Request, error: str) -> None: ...


@dataclass(frozen=True, slots=True)
class KeptForGrowth:
    """A quota as the scheduler sees it beside decodes: one block for each running choice is not for newcomers."""

    quota: Quota
    decodes: Decodes

    @property
    def free(self) -> int:
        return self.quota.free - self.decodes.running

    @property
    def block_size(self) -> int:
        return self.quota.block_size


@dataclass(frozen=True, slots=True)
class Assembly:
    """What all instances of an engine have in common."""

    config: EngineConfig
    devices: Sequence[Device]
    clock: Clock
    timeline: Timeline
    owner: Owner
    make_executor: MakeExecutor

    def instances(self) -> tuple[list[PrefillInstance | ColocatedInstance], list[DecodeInstance | ColocatedInstance]]:
        """(those that take prefills, those that take decodes); a co-located instance is in both lists."""
        first, last = self.devices[0], self.devices[-1]
        if self.config.system.colocated:
            both = [self._colocated(first, quota) for quota in first.pool.quotas.values()]
            return list(both), list(both)
        prefills = [q for name, q in first.pool.quotas.items() if name.startswith("prefill")]
        decodes = [q for name, q in last.pool.quotas.items() if name.startswith("decode")]
        return [self._prefill(first, quota) for quota in prefills], [self._decode(last, quota) for quota in decodes]

    def _prefill(self, device: Device, quota: Quota) -> PrefillInstance:
        prefills = self._prefills(device, quota, quota)
        executor = self.make_executor(quota.name, self.config.threads()[0], self._forwards(device))
        return PrefillInstance(prefills, executor, device.num_layers, self.timeline)

    def _decode(self, device: Device, quota: Quota) -> DecodeInstance:
        executor = self.make_executor(quota.name, self.config.threads()[1], self._forwards(device))
        decodes = self._convoy(device, quota) if executor.repeats else self._decodes(device, quota, reserving=True)
        return DecodeInstance(quota.name, decodes, executor, device.num_layers, self.timeline)

    def _colocated(self, device: Device, quota: Quota) -> ColocatedInstance:
        placement = self.config.system.placement
        assert not isinstance(placement, Disaggregated)
        decodes = self._decodes(device, quota, reserving=False)
        prefills = self._prefills(device, quota, KeptForGrowth(quota, decodes))
        executor = self.make_executor(quota.name, self.config.threads()[0], self._forwards(device))
        return ColocatedInstance(
            quota.name, placement, prefills, decodes, executor, device.num_layers, self.timeline, self.clock.now
        )

    def _forwards(self, device: Device) -> Forwards:
        return device.forwards(counters=self.config.counters)

    def _prefills(self, device: Device, quota: Quota, blocks: Blocks) -> Prefills:
        scheduler = Scheduler(
            self.config.system,
            self.config.predictor,
            blocks,
            device.num_layers,
            park_limit_bytes=self.config.park_limit_bytes or device.park_limit_bytes(quota),
            bytes_per_token=device.held_bytes_per_token,
        )
        prefills = Prefills(quota.name, scheduler, quota, self.timeline)
        prefills.on_prefilled = self.owner.on_prefilled
        prefills.on_refused = self.owner.on_refused
        prefills.on_failed = self.owner.on_failed
        return prefills

    def _decodes(self, device: Device, quota: Quota, *, reserving: bool) -> Decodes:
        decodes = Decodes(device.cache, quota, self.config.max_batch, reserving=reserving)
        decodes.on_token = self.owner.on_token
        decodes.on_failed = self.owner.on_failed
        return decodes

    def _convoy(self, device: Device, quota: Quota) -> Convoy:
        convoy = Convoy(device.cache, quota, self.config.max_batch)
        convoy.on_tokens = self.owner.on_tokens
        return convoy
