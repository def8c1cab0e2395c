"""Transactions with a writer that does what a test says: who waits for whom, and which offsets a commit still stores."""

import asyncio
from types import SimpleNamespace

import pytest
from fake_logger import FakeLogger
from waiting import until_async

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.offset_table import CommittedOffset, OffsetTable, RowKey
from kmq.gateway.groups.offsets import OffsetStore
from kmq.gateway.kafka import transactions
from kmq.gateway.kafka.transaction import _MOST_WAITING, Transaction, TransactionRefused
from kmq.gateway.kafka.transaction_log import COMMIT, EMPTY, STATES, Copied, HeldLines, TransactionState, _decode_state
from kmq.gateway.kafka.transaction_writer import TransactionWriter
from kmq.gateway.kafka.transactions import Transactions
from kmq.gateway.kafka.wire import ErrorCode
from kmq.message.text import make_routing_key

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
        self.states = {}  # id → its last one

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

    async def touch_name(self, pid):
        self.asked.append(pid)

    async def write_state(self, txn, state, *, frees=False):
        self.states[state.id] = txn.last = state._replace(seq=9)

    async def write(self, lines):
        return 9

    async def renew_states(self, known):
        pass


@pytest.fixture
def started(monkeypatch, tmp_path):
    """A function that starts transactions of which a former life has decided these pids, each with an offset of a group.

    `states`: what the former life has left instead.
    """
    (tmp_path / "topics" / STATES).mkdir(parents=True)
    monkeypatch.setattr(transactions, "TransactionWriter", lambda *_: Writer())

    def made(*pids, states=None):
        if states is None:
            states = {f"id{pid}": TransactionState(f"id{pid}", pid, 0, 0, COMMIT, 0, 0, 1, 1, 60_000) for pid in pids}
        held = {state.held_key: HeldLines(0, 1, 10, {(f"g{state.pid}", ("t", 0))}, {}) for state in states.values()}
        monkeypatch.setattr(transactions, "read_states", lambda data: states)
        monkeypatch.setattr(transactions, "read_held", lambda data, keys: held)
        store = OffsetStore(SimpleNamespace(data=str(tmp_path)), None, FakeLogger())
        store.is_loaded = True
        settings = SimpleNamespace(data=str(tmp_path), shard="", kafka_txn_bytes=1 << 30)
        declared = {"t": (10, 1)}
        partitions = SimpleNamespace(open=lambda *_: SimpleNamespace(end=lambda: 0), declared_of=lambda _: declared)

        async def passed(seq):
            pass

        core = SimpleNamespace(partitions=partitions, watermark=SimpleNamespace(passed=passed))
        found = Transactions(settings, core, SimpleNamespace(store=store), None, FakeLogger())
        return found, found._writer, store

    return made


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
        await until_async(lambda: is_complete(store, "g2"))
        await until_async(lambda: len(writer.asked) > 1)  # it is tried again, and its name is kept
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
        await until_async(lambda: is_complete(store, "g1"))
        running.cancel()

    run(work)


def test_a_group_whose_commit_is_written_is_served_though_its_producer_holds_offsets_of_it_again(started):
    async def work():
        made, writer, store = started(1, 2)
        writer.stuck.add(2)
        writer.may_copy.set()
        running = asyncio.create_task(made.run())
        await made.recovered.wait()
        await until_async(lambda: is_complete(store, "g1"))
        await made.hold_offsets(("id1", 1, 0), "g1", {("t", 0): CommittedOffset(5, 1000.0)}, lambda: None)
        assert made.pending("g1") == {("t", 0)}
        writer.stuck.clear()
        await until_async(lambda: is_complete(store, "g2"))
        assert is_complete(store, "g1")
        running.cancel()

    run(work)


def test_so_many_commits_are_copied_at_once(started):
    async def work():
        made, writer, store = started(*range(1, 31))
        running = asyncio.create_task(made.run())
        await until_async(lambda: writer.running == 8)
        for _ in range(100):
            await asyncio.sleep(0)
        writer.may_copy.set()
        await until_async(lambda: not store.incomplete)
        assert writer.most == 8
        running.cancel()

    run(work)


# --- epochs ----------------------------------------------------------------------------------------------------------


def next_life(states):
    """What the next life reads of these states."""
    lines = [
        b"1|1714500000.000000|%b|||%b" % (make_routing_key(STATES, id), each.encode()) for id, each in states.items()
    ]
    return {id: _decode_state(line) for id, line in zip(states, lines, strict=True)}


@pytest.mark.parametrize("is_aborted", [False, True], ids=["began anew", "timeout"])
def test_a_producer_that_has_not_got_its_next_epoch_asks_the_next_life_again(started, is_aborted):
    async def work():
        made, writer, _ = started()
        made.recovered.set()
        begun = await made._init("id", 1000, None, lambda: 7)
        if is_aborted:
            await made._begin(begun)
            made._abort_soon(begun, "timeout")
            await until_async(lambda: begun.epoch == 1)
        else:
            assert (await made._init("id", 1000, (7, 0), lambda: 8)).epoch == 1
        for _ in range(2):  # also if nothing was written in a life
            made, _, _ = started(states=next_life(writer.states))
            await made._restore()
        again = await made._init("id", 1000, (7, 0), lambda: 8)
        assert (again.pid, again.epoch) == (7, 1)
        made.recovered.set()
        assert (await made._init("id", 1000, (7, 1), lambda: 8)).epoch == 2
        with pytest.raises(TransactionRefused):
            await made._init("id", 1000, (7, 0), lambda: 8)
        assert (await made._init("id", 1000, None, lambda: 8)).epoch == 3
        with pytest.raises(TransactionRefused):
            await made._init("id", 1000, (7, 2), lambda: 8)  # somebody else has it

    run(work)


@pytest.mark.parametrize(("former", "word"), [(None, b""), (3, b" former=3")])
def test_a_state_says_whose_epoch_may_ask_again_and_older_ones_say_nobody(former, word):
    state = TransactionState("id", 7, 4, 2, EMPTY, 1, 0, 0, 5, 60_000, former=former)
    text = b"pid=7 epoch=4 n=2 state=empty partition=1 first=0 end=0 copy=5 timeout=60000"
    assert state.encode() == text + word
    assert next_life({"id": state})["id"]._replace(seq=0, seconds=0) == state


# --- offsets ---------------------------------------------------------------------------------------------------------


def offsets(*numbers, topic="t"):
    return {(topic, number): CommittedOffset(5, 1000.0) for number in numbers}


def test_all_transactions_together_have_so_many_offsets_and_who_comes_then_is_told_to_ask_again(started, monkeypatch):
    async def work():
        made, writer, _ = started()
        made.recovered.set()
        txns = {id: await made._init(id, 60_000, None, lambda pid=pid: pid) for pid, id in enumerate("abc", 7)}

        async def hold(id, *numbers):
            await made.hold_offsets((id, txns[id].pid, txns[id].epoch), "g", offsets(*numbers), lambda: None)

        await hold("a", 0, 1)
        await hold("b", 2)
        for numbers in ((3, 4, 5), (3, 4)):
            with pytest.raises(RequestRefused) as refused:
                await hold("c", *numbers)
            assert refused.value.code == "busy"
        assert made.pending("g") == {("t", number) for number in range(3)}
        await hold("c", 3)
        await made._end(txns["a"], 0, is_commit=False)
        await hold("c", 4, 5)
        with pytest.raises(RequestRefused):
            await hold("b", 6)
        held = {txns["b"].key: HeldLines(0, 4, 10, {("g", ("t", number)) for number in range(4)}, {})}
        monkeypatch.setattr(transactions, "read_states", lambda data: next_life(writer.states))
        monkeypatch.setattr(transactions, "read_held", lambda data, keys: held)
        await made._restore()
        with pytest.raises(RequestRefused):
            await hold("c", 5)
        await made._end(made.find("b", 8, 0), 0, is_commit=False)
        await hold("c", 0, 1, 2, 3)

    monkeypatch.setattr(transactions, "_MOST_PENDING", 4)
    run(work)


def test_offsets_of_partitions_that_are_not_there_are_in_no_transaction(started):
    async def work():
        made, _, _ = started()
        made.recovered.set()
        await made._init("id", 60_000, None, lambda: 7)
        for rows in (offsets(0, topic="nowhere"), offsets(0, 10), offsets(-1)):
            with pytest.raises(RequestRefused) as refused:
                await made.hold_offsets(("id", 7, 0), "g", rows, lambda: None)
            assert refused.value.code == "unknown_partition"
        await made.hold_offsets(("id", 7, 0), "g", offsets(9), lambda: None)
        assert made.pending("g") == {("t", 9)}

    run(work)


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
    groups = SimpleNamespace(store=store, is_ready=False, read_again=lambda *_: [])
    writer = TransactionWriter(SimpleNamespace(data=""), None, groups, None, FakeLogger())
    run(lambda: writer.store_offsets({ROW: CommittedOffset(5, 1000.0, "m", 3)}, 100))
    assert stored == [("g", {("t", 0): 5}, "m", 3, True)] * is_stored
