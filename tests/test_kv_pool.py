"""The block pool: quotas, tables, forks, hand-over, leases; by example, and by random sequences of operations."""

from __future__ import annotations

import random
from functools import partial
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kv.pool import BlockPool, IntegrityError, Lease, OutOfBlocks
from kv.runs import FreeRuns
from kv.table import BlockTable

BLOCK = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=16, block_size=BLOCK)


# Quotas


def test_quotas_never_promise_more_than_the_pool(pool: BlockPool) -> None:
    pool.quota("prefill-0", limit=10)
    with pytest.raises(ValueError, match=r"'decode-0'.*between 1 and the 6 blocks not promised, got 7"):
        pool.quota("decode-0", limit=7)
    assert pool.quota("decode-0", limit=6).free == 6
    with pytest.raises(ValueError, match="'prefill-0' exists already"):
        pool.quota("prefill-0", limit=1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (16, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {num_blocks} and {block_size}"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2), (16 * BLOCK, 16)])
def test_a_table_has_just_enough_blocks(pool: BlockPool, tokens: int, blocks: int) -> None:
    quota = pool.quota("prefill-0", limit=16)
    table = quota.allocate(tokens)
    assert table.blocks == tuple(range(blocks))
    assert table.capacity == blocks * BLOCK
    assert (quota.used, quota.free, pool.free_blocks) == (blocks, 16 - blocks, 16 - blocks)


def test_out_of_blocks_names_the_quota_and_both_numbers(pool: BlockPool) -> None:
    quota = pool.quota("prefill-0", limit=3)
    quota.allocate(2 * BLOCK)
    assert quota.free == 1
    with pytest.raises(OutOfBlocks, match="'prefill-0': 2 more blocks needed, 1 free") as refused:
        quota.allocate(BLOCK + 1)
    assert (refused.value.quota, refused.value.needed, refused.value.free) == ("prefill-0", 2, 1)
    assert quota.used == 2
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        quota.allocate(0)


# Where blocks come from


def test_blocks_are_consecutive_where_a_run_is_long_enough(pool: BlockPool) -> None:
    quota = pool.quota("prefill-0", limit=16)
    tables = [quota.allocate(n * BLOCK) for n in (2, 1, 3, 1, 4)]  # blocks 0-1, 2, 3-5, 6, 7-10; 11-15 are free
    tables[2].free()
    tables[0].free()
    assert quota.allocate(3 * BLOCK).blocks == (3, 4, 5), "the shortest run that fits"
    assert quota.allocate(6 * BLOCK).blocks == (11, 12, 13, 14, 15, 0), "no run fits: the longest pieces"
    pool.check()


def test_a_table_grows_into_the_blocks_behind_it(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=16)
    first, second = quota.allocate(2 * BLOCK), quota.allocate(BLOCK)  # 0-1, 2
    first.free()
    second.extend(2 * BLOCK)
    assert second.blocks == (2, 3), "not 0, although the run at 0 is the shorter one"
    second.extend(BLOCK)
    assert second.blocks == (2, 3), "a table never shrinks"
    with pytest.raises(OutOfBlocks):
        second.extend(17 * BLOCK)
    assert second.blocks == (2, 3)


def test_a_table_that_will_grow_is_placed_where_it_can(pool: BlockPool) -> None:
    quota = pool.quota("prefill-0", limit=16)
    first = quota.allocate(2 * BLOCK, grows_to=5 * BLOCK)
    second = quota.allocate(3 * BLOCK, grows_to=5 * BLOCK)
    third = quota.allocate(4 * BLOCK)
    assert (first.blocks, second.blocks, third.blocks) == ((11, 12), (6, 7, 8), (0, 1, 2, 3))
    for table in (first, second):
        table.extend(5 * BLOCK)
    assert (first.blocks, second.blocks) == ((11, 12, 13, 14, 15), (6, 7, 8, 9, 10))
    assert quota.allocate(2 * BLOCK, grows_to=100 * BLOCK).blocks == (4, 5), "a wish, not a condition"
    pool.check()


def test_free_runs_join_on_both_sides_and_serve_the_whole_pool_again() -> None:
    order = random.Random(0)
    runs = FreeRuns(200)
    taken = [runs.take(count) for count in [7, 1, 12, 30, 50, 100]]
    assert len(runs) == 0 and sorted(chain.from_iterable(taken)) == list(range(200))
    scattered = order.sample(range(200), 200)
    for start in range(0, 200, 20):
        runs.give(scattered[start : start + 20])
        assert sorted(runs) == sorted(scattered[: start + 20])
    assert runs.take(200) == list(range(200))


# Freeing, leases, events


def test_free_is_idempotent_and_a_freed_table_says_so(pool: BlockPool) -> None:
    quota = pool.quota("prefill-0", limit=16)
    table = quota.allocate(9)
    table.free()
    table.free()
    assert (table.blocks, table.freed, quota.used, pool.free_blocks) == ((), True, 0, 16)
    pool.check()
    for use in (
        lambda: table.extend(20),
        lambda: table.fork(1),
        lambda: table.writable(0),
        lambda: quota.adopt(table),
        lambda: pool.lease([table]),
    ):
        with pytest.raises(ValueError, match="freed"):
            use()


def test_leased_blocks_return_only_when_the_forward_replies(pool: BlockPool) -> None:
    quota = pool.quota("prefill-0", limit=4)
    gone, alive = quota.allocate(2 * BLOCK), quota.allocate(BLOCK)
    returned: list[int] = []
    pool.on_block_free = returned.extend
    running, parked = pool.lease([gone, alive]), pool.lease([gone])
    gone.free()
    assert (pool.free_blocks, quota.used, returned) == (13, 3, []), "still on the bill"
    running.release()
    assert returned == []
    parked.release()
    parked.release()
    assert (pool.free_blocks, quota.used, returned) == (15, 1, [0, 1])
    alive.free()
    assert returned == [0, 1, 2]
    pool.check()


def test_a_quota_hears_of_room_and_may_use_it_at_once(pool: BlockPool) -> None:
    prefill, decode = pool.quota("prefill-0", limit=2), pool.quota("decode-0", limit=4)
    heard: list[str] = []
    waiting = [5, 5]

    def admit() -> None:
        heard.append(f"prefill-0 has {prefill.free}")
        if waiting and pool.blocks_for(waiting[0]) <= prefill.free:
            prefill.allocate(waiting.pop())

    prefill.on_freed.append(admit)
    decode.on_freed.append(lambda: heard.append(f"decode-0 has {decode.free}"))
    table = prefill.allocate(8)
    decode.adopt(table)
    assert (heard, prefill.used) == (["prefill-0 has 2"], 2), "a hand-over makes room, too"
    table.free()
    assert heard == ["prefill-0 has 2", "decode-0 has 4"]
    pool.check()


# Hand-over


def test_adopt_moves_the_charge_and_reserves_in_one_go(pool: BlockPool) -> None:
    prefill, decode = pool.quota("prefill-0", limit=8), pool.quota("decode-0", limit=8)
    table = prefill.allocate(10)  # 3 blocks
    assert decode.cost_to_adopt(table) == 3
    assert decode.cost_to_adopt(table, tokens=8 * BLOCK + 1) == 9
    with pytest.raises(OutOfBlocks, match="'decode-0': 9 more blocks needed, 8 free"):
        decode.adopt(table, tokens=8 * BLOCK + 1)
    assert (table.quota, prefill.used, decode.used) == (prefill, 3, 0)
    decode.adopt(table, tokens=26)
    assert table.blocks == tuple(range(7)), "the same blocks and their followers: nothing was copied"
    assert (table.quota, prefill.used, decode.used) == (decode, 0, 7)
    blocker = decode.allocate(1)
    assert decode.free == 0
    table.extend(28)  # the room was promised on admission
    blocker.free()
    decode.adopt(table)
    assert decode.used == 7, "adopting one's own table costs nothing"
    pool.check()


def test_adopt_refuses_a_table_of_another_device(pool: BlockPool) -> None:
    table = BlockPool(16, BLOCK).quota("prefill-0", limit=16).allocate(5)
    with pytest.raises(ValueError, match=r"'decode-0' is on another device than the table.*kv\.transfer"):
        pool.quota("decode-0", limit=16).adopt(table)


# Forks


def test_a_fork_shares_full_blocks_and_copies_the_last_before_it_writes(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=16)
    table = quota.allocate(16)  # blocks 0-3; 10 tokens are written, room for 6 more
    assert table.cost_to_fork(10) == 2
    fork = table.fork(10)
    assert fork.blocks == (0, 1, 2, 5) and fork.capacity == 16
    assert quota.used == 6, "the shared blocks are charged once"
    assert table.writable(10) is None, "it goes on in place: its fork does not read that far"
    assert fork.writable(10) == (2, 4)
    assert fork.blocks == (0, 1, 4, 5)
    assert fork.writable(10) is None and fork.writable(12) is None
    pool.check()
    table.free()
    assert sorted(fork.blocks) == [0, 1, 4, 5] and quota.used == 4
    fork.free()
    assert quota.used == 0
    pool.check()


def test_a_fork_at_a_block_boundary_has_nothing_to_copy(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=16)
    table = quota.allocate(12)
    fork = table.fork(8)
    assert fork.blocks == (0, 1, 3)
    assert fork.writable(8) is None
    pool.check()


def test_the_last_reader_of_a_block_writes_in_place(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=16)
    table = quota.allocate(6)
    fork = table.fork(6)
    table.free()
    assert quota.used == 3
    assert fork.writable(6) is None
    assert (fork.blocks, quota.used) == ((0, 1), 2), "the spare block has gone back"
    pool.check()


def test_a_block_that_a_forward_still_writes_is_copied_even_for_the_last_reader(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=16)
    table = quota.allocate(6)
    fork = table.fork(6)
    lease = pool.lease([table])
    table.free()
    assert fork.writable(6) == (1, 2)
    pool.check()
    lease.release()
    assert quota.used == 2
    pool.check()


def test_a_fork_cannot_run_out(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=6)
    table = quota.allocate(10)  # 3 blocks
    with pytest.raises(OutOfBlocks, match="4 more blocks needed, 3 free"):
        table.fork(10, tokens=21)
    fork = table.fork(10, tokens=20)
    assert quota.free == 0
    assert [fork.writable(position) for position in range(10, 20)] == [(2, 3)] + [None] * 9
    pool.check()


def test_shared_tokens_are_read_only(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=16)
    table = quota.allocate(12)
    fork = table.fork(6)
    for one in (table, fork):
        with pytest.raises(ValueError, match=r"position 5 is not writable: \[6, 12\) is"):
            one.writable(5)
        with pytest.raises(ValueError, match="position 12 is not writable"):
            one.writable(12)
    with pytest.raises(ValueError, match="between 1 and the 6 tokens the table can hold yet, got 7"):
        fork.fork(7)  # it has not written a seventh yet: that block is not its own
    with pytest.raises(ValueError, match="between 1 and the 12 tokens"):
        table.fork(13)


def test_adopting_a_fork_takes_over_the_charge_for_what_it_shares(pool: BlockPool) -> None:
    prefill, decode = pool.quota("prefill-0", limit=8), pool.quota("decode-0", limit=8)
    table = prefill.allocate(10)
    fork = table.fork(10)  # shares 3, holds 1 spare
    decode.adopt(fork)
    assert (prefill.used, decode.used) == (0, 4)
    prefill.adopt(table)
    assert (prefill.used, decode.used) == (3, 1)
    table.free()
    assert (prefill.used, decode.used) == (3, 1), "the fork still reads them"
    fork.free()
    assert (prefill.used, decode.used) == (0, 0)
    pool.check()


# The integrity check finds what is wrong


def test_check_names_a_block_that_is_free_and_in_use(pool: BlockPool) -> None:
    table = pool.quota("decode-0", limit=16).allocate(12)
    pool._free.give([table.blocks[1]])
    with pytest.raises(IntegrityError, match="block 1: in use, 1 times free"):
        pool.check()


def test_check_names_a_lost_block(pool: BlockPool) -> None:
    pool.quota("decode-0", limit=16).allocate(8)
    pool._free.take(1)
    with pytest.raises(IntegrityError, match="block 2: unused, 0 times free"):
        pool.check()


def test_check_names_a_block_with_a_table_too_many(pool: BlockPool) -> None:
    table = pool.quota("decode-0", limit=16).allocate(8)
    pool.share([table.blocks[1]])
    with pytest.raises(IntegrityError, match="block 1: 1 tables name it, 2 counted"):
        pool.check()


def test_check_names_a_lease_that_was_forgotten(pool: BlockPool) -> None:
    table = pool.quota("decode-0", limit=16).allocate(8)
    del pool.leases[pool.lease([table])]
    with pytest.raises(IntegrityError, match="block 0: 0 leases name it, 1 counted"):
        pool.check()


def test_check_names_a_quota_with_a_wrong_bill(pool: BlockPool) -> None:
    quota = pool.quota("decode-0", limit=16)
    quota.allocate(8)
    quota.used = 3
    with pytest.raises(IntegrityError, match=r"'decode-0', 3/16 blocks used\): 2 blocks are charged to it"):
        pool.check()


# Any sequence of operations


class Cache:
    """What a real cache would hold: one value for each row; None is poison."""

    def __init__(self, num_blocks: int) -> None:
        self.rows: list[list[int | None]] = [[None] * BLOCK for _ in range(num_blocks)]

    def read(self, blocks: tuple[int, ...], length: int) -> list[int | None]:
        return [self.rows[blocks[p // BLOCK]][p % BLOCK] for p in range(length)]


class PoolMachine(RuleBasedStateMachine):
    """Sequences write, fork, move, run and go in any order. Whatever happens, each reads back what it wrote, and the
    books agree with a second account kept here: who pays for which block, and what a running forward still reads."""

    tables = Bundle("tables")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=24, block_size=BLOCK)
        self.quotas = [self.pool.quota("prefill-0", limit=10), self.pool.quota("decode-0", limit=12)]
        self.cache = Cache(24)
        self.pool.on_block_free = self.poison
        self.written: dict[BlockTable, list[int]] = {}  # live tables and the rows they hold
        self.payer: dict[int, str] = {}  # block -> quota, for every block that is not free
        self.read_by: dict[Lease, tuple[tuple[int, ...], list[int | None]]] = {}
        self.next_value = 0
        self.free_before = {quota.name: quota.free for quota in self.quotas}
        self.heard: list[str] = []  # quotas that reported room since the last step
        for quota in self.quotas:
            quota.on_freed.append(partial(self.heard.append, quota.name))

    def poison(self, blocks: list[int]) -> None:
        for block in blocks:
            del self.payer[block]  # freed exactly once
            self.cache.rows[block] = [None] * BLOCK

    def pay(self, table: BlockTable) -> None:
        for block in table.held:
            self.payer.setdefault(block, table.quota.name)

    def write(self, table: BlockTable, count: int) -> None:
        for position in range(len(self.written[table]), len(self.written[table]) + count):
            if copy := table.writable(position):
                source, target = copy
                self.cache.rows[target] = list(self.cache.rows[source])
            self.cache.rows[table.blocks[position // BLOCK]][position % BLOCK] = self.next_value
            self.written[table].append(self.next_value)
            self.next_value += 1

    def pick(self, index: int) -> BlockTable | None:
        """A live table, if there is any."""
        return list(self.written)[index % len(self.written)] if self.written else None

    @rule(quota=st.integers(0, 1), tokens=st.integers(1, 30), growth=st.integers(0, 30), fill=st.floats(0, 1))
    def allocate(self, quota: int, tokens: int, growth: int, fill: float) -> None:
        owner = self.quotas[quota]
        if owner.pool.blocks_for(tokens) > owner.free:
            with pytest.raises(OutOfBlocks):
                owner.allocate(tokens)
            return
        table = owner.allocate(tokens, grows_to=tokens + growth)
        assert table.capacity - BLOCK < tokens <= table.capacity
        self.written[table] = []
        self.pay(table)
        self.write(table, int(fill * tokens))

    @rule(index=st.integers(0), count=st.integers(0, 9))
    def append(self, index: int, count: int) -> None:
        table = self.pick(index)
        if table is None:
            return
        try:
            table.extend(len(self.written[table]) + count)
        except OutOfBlocks:
            return
        self.pay(table)
        self.write(table, count)

    @rule(index=st.integers(0), share=st.floats(0, 1), extra=st.integers(0, 9))
    def fork(self, index: int, share: float, extra: int) -> None:
        table = self.pick(index)
        length = int(share * len(self.written[table])) if table else 0
        if table is None or length == 0:
            return
        cost = table.cost_to_fork(length, length + extra)
        if cost > table.quota.free:
            with pytest.raises(OutOfBlocks):
                table.fork(length, length + extra)
            return
        before = table.quota.used
        fork = table.fork(length, length + extra)
        assert table.quota.used == before + cost
        self.written[fork] = self.written[table][:length]
        self.pay(fork)

    @rule(index=st.integers(0), quota=st.integers(0, 1), tokens=st.integers(0, 30))
    def adopt(self, index: int, quota: int, tokens: int) -> None:
        table, owner = self.pick(index), self.quotas[quota]
        if table is None:
            return
        if owner.cost_to_adopt(table, tokens) > owner.free:
            books = [(q.name, q.used) for q in self.quotas]
            with pytest.raises(OutOfBlocks):
                owner.adopt(table, tokens)
            assert [(q.name, q.used) for q in self.quotas] == books
            return
        owner.adopt(table, tokens)
        self.payer.update(dict.fromkeys(table.held, owner.name))
        assert table.capacity >= tokens

    @rule(target=leases, indices=st.lists(st.integers(0, 30), min_size=1, max_size=3))
    def start(self, indices: list[int]) -> Lease:
        """A forward begins: it reads what its sequences hold now, until it replies."""
        tables = [table for index in indices if (table := self.pick(index))]
        lease = self.pool.lease(tables)
        rows = [row for t in tables for row in self.cache.read(t.blocks, len(self.written[t]))]
        blocks = tuple(t.blocks[p // BLOCK] * BLOCK + p % BLOCK for t in tables for p in range(len(self.written[t])))
        self.read_by[lease] = (blocks, rows)
        return lease

    @rule(lease=consumes(leases))
    def reply(self, lease: Lease) -> None:
        del self.read_by[lease]
        lease.release()
        lease.release()

    @rule(index=st.integers(0))
    def free(self, index: int) -> None:
        if table := self.pick(index):
            del self.written[table]
            table.free()
            table.free()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert len(self.payer) == self.pool.num_blocks - self.pool.free_blocks
        for quota in self.quotas:
            assert quota.used == sum(name == quota.name for name in self.payer.values())
            assert quota.free <= self.pool.free_blocks
            assert quota.free <= self.free_before[quota.name] or quota.name in self.heard
            self.free_before[quota.name] = quota.free
        self.heard.clear()

    @invariant()
    def nothing_is_overwritten(self) -> None:
        for table, values in self.written.items():
            assert self.cache.read(table.blocks, len(values)) == values
        for slots, rows in self.read_by.values():
            assert [self.cache.rows[slot // BLOCK][slot % BLOCK] for slot in slots] == rows

    def teardown(self) -> None:
        for table in self.written:
            table.free()
        for lease in self.read_by:
            lease.release()
        self.pool.check()
        assert self.pool.free_blocks == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnySequenceOfOperations = PoolMachine.TestCase
