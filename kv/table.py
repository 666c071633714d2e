"""The block table: which blocks hold a sequence's K and V, and how forked sequences share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv.pool import Quota


class BlockTable:
    """Token position p lives in block `blocks[p // block_size]`. Made by `Quota.allocate` and `fork`.

    `blocks` is replaced, never changed in place: whoever took it holds a snapshot.

    Copy-on-write needs no second look at who else reads a block. Full blocks are never written again. The last, partly
    filled block keeps one writer, the table that drew it from the pool: what it appends lies beyond the length its
    forks read. A fork has set a spare block aside, and copies into it before its own first write.
    """

    __slots__ = ("_spare", "blocks", "quota", "read_only")

    def __init__(self, quota: Quota, blocks: tuple[int, ...], *, read_only: int = 0, spare: int | None = None) -> None:
        self.quota = quota
        self.blocks = blocks
        self.read_only = read_only  # leading tokens that other tables may read too
        self._spare = spare  # where this fork's copy of the block behind `read_only` will go; None: not needed, or done
        quota.pool.tables[self] = None

    @property
    def capacity(self) -> int:
        """Tokens it has room for."""
        return len(self.blocks) * self.quota.pool.block_size

    @property
    def held(self) -> tuple[int, ...]:
        """Every block this table answers for: those it names, and the spare."""
        return self.blocks if self._spare is None else (*self.blocks, self._spare)

    @property
    def freed(self) -> bool:
        return not self.blocks

    def extend(self, tokens: int) -> None:
        """Grow to hold `tokens` tokens; a table never shrinks. All or nothing: raises OutOfBlocks."""
        self._require_live()
        missing = self.quota.pool.blocks_for(tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += tuple(self.quota.take(missing, after=self.blocks[-1]))

    def can_extend(self, tokens: int) -> bool:
        """Whether `extend(tokens)` would find the blocks."""
        return self.quota.pool.blocks_for(tokens) - len(self.blocks) <= self.quota.free

    def cost_to_fork(self, length: int, tokens: int | None = None) -> int:
        """Blocks the quota needs free for `fork(length, tokens)`."""
        self._require_live()
        written = self.capacity if self._spare is None else self.read_only
        if not 1 <= length <= written:
            raise ValueError(f"a fork shares between 1 and the {written} tokens the table can hold yet, got {length}")
        capacity = self.capacity if tokens is None else max(tokens, length)
        return self.quota.pool.blocks_for(capacity) - length // self.quota.pool.block_size

    def fork(self, length: int, tokens: int | None = None) -> BlockTable:
        """A second table over the same first `length` tokens, with room for `tokens` (default: as much as this one).

        Full blocks are shared and stay charged once. All that the fork may come to write, its copy of the partly filled
        block included, is taken now: a fork cannot run out either. Raises OutOfBlocks.
        """
        fresh = self.quota.take(self.cost_to_fork(length, tokens))
        pool = self.quota.pool
        shared = self.blocks[: pool.blocks_for(length)]
        pool.share(shared)
        self.read_only = max(self.read_only, length)
        spare = fresh.pop(0) if length % pool.block_size else None
        return BlockTable(self.quota, (*shared, *fresh), read_only=length, spare=spare)

    @property
    def copies_on_write(self) -> bool:
        """Whether it has a copy to make before its own first write: see `writable`."""
        return self._spare is not None

    def writable(self, position: int) -> tuple[int, int] | None:
        """Call before writing at `position`. Returns (source, target) if that block has to be copied first: at once,
        while the source is still known to be in use; `blocks` names the target from here on.

        ValueError if the position is shared with a fork, or beyond the capacity.
        """
        self._require_live()
        if not self.read_only <= position < self.capacity:
            raise ValueError(f"position {position} is not writable: [{self.read_only}, {self.capacity}) is")
        pool = self.quota.pool
        index = position // pool.block_size
        if self._spare is None or index != self.read_only // pool.block_size:
            return None
        source, target = self.blocks[index], self._spare
        self._spare = None
        if pool.sole_user(source):  # everyone else has gone: there is nothing left to protect
            pool.drop([target])
            return None
        self.blocks = (*self.blocks[:index], target, *self.blocks[index + 1 :])
        pool.drop([source])
        return source, target

    def free(self) -> None:
        """Give everything back, except what other tables share and what a lease still holds. Idempotent."""
        if self.freed:
            return
        held, self.blocks, self._spare = self.held, (), None
        del self.quota.pool.tables[self]
        self.quota.pool.drop(held)

    def _require_live(self) -> None:
        if self.freed:
            raise ValueError("the table has been freed")
