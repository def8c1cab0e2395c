"""The order of batches when ingress refuses some: what follows a refused batch is not stored before it."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from kafka_batches import Sent, framed, records_of

from kmq.client.connection import ServerAddress
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.kafka import bodies, producing, units
from kmq.gateway.kafka.cache import TailCache
from kmq.gateway.kafka.producing import ProduceHandler
from kmq.gateway.kafka.records import RenderedLines
from kmq.gateway.kafka.units import Units
from kmq.gateway.kafka.wire import ErrorCode
from kmq.logfmt import Logger
from kmq.message.ids import FORGOTTEN

PATIENCE_S = 60.0
PID = 2_000_001  # of the second life


class Ingress:
    """An ingress whose replies the test says, connection by connection, and one after the other: `release` sends the next."""

    def __init__(self, *scripts):
        """`scripts`: of each connection the answer to its hello, and a reply to each unit; None ends the connection."""
        self.scripts = [list(script) for script in scripts]
        self.units, self.heads = [], []
        self.turns = asyncio.Semaphore(0)

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self.server.close()

    def release(self):
        self.turns.release()

    async def serve(self, reader, writer):
        hello, *replies = self.scripts.pop(0)
        with contextlib.closing(writer):
            await reader.readline()
            writer.write(hello)
            while hello.startswith(b"!ok") and (head := await reader.readline()):
                self.heads.append(head)
                self.units.append(await reader.readexactly(int(head.split()[2])))
                await self.turns.acquire()
                reply = replies.pop(0)
                if reply is None:
                    return writer.transport.abort()
                writer.write(reply)


@pytest.fixture
def link(monkeypatch):
    def made(ingress):
        port = ingress.server.sockets[0].getsockname()[1]
        address = ServerAddress("127.0.0.1", port, "token")
        monkeypatch.setattr(units, "reserved_address", lambda settings: address)
        return Units(SimpleNamespace(port=0, host="127.0.0.1"), Logger("gateway"))

    return made


def run(work):
    async def limited():
        async with asyncio.timeout(PATIENCE_S):
            await work()

    asyncio.run(limited())


async def outcome(future):
    try:
        return [tuple(each) for each in await future]
    except RequestRefused as err:
        return err.code


OK = b"!ok max_line=1000\n"


@pytest.mark.parametrize("after", [b"!err 2 disk_full full\n", None], ids=["refused", "broken"])
def test_what_waits_behind_a_refused_unit_is_refused_with_it_and_not_sent_on_the_next_connection(link, after):
    async def work():
        async with Ingress([OK, b"!err 1 disk_full full\n", after], [OK, b"!ack 1 9\n"]) as ingress:
            made, refused = link(ingress), []
            first, second = (made.send(b"k1", b"a|1|%d|x\n" % n, 1, lambda _, n=n: refused.append(n)) for n in (1, 2))
            ingress.release()
            assert await outcome(first) == "disk_full" and refused == [1]
            third = made.send(b"k1", b"a|1|3|x\n", 1, lambda _: refused.append(3))
            ingress.release()
            assert [await outcome(second), await outcome(third)] == ["disk_full"] * 2 and refused == [1, 2, 3]
            fourth = made.send(b"k1", b"a|1|1|x\n", 1, lambda _: None)
            ingress.release()
            assert await outcome(fourth) == [(1, 9, False)]
            assert ingress.units == [b"a|1|1|x\n", b"a|1|2|x\n", b"a|1|1|x\n"]
            await made.close()

    run(work)


def test_a_refused_hello_refuses_what_waits_and_the_next_unit_tries_again(link):
    async def work():
        async with Ingress([b"!err 0 quota reached\n"], [OK, b"!ack 1 5\n"]) as ingress:
            made, refused = link(ingress), []
            assert await outcome(made.send(b"k1", b"a|1|1|x\n", 1, lambda _: refused.append(1))) == "quota"
            assert refused == [1]
            ingress.release()
            assert await outcome(made.send(b"k1", b"a|1|1|x\n", 1, lambda _: None)) == [(1, 5, False)]
            await made.close()

    run(work)


def test_a_second_full_disk_is_a_log_line_of_its_own(link, monkeypatch):
    async def work():
        refusal = b"!err 0 disk_full full\n"
        async with Ingress([refusal], [refusal], [OK, b"!ack 1 5\n"], [refusal]) as ingress:
            made, logged = link(ingress), []
            monkeypatch.setattr(made, "_log", SimpleNamespace(warn=lambda event, **_: logged.append(event)))
            for expected in ("disk_full", "disk_full", [(1, 5, False)], "disk_full"):
                ingress.release()
                assert await outcome(made.send(b"k1", b"a|1|1|x\n", 1, lambda _: None)) == expected
                if expected == [(1, 5, False)]:
                    made._link.transport.abort()
                    while made._link is not None:
                        await asyncio.sleep(0)
            assert logged == ["kafka_produce_refused"] * 2
            await made.close()

    run(work)


def test_what_has_no_reply_when_the_connection_breaks_is_sent_again_in_order(link):
    async def work():
        async with Ingress([OK, None], [OK, b"!dup 1 4\n", b"!ack 2 5\n"]) as ingress:
            made = link(ingress)
            sent = [made.send(b"k1", b"a|1|%d|x\n" % n, 1, lambda _: None) for n in (1, 2)]
            for _ in range(3):
                ingress.release()
            assert [await outcome(each) for each in sent] == [[(1, 4, True)], [(1, 5, False)]]
            assert ingress.units[-2:] == [b"a|1|1|x\n", b"a|1|2|x\n"]
            await made.close()

    run(work)


def test_a_unit_with_some_replies_is_sent_again_whole_and_only_the_new_replies_count(link):
    async def work():
        text, refusals = b"".join(b"a|1|%d|x\n" % n for n in (1, 2, 3)), []
        async with Ingress(
            [OK, b"!err 1 id_gap\n!ack 2 5\n", None], [OK, b"!ack 1 4\n!dup 2 5\n!dup 3 6\n", b""]
        ) as ingress:
            made = link(ingress)
            first = made.send(b"k1", text, 3, refusals.append)
            made.send(b"k1", b"a|1|4|x\n", 1, refusals.append)
            for _ in range(3):
                ingress.release()
            assert await outcome(first) == [(1, 4, False), (2, 5, True)] and not refusals
            assert ingress.units[::2] == [text, text]
            await made.close()
        assert refusals == [True]  # the second unit has no reply

    run(work)


def test_a_unit_that_is_refused_in_part_is_refused_whole_with_the_connection(link):
    async def work():
        refused = []
        async with Ingress([OK, b"!err 1 id_gap\n!err 2 disk_full full\n", None]) as ingress:
            made = link(ingress)
            first = made.send(b"k1", b"a|1|1|x\na|1|2|x\na|1|3|x\n", 3, refused.append)
            second = made.send(b"k1", b"a|1|4|x\n", 1, refused.append)
            for _ in range(2):
                ingress.release()
            assert [await outcome(each) for each in (first, second)] == ["disk_full"] * 2 and refused == [True, True]
            await made.close()

    run(work)


def test_a_reply_to_lines_is_no_answer_to_a_question_which_is_asked_again(link):
    async def work():
        async with Ingress([OK, b"", b"!ack 2 2\n"], [OK, b"!err 1 busy\n"], [OK, b"!last 7\n"]) as ingress:
            made = link(ingress)
            sent, asked = made.send(b"k1", b"a|1|1|x\n", 1, lambda _: None), made.last_id(b"k1")
            for _ in range(3):
                ingress.release()
            assert await outcome(sent) == [(1, 1, False)]
            with pytest.raises(RequestRefused):
                await asked
            ingress.release()
            assert await made.last_id(b"k1") == 7
            await made.close()

    run(work)


def test_a_unit_says_which_id_must_be_stored_before_it(link):
    async def work():
        async with Ingress([OK, b"!ack 1 1\n", b"!err 2 id_gap 1 is not stored\n", b"!ack 3 2\n"]) as ingress:
            made, heads = link(ingress), []
            for after in (0, 1, 1):
                sent = made.send(b"k1", b"a|1|%d|x\n" % (after + 1), 1, lambda _: None, after)
                ingress.release()
                heads.append((await outcome(sent), ingress.heads[-1]))
            assert heads == [
                ([(1, 1, False)], b"!unit 1 8 p=k1 after=0\n"),
                ("id_gap", b"!unit 1 8 p=k1 after=1\n"),
                ([(1, 2, False)], b"!unit 1 8 p=k1 after=1\n"),
            ]
            await made.close()

    run(work)


# --- what the door knows of a producer -------------------------------------------------------------------------------


class Told:
    """Units that are answered when the test says so."""

    def __init__(self, last):
        self.last, self.sent, self.after = last, [], []

    async def last_id(self, label):
        return self.last

    async def room(self):
        pass

    def send(self, label, text, count, on_refused, after):
        future = asyncio.get_running_loop().create_future()
        self.sent.append((text, future, on_refused))
        self.after.append(after)
        return future

    def refuse(self, at, code="disk_full"):
        _, future, on_refused = self.sent[at]
        on_refused(False)
        future.set_exception(RequestRefused(code))


def batch(epoch, sequence):
    return memoryview(framed(records_of([Sent(0, None, b"z" * 100)], 0), 1, producer=(PID, epoch, sequence)))


@pytest.fixture
def new_handler(monkeypatch):
    def made(link, start=0):
        partitions = SimpleNamespace(
            is_compacted=lambda topic: False,
            declared=lambda topic: (1, 1),
            open=lambda *_: SimpleNamespace(start=lambda: start),
        )
        settings, core = SimpleNamespace(max_line=1 << 20), SimpleNamespace(partitions=partitions)
        transactions = SimpleNamespace(is_transactional=lambda pid: False)
        return ProduceHandler(settings, core, lambda: 3, TailCache(0), link, transactions, Logger("gateway"))

    monkeypatch.setattr(producing, "render", lambda each, *_, **__: RenderedLines(b"%d\n" % each.base_sequence, True))
    return made


async def begin(handler, sent, topic="t"):
    """What a batch is told; None: it is handed over."""
    told, until = handler._units, asyncio.get_running_loop().time() + PATIENCE_S
    before = len(told.sent)
    part, call = bodies.ProducedPart(topic, 0, sent), SimpleNamespace(may=lambda key: True)
    found = await handler._begin(call, None, part, until)
    if len(told.sent) > before:
        return None
    return (found if isinstance(found, bodies.Produced) else await found).code


def test_a_batch_behind_a_refused_one_is_a_gap_until_that_one_comes_again(new_handler):
    async def work():
        told = Told(last=5)
        handler = new_handler(told)
        await begin(handler, batch(0, 5))
        told.refuse(0)
        assert (await begin(handler, batch(0, 6))) == ErrorCode.out_of_order_sequence_number
        assert (await begin(handler, batch(0, 5))) is None
        assert (await begin(handler, batch(0, 6))) is None
        assert (await begin(handler, batch(0, 4))) is None  # again
        assert (await begin(handler, batch(1, 0))) is None
        assert told.after == [5, 5, 6, 4, 7]

    run(work)


def test_a_batch_that_was_being_rendered_when_the_one_before_it_was_refused_is_not_handed_over(
    new_handler, monkeypatch
):
    async def work():
        told = Told(last=5)
        handler = new_handler(told)
        await begin(handler, batch(0, 5))
        render = handler._lines

        async def refused_meanwhile(*arguments):
            told.refuse(0)
            return await render(*arguments)

        monkeypatch.setattr(handler, "_lines", refused_meanwhile)
        found = await begin(handler, batch(0, 6))
        assert found == ErrorCode.out_of_order_sequence_number and len(told.sent) == 1

    run(work)


def test_a_new_epoch_goes_on_after_a_refusal_and_an_old_one_is_told_so(new_handler):
    async def work():
        told = Told(last=(1 << 44) + 5)
        handler = new_handler(told)
        await begin(handler, batch(1, 5))
        told.refuse(0)
        assert (await begin(handler, batch(0, 7))) == ErrorCode.invalid_producer_epoch
        assert (await begin(handler, batch(2, 0))) is None
        assert (await begin(handler, batch(2, 1))) is None

    run(work)


def test_the_first_batch_of_a_producer_that_was_not_handed_over_leaves_a_gap(new_handler, monkeypatch):
    async def work():
        handler = new_handler(Told(last=0))

        async def never(*arguments):
            raise RequestRefused("too_long", "")

        with monkeypatch.context() as patch:
            patch.setattr(handler, "_lines", never)
            assert await begin(handler, batch(0, 0)) == ErrorCode.message_too_large
        assert (await begin(handler, batch(0, 1))) == ErrorCode.out_of_order_sequence_number

    run(work)


@pytest.mark.parametrize(
    ("last", "start", "taken"),
    [(0, 0, False), (FORGOTTEN, 0, True), (0, 5, True)],
    ids=["new", "forgotten", "emptied"],
)
def test_a_first_sequence_that_is_not_0_is_taken_where_its_ids_may_have_been(new_handler, last, start, taken):
    async def work():
        handler = new_handler(Told(last), start)
        found = await begin(handler, batch(0, 7))
        assert found == (None if taken else ErrorCode.out_of_order_sequence_number)

    run(work)


def test_where_a_refusal_had_to_be_forgotten_a_start_is_no_reason_to_take_a_first_sequence(new_handler, monkeypatch):
    async def work():
        monkeypatch.setattr(producing, "_NAMES", 1)
        handler = new_handler(Told(0), 5)
        handler._core.partitions.declared = lambda topic: (int(topic == "t"), 1)
        assert await begin(handler, batch(0, 0), "nobody") == ErrorCode.unknown_topic_or_partition
        assert await begin(handler, batch(0, 0), "another") == ErrorCode.unknown_topic_or_partition
        assert await begin(handler, batch(0, 7)) == ErrorCode.out_of_order_sequence_number
        assert await begin(handler, batch(0, 0)) is None

    run(work)


def test_a_batch_that_was_sent_on_a_broken_connection_may_be_stored(link):
    async def work():
        async with Ingress([OK, None], [b"!err 0 not_enough_replicas too few\n"]) as ingress:
            made, told = link(ingress), []
            sent = made.send(b"k1", b"a|1|1|x\n", 1, told.append)
            ingress.release()
            assert await outcome(sent) == "not_enough_replicas" and told == [True]
            await made.close()

    run(work)


def test_a_producer_id_that_was_not_given_here_is_told_so(new_handler):
    async def work():
        handler = new_handler(Told(last=0))
        assert handler._is_ours(PID) and not handler._is_ours(3_000_000) and not handler._is_ours(4_000_000)
        assert not handler._is_ours(17)

    run(work)


def test_a_long_text_is_split_into_whole_lines():
    text = b"".join(b"x" * (n % 50) + b"\n" for n in range(1000))
    pieces = [*producing.split(text, 1000, 60)]
    assert b"".join(piece for piece, _ in pieces) == text
    assert all(len(piece) <= 60 and piece.count(b"\n") == count for piece, count in pieces)
