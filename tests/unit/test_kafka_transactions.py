"""Transactions with a writer that does what a test says: who waits for whom, and which offsets a commit still stores."""

import asyncio
from types import SimpleNamespace

import pytest
from fake_logger import FakeLogger

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.offset_table import CommittedOffset, OffsetTable, RowKey
from kmq.gateway.groups.offsets import OffsetStore
from kmq.gateway.kafka import transactions
from kmq.gateway.kafka.transaction import _MOST_WAITING, Transaction, TransactionRefused
from kmq.gateway.kafka.transaction_log import COMMIT, STATES, Copied, HeldLines, TransactionState
from kmq.gateway.kafka.transaction_writer import TransactionWriter
from kmq.gateway.kafka.transactions import Transactions
from kmq.gateway.kafka.wire import ErrorCode

PATIENCE_S = 60.0


def run(work):
    async def limited():
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    return asyncio.run(limited())


def test_so_many_requests_wait_for_an_id_and_more_are_told_to_ask_again():
    async def work():
        txn, done = Transaction("id"), []

        async def ask(number):
            async with txn.turn():
                done.append(number)

        async with txn.turn():
            waiting = [asyncio.create_task(ask(number)) for number in range(_MOST_WAITING)]
            await asyncio.sleep(0)
            with pytest.raises(TransactionRefused) as refused:
                await ask(-1)
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
            waiting.append(asyncio.create_task(ask(_MOST_WAITING)))  # one has gone
            await asyncio.sleep(0)
            assert not done
        await asyncio.gather(*waiting[1:])
        assert refused.value.code == ErrorCode.concurrent_transactions
        assert done == [*range(1, _MOST_WAITING + 1)]

    run(work)


# --- what former lives have decided ----------------------------------------------------------------------------------


class Writer:
    """Copies as soon as the test says so, by pid. `most`: so many were copied at once."""

    def __init__(self):
        self.may_copy = asyncio.Event()
        self.stuck, self.running, self.most, self.asked = set(), 0, 0, []

    async def take_over(self):
        pass

    async def declare(self):
        pass

    async def copy(self, decided):
        self.running += 1
        self.most = max(self.most, self.running)
        await self.may_copy.wait()
        self.running -= 1
        if decided.pid in self.stuck:
            raise RequestRefused("damaged", "it is torn")
        return Copied(decided.copy, {}, 0, 0)

    async def store_offsets(self, offsets, decided_seq):
        pass

    async def keep_name(self, pid):
        self.asked.append(pid)

    async def write_state(self, txn, state, *, frees=False):
        return 9

    async def renew_states(self, known):
        pass


@pytest.fixture
def started(monkeypatch, tmp_path):
    """A function that starts transactions of which a former life has decided these pids, each with an offset of a group."""
    (tmp_path / "topics" / STATES).mkdir(parents=True)
    monkeypatch.setattr(transactions, "TransactionWriter", lambda *_: Writer())

    def made(*pids):
        states = {f"id{pid}": TransactionState(f"id{pid}", pid, 0, 0, COMMIT, 0, 0, 1, 1, 60_000) for pid in pids}
        held = {state.held_key: HeldLines(0, 1, 10, {(f"g{state.pid}", ("t", 0))}, set()) for state in states.values()}
        monkeypatch.setattr(transactions, "read_states", lambda data: states)
        monkeypatch.setattr(transactions, "read_held", lambda data, keys: held)
        store = OffsetStore(SimpleNamespace(data=str(tmp_path)), None, FakeLogger())
        store.is_loaded = True
        settings = SimpleNamespace(data=str(tmp_path), shard="", kafka_txn_bytes=1 << 30)
        found = Transactions(settings, None, SimpleNamespace(store=store), None, FakeLogger())
        return found, found._writer, store

    return made


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def is_complete(store, group):
    try:
        store.check_complete(group)
    except RequestRefused as err:
        assert err.code == "not_ready"
        return False
    return True


def test_a_commit_that_cannot_be_written_keeps_nobody_waiting_but_its_id_and_its_groups(started):
    async def work():
        made, writer, store = started(1, 2)
        writer.stuck.add(1)
        running = asyncio.create_task(made.run())
        await made.may_serve_groups.wait()
        await made.recovered.wait()
        assert [is_complete(store, group) for group in ("g1", "g2", "g3")] == [False, False, True]
        writer.may_copy.set()
        await until(lambda: is_complete(store, "g2"))
        await until(lambda: len(writer.asked) > 1)  # it is tried again, and its name is kept
        assert {*writer.asked} == {1} and not is_complete(store, "g1")
        assert made.find("id2", 2, 0).first is None
        with pytest.raises(TransactionRefused) as refused:
            made.find("id1", 1, 0)
        assert refused.value.code == ErrorCode.concurrent_transactions
        begun = await made._init("id3", 1000, None, lambda: 3)
        assert (begun.pid, begun.epoch) == (3, 0)
        waiting = asyncio.create_task(made._init("id1", 1000, None, lambda: 4))
        writer.stuck.clear()
        assert (await waiting).epoch == 1  # once what it has committed is written
        await until(lambda: is_complete(store, "g1"))
        running.cancel()

    run(work)


def test_so_many_commits_are_copied_at_once(started):
    async def work():
        made, writer, store = started(*range(1, 31))
        running = asyncio.create_task(made.run())
        await until(lambda: writer.running == 8)
        for _ in range(100):
            await asyncio.sleep(0)
        writer.may_copy.set()
        await until(lambda: not store.incomplete)
        assert writer.most == 8
        running.cancel()

    run(work)


# --- offsets ---------------------------------------------------------------------------------------------------------

ROW = RowKey("g", "t", 0)


@pytest.mark.parametrize(
    ("seq", "first_seq", "is_stored"),
    [(90, 0, True), (110, 0, False), (110, 90, True), (120, 110, False), (None, 0, True)],
    ids=["before", "since", "before, and written again", "since, and written again", "never"],
)
@pytest.mark.parametrize("ts", [0.0, 5000.0])
def test_an_offset_is_stored_unless_its_group_has_committed_since_whatever_the_clock_says(
    seq, first_seq, is_stored, ts
):
    table, stored = OffsetTable(), []
    if seq is not None:
        table.put(ROW, CommittedOffset(7, ts, seq=seq, first_seq=first_seq))

    async def commit(group, rows, member, generation, decided):
        stored.append((group, {place: row.offset for place, row in rows.items()}, member, generation, decided))

    store = SimpleNamespace(table=table, commit=commit)
    groups = SimpleNamespace(store=store, is_ready=False)
    writer = TransactionWriter(SimpleNamespace(), None, groups, None, FakeLogger())
    run(lambda: writer.store_offsets({ROW: CommittedOffset(5, 1000.0, "m", 3)}, 100))
    assert stored == [("g", {("t", 0): 5}, "m", 3, True)] * is_stored
