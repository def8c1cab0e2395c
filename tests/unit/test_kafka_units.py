"""The order of batches when ingress refuses some: what follows a refused batch is not stored before it."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.kafka import bodies, producing, units
from kmq.gateway.kafka.cache import TailCache
from kmq.gateway.kafka.producing import ProduceChapter
from kmq.gateway.kafka.records import RecordBatch, RenderedLines
from kmq.gateway.kafka.units import Units
from kmq.gateway.kafka.wire import ErrorCode
from kmq.logfmt import Logger

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
    monkeypatch.setattr(units.local_token, "read", lambda settings: "token")

    def made(ingress):
        port = ingress.server.sockets[0].getsockname()[1]
        monkeypatch.setattr(units, "read_port", lambda *_: port)
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
            first, second = (made.send(b"k1", b"a|1|%d|x\n" % n, 1, lambda n=n: refused.append(n)) for n in (1, 2))
            ingress.release()
            assert await outcome(first) == "disk_full" and refused == [1]
            third = made.send(b"k1", b"a|1|3|x\n", 1, lambda: refused.append(3))
            ingress.release()
            assert [await outcome(second), await outcome(third)] == ["disk_full"] * 2 and refused == [1, 2, 3]
            fourth = made.send(b"k1", b"a|1|1|x\n", 1, lambda: None)
            ingress.release()
            assert await outcome(fourth) == [(1, 9, False)]
            assert ingress.units == [b"a|1|1|x\n", b"a|1|2|x\n", b"a|1|1|x\n"]
            await made.close()

    run(work)


def test_a_refused_hello_refuses_what_waits_and_the_next_unit_tries_again(link):
    async def work():
        async with Ingress([b"!err 0 quota reached\n"], [OK, b"!ack 1 5\n"]) as ingress:
            made, refused = link(ingress), []
            assert await outcome(made.send(b"k1", b"a|1|1|x\n", 1, lambda: refused.append(1))) == "quota"
            assert refused == [1]
            ingress.release()
            assert await outcome(made.send(b"k1", b"a|1|1|x\n", 1, lambda: None)) == [(1, 5, False)]
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
                assert await outcome(made.send(b"k1", b"a|1|1|x\n", 1, lambda: None)) == expected
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
            sent = [made.send(b"k1", b"a|1|%d|x\n" % n, 1, lambda: None) for n in (1, 2)]
            for _ in range(3):
                ingress.release()
            assert [await outcome(each) for each in sent] == [[(1, 4, True)], [(1, 5, False)]]
            assert ingress.units[-2:] == [b"a|1|1|x\n", b"a|1|2|x\n"]
            await made.close()

    run(work)


def test_a_unit_says_which_id_must_be_stored_before_it(link):
    async def work():
        async with Ingress([OK, b"!ack 1 1\n", b"!err 2 id_gap 1 is not stored\n", b"!ack 3 2\n"]) as ingress:
            made, heads = link(ingress), []
            for after in (0, 1, 1):
                sent = made.send(b"k1", b"a|1|%d|x\n" % (after + 1), 1, lambda: None, after)
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
        on_refused()
        future.set_exception(RequestRefused(code))


def batch(epoch, sequence, nbytes=100):
    return RecordBatch(memoryview(b"z" * nbytes), 0, False, 0, 0, PID, epoch, sequence, 1)


@pytest.fixture
def chapter(monkeypatch):
    def made(link):
        partitions = SimpleNamespace(is_compacted=lambda topic: False)
        settings, core = SimpleNamespace(max_line=1 << 20), SimpleNamespace(partitions=partitions)
        return ProduceChapter(settings, core, lambda: 3, TailCache(0), link, None, Logger("gateway"))

    monkeypatch.setattr(producing, "render", lambda each, *_, **__: RenderedLines(b"%d\n" % each.base_sequence, True))
    return made


PART = bodies.ProducedPart("t", 0, None)


def code(found):
    return found.code if isinstance(found, bodies.Produced) else None


def test_a_batch_behind_a_refused_one_is_a_gap_until_that_one_comes_again(chapter):
    async def work():
        told = Told(last=5)
        made = chapter(told)
        await made._begin_idempotent(PART, batch(0, 5), 1)
        told.refuse(0)
        assert code(await made._begin_idempotent(PART, batch(0, 6), 1)) == ErrorCode.out_of_order_sequence_number
        assert code(await made._begin_idempotent(PART, batch(0, 5), 1)) is None
        assert code(await made._begin_idempotent(PART, batch(0, 6), 1)) is None
        assert code(await made._begin_idempotent(PART, batch(0, 4), 1)) is None  # again
        assert code(await made._begin_idempotent(PART, batch(1, 0), 1)) is None
        assert told.after == [5, 5, 6, 4, 7]

    run(work)


def test_a_batch_that_was_being_rendered_when_the_one_before_it_was_refused_is_not_handed_over(chapter, monkeypatch):
    async def work():
        told = Told(last=5)
        made = chapter(told)
        await made._begin_idempotent(PART, batch(0, 5), 1)
        render = made._lines

        async def refused_meanwhile(*arguments):
            told.refuse(0)
            return await render(*arguments)

        monkeypatch.setattr(made, "_lines", refused_meanwhile)
        found = await made._begin_idempotent(PART, batch(0, 6), 1)
        assert code(found) == ErrorCode.out_of_order_sequence_number and len(told.sent) == 1

    run(work)


def test_a_new_epoch_goes_on_after_a_refusal_and_an_old_one_is_told_so(chapter):
    async def work():
        told = Told(last=(1 << 44) + 5)
        made = chapter(told)
        await made._begin_idempotent(PART, batch(1, 5), 1)
        told.refuse(0)
        assert code(await made._begin_idempotent(PART, batch(0, 7), 1)) == ErrorCode.invalid_producer_epoch
        assert code(await made._begin_idempotent(PART, batch(2, 0), 1)) is None
        assert code(await made._begin_idempotent(PART, batch(2, 1), 1)) is None

    run(work)


def test_the_first_batch_of_a_producer_that_was_not_handed_over_leaves_a_gap(chapter, monkeypatch):
    async def work():
        made = chapter(Told(last=0))

        async def never(*arguments):
            raise RequestRefused("too_long")

        with monkeypatch.context() as patch, pytest.raises(RequestRefused):
            patch.setattr(made, "_lines", never)
            await made._begin_idempotent(PART, batch(0, 0), 1)
        assert code(await made._begin_idempotent(PART, batch(0, 1), 1)) == ErrorCode.out_of_order_sequence_number

    run(work)


def test_a_producer_id_that_was_not_given_here_is_told_so(chapter):
    async def work():
        made = chapter(Told(last=0))
        assert made._is_ours(PID) and not made._is_ours(3_000_000) and not made._is_ours(4_000_000)
        assert not made._is_ours(17)

    run(work)


def test_a_long_text_is_split_into_whole_lines():
    text = b"".join(b"x" * (n % 50) + b"\n" for n in range(1000))
    pieces = [*producing.split(text, 1000, 60)]
    assert b"".join(piece for piece, _ in pieces) == text
    assert all(len(piece) <= 60 and piece.count(b"\n") == count for piece, count in pieces)
