"""Who owns which blocks of a device's KV cache: the pool, its quotas, and leases.

- A *block* is `block_size` consecutive token positions of one sequence, in every layer.
- A *table* (kv/table.py) names the blocks of one sequence. Forked tables share blocks.
- A *quota* is an instance's share of the pool. Every block in use is charged to exactly one quota, however many tables
  share it. Limits never add up to more than the pool, so whoever has room in its quota finds a block.
- A *lease* belongs to one forward pass, running or parked, whose rows still point at the blocks: a block that is freed
  meanwhile stays out of the free list, and on its quota's bill, until the lease is released.

A reservation is nothing special: a table that was allocated, adopted or forked with room for `tokens` tokens owns that
room, so a decode admitted with prompt + max_tokens never runs out half-way.

Only the event loop's thread may call anything here. There are no locks; executors get snapshots (`BlockTable.blocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kv.runs import FreeRuns
from kv.table import BlockTable


class OutOfBlocks(RuntimeError):
    """A quota has no room: not an error of the caller's, but a reason to wait until blocks are freed."""

    def __init__(self, quota: str, needed: int, free: int) -> None:
        super().__init__(f"quota {quota!r}: {needed} more blocks needed, {free} free")
        self.quota = quota
        self.needed = needed
        self.free = free


class IntegrityError(AssertionError):
    """The pool's books do not add up. Always a bug."""


@dataclass(slots=True)
class _Block:
    tables: int = 0  # how many tables name it
    leases: int = 0  # how many live leases name it
    quota: Quota | None = None  # who is charged; None: free


class BlockPool:
    """The blocks of one device's cache tensors, ids 0 to num_blocks - 1.

    `on_block_free`, if set, is called with the ids that are about to return to the free list: tests poison them.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.quotas: dict[str, Quota] = {}
        self.tables: dict[BlockTable, None] = {}  # live tables, in order of birth
        self.leases: dict[Lease, None] = {}  # live leases
        self.on_block_free: Callable[[list[int]], None] | None = None
        self._free = FreeRuns(num_blocks)
        self._blocks = [_Block() for _ in range(num_blocks)]

    @property
    def free_blocks(self) -> int:
        """Blocks in the free list, whatever the quotas say."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def quota(self, name: str, limit: int) -> Quota:
        """Set `limit` blocks aside for an instance. ValueError if the name is taken or the pool is not that large."""
        if name in self.quotas:
            raise ValueError(f"quota {name!r} exists already")
        left = self.num_blocks - sum(quota.limit for quota in self.quotas.values())
        if not 1 <= limit <= left:
            raise ValueError(f"quota {name!r}: limit must be between 1 and the {left} blocks not promised, got {limit}")
        self.quotas[name] = Quota(self, name, limit)
        return self.quotas[name]

    def lease(self, tables: Iterable[BlockTable]) -> Lease:
        """Keep the blocks these tables name now out of the free list until `Lease.release`. ValueError if one of the
        tables has been freed already."""
        blocks: dict[int, None] = {}
        for table in tables:
            if table.freed:
                raise ValueError("a freed table has no blocks to lease")
            blocks.update(dict.fromkeys(table.blocks))
        for block in blocks:
            self._blocks[block].leases += 1
        lease = Lease(self, tuple(blocks))
        self.leases[lease] = None
        return lease

    # Bookkeeping below the tables, quotas and leases; nobody else calls these.

    def draw(self, quota: Quota, count: int, after: int | None, growth: int) -> list[int]:
        """Take `count` blocks off the free list for one table, charged to `quota`, which has made sure of the room."""
        blocks = self._free.take(count, after=after, growth=growth)
        for block in blocks:
            self._blocks[block].tables = 1
            self._blocks[block].quota = quota
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more table names these blocks."""
        for block in blocks:
            self._blocks[block].tables += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One table fewer names these blocks."""
        blocks = list(blocks)
        for block in blocks:
            self._blocks[block].tables -= 1
        self._free_unused(blocks)

    def sole_user(self, block: int) -> bool:
        """Whether the block is named by one table and by no forward pass."""
        return self._blocks[block].tables == 1 and not self._blocks[block].leases

    def end_lease(self, lease: Lease) -> None:
        """Take a live lease off the books."""
        del self.leases[lease]
        for block in lease.blocks:
            self._blocks[block].leases -= 1
        self._free_unused(lease.blocks)

    def payers(self, blocks: Iterable[int]) -> Counter[Quota]:
        """How many of these blocks each quota is charged for."""
        return Counter(quota for block in blocks if (quota := self._blocks[block].quota))

    def charge(self, blocks: Iterable[int], quota: Quota) -> None:
        """Put these blocks on `quota`'s bill instead of whoever paid for them."""
        for block in blocks:
            self._blocks[block].quota = quota

    def _free_unused(self, blocks: Iterable[int]) -> None:
        """Return those that no table and no lease names any more, then tell the quotas that paid for them."""
        unused = [b for b in blocks if not self._blocks[b].tables and not self._blocks[b].leases]
        if not unused:
            return
        if self.on_block_free:
            self.on_block_free(unused)
        payers = self.payers(unused)
        for block in unused:
            self._blocks[block].quota = None
        self._free.give(unused)
        for quota, count in payers.items():
            quota.used -= count
        for quota in payers:
            quota.notify()

    def check(self) -> None:
        """Recount everything from the live tables and leases; IntegrityError names the first block or quota that is
        wrong. O(blocks): for tests, and for when an engine is idle."""
        tables: Counter[int] = Counter()
        for table in self.tables:
            if len(set(table.held)) != len(table.held):
                raise IntegrityError(f"a table names a block twice: {table.held}")
            tables.update(table.held)
        leases = Counter(block for lease in self.leases for block in lease.blocks)
        free = Counter(self._free)
        for block, state in enumerate(self._blocks):
            if state.tables != tables[block]:
                raise IntegrityError(f"block {block}: {tables[block]} tables name it, {state.tables} counted")
            if state.leases != leases[block]:
                raise IntegrityError(f"block {block}: {leases[block]} leases name it, {state.leases} counted")
            in_use = bool(state.tables or state.leases)
            if free[block] != (0 if in_use else 1):
                raise IntegrityError(f"block {block}: {'in use' if in_use else 'unused'}, {free[block]} times free")
            if (state.quota is not None) != in_use:
                raise IntegrityError(f"block {block}: {'in use' if in_use else 'unused'}, charged to {state.quota}")
        if free.total() != len(self._free) or len(free) != free.total():
            raise IntegrityError(f"the free list counts {len(self._free)} blocks and holds {free.total()}")
        charged = self.payers(range(self.num_blocks))
        for quota in self.quotas.values():
            if quota.used != charged[quota] or quota.used > quota.limit:
                raise IntegrityError(f"{quota}: {charged[quota]} blocks are charged to it")


class Quota:
    """One instance's share of a pool: at most `limit` blocks, of which `used` are charged to it now.

    `on_freed` callbacks run whenever `free` has grown: blocks were returned, or handed over to another quota. By then
    the books are in order again, so a callback may allocate.
    """

    def __init__(self, pool: BlockPool, name: str, limit: int) -> None:
        self.pool = pool
        self.name = name
        self.limit = limit
        self.used = 0
        self.on_freed: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"Quota({self.name!r}, {self.used}/{self.limit} blocks used)"

    @property
    def free(self) -> int:
        return self.limit - self.used

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def allocate(self, tokens: int, grows_to: int = 0) -> BlockTable:
        """A new table with room for `tokens` tokens, in consecutive blocks where there are any. Raises OutOfBlocks.

        `grows_to` only says where: best in front of free blocks up to that many tokens. They are neither taken nor
        promised, but they spare most sequences a gather at every step after they have been handed over and have grown.
        """
        if tokens < 1:
            raise ValueError(f"a table is for at least 1 token, got {tokens}")
        count = self.pool.blocks_for(tokens)
        growth = max(0, self.pool.blocks_for(grows_to) - count)
        return BlockTable(self, tuple(self.take(count, growth=growth)))

    def cost_to_adopt(self, table: BlockTable, tokens: int = 0) -> int:
        """Blocks this quota needs free to adopt `table` and grow it to hold `tokens` tokens."""
        if table.freed:
            raise ValueError("a freed table cannot be adopted")
        if table.quota.pool is not self.pool:
            raise ValueError(f"{self.name!r} is on another device than the table: allocate there and use kv.transfer")
        paid = self.pool.payers(table.held)[self]
        return len(table.held) - paid + max(0, self.pool.blocks_for(tokens) - len(table.blocks))

    def adopt(self, table: BlockTable, tokens: int = 0) -> None:
        """Hand-over on one device: the table and the charge for all its blocks move here, nothing is copied. The table
        grows to hold `tokens` tokens, which is how a decode reserves prompt + max_tokens on admission.

        All or nothing: raises OutOfBlocks if there is no room, ValueError if the table is freed or of another pool.
        """
        needed = self.cost_to_adopt(table, tokens)
        if needed > self.free:
            raise OutOfBlocks(self.name, needed, self.free)
        payers = self.pool.payers(table.held)
        for quota, count in payers.items():
            quota.used -= count
        self.used += payers.total()
        self.pool.charge(table.held, self)
        table.quota = self
        table.extend(tokens)
        for quota in payers:
            if quota is not self:
                quota.notify()

    def take(self, count: int, *, after: int | None = None, growth: int = 0) -> list[int]:
        """For tables: `count` blocks, best right behind block `after`, or in front of `growth` free ones. Raises
        OutOfBlocks."""
        if count > self.free:
            raise OutOfBlocks(self.name, count, self.free)
        self.used += count
        return self.pool.draw(self, count, after, growth)

    def notify(self) -> None:
        for callback in self.on_freed:
            callback()


class Lease:
    """The blocks that one forward pass, running or parked, may still read and write."""

    def __init__(self, pool: BlockPool, blocks: tuple[int, ...]) -> None:
        self.pool = pool
        self.blocks = blocks

    def release(self) -> None:
        """The forward has replied: what was freed meanwhile returns to the pool. Idempotent."""
        if self in self.pool.leases:
            self.pool.end_lease(self)
