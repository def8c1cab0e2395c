"""kmq.Producer and kmq.AsyncProducer against a real broker: what they say is stored is, once, whatever happens meanwhile."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import pytest
from brokers import PATIENCE_S
from consuls import free_ports
from line_client import LineClient
from waiting import until

import kmq
from kmq.errors import ConfigError
from kmq.message import text as message_text

CODE_RETRY, CODE_CONFIG = 75, 78


@pytest.fixture
def up(broker):
    broker.up()
    return broker


@pytest.fixture
def connect(broker, monkeypatch):
    """Makes producers of this broker; each finds the port that ingress has at the moment."""
    for name, value in broker.env.items():
        if name.startswith("KMQ_"):
            monkeypatch.setenv(name, value)
    made = []

    def make(kind=kmq.Producer, **options):
        producer = kind.local(**options)
        made.append(producer)
        return producer

    yield make
    for producer in made:
        if isinstance(producer, kmq.Producer):
            producer.abort()


def stored(broker):
    """seq → (routing key, id, payload) of what the WAL has."""
    rows = (line.split(b"|", 5) for line in broker.wal())
    return {int(row[0]): (row[2], row[4], row[5]) for row in rows}


def ids(broker, name):
    """The ids of one producer, in the order of the WAL."""
    tail = b";p=" + name.encode()
    return [int(id.partition(b";")[0]) for _, id, _ in stored(broker).values() if tail in id]


# --- sending ---------------------------------------------------------------------------------------------------------

NO_BYTES = [5, True, 1.5, [1, 2], (3,), range(3), {1: 2}, {4}, object()]
SAME_BYTES = [b"\0\xff", bytearray(b"\0\xff"), memoryview(b"\0\xff")]


def test_what_is_no_bytes_is_refused_by_name_and_nothing_of_it_is_stored(up, connect):
    with connect() as producer:
        for wrong in NO_BYTES:
            with pytest.raises(TypeError, match=r"^payload: must be bytes, str or None, not "):
                producer.send("t", wrong)
            with pytest.raises(TypeError, match=r"^payloads\[1\]: must be "):
                producer.send_many("t", [b"good", wrong, None])
            with pytest.raises(TypeError, match=r"^key: must be "):
                producer.send("t", b"x", key=wrong)
            with pytest.raises(TypeError, match=r"^headers: a value: must be "):
                producer.send("t", b"x", headers={"name": wrong})
            with pytest.raises(TypeError, match=r"^topic: must be str, not "):
                producer.send(wrong, b"x")
        for wrong in (b"abc", "abc", {"a": 1}, 5):
            with pytest.raises(TypeError, match=r"^payloads: must be a list"):
                producer.send_many("t", wrong)
        for name, wrong in [("partition", 1.5), ("partition", True), ("id", b"1"), ("id", True), ("ts", "now")]:
            with pytest.raises(TypeError, match=rf"^{name}: must be "):
                producer.send("t", b"x", **{name: wrong})
        for wrong in ("trace", ["ab"], 5, [(b"name", "x")]):
            with pytest.raises(TypeError, match=r"^headers: "):
                producer.send("t", b"x", headers=wrong)
        for same in SAME_BYTES:
            producer.send("t", same, key=same, headers={"h": same})
        producer.send_many("t", [*SAME_BYTES, "text", None]).result()
    rows = list(stored(up).values())
    assert len({(key, id.partition(b";")[2].rpartition(b";p=")[0], payload) for key, id, payload in rows[:3]}) == 1
    assert [row[2] for row in rows[3:]] == [b"AP8="] * 3 + [b"text", b""] and rows[0][2] == b"AP8="


def test_async_what_is_no_bytes_is_refused_by_name(up, connect):
    async def main():
        async with connect(kmq.AsyncProducer) as producer:
            for wrong in NO_BYTES:
                with pytest.raises(TypeError, match=r"^payload: "):
                    await producer.send("t", wrong)
                with pytest.raises(TypeError, match=r"^payloads\[0\]: "):
                    await producer.send_many("t", [wrong])
                with pytest.raises(TypeError, match=r"^key: "):
                    await producer.submit("t", b"x", key=wrong)
            assert await producer.send("t", memoryview(b"x")) == 1

    asyncio.run(main())
    assert len(stored(up)) == 1


def test_a_list_that_is_longer_than_may_be_in_flight_is_sent_in_parts(up, connect):
    done = []
    with connect(max_in_flight=10, window="parts") as producer:
        sent = producer.send_many("t", [b"%d" % n for n in range(95)], callback=done.append)
        assert sent.results() == list(range(1, 96)) and sent.result() == 1
        for many in (producer.send_many("t", [b"x"] * 10), producer.send_many("t", iter([b"x"] * 21))):
            assert len(many.results()) == many.count
        with pytest.raises(TypeError, match=r"payloads\[34\]"):
            producer.send_many("t", [b"x"] * 34 + [5])
        rows = [b"t||line-%d|x\n" % n for n in range(35)]
        rows[7] = rows[22] = b"no separator\n"
        lines = producer.send_lines(b"".join(rows))
        with pytest.raises(kmq.Refused, match="no_separator"):
            lines.result()
        assert sorted(lines.refused) == [7, 22] and [n for n, seq in enumerate(lines.seqs) if not seq] == [7, 22]
    assert done == [sent]
    assert [row[2] for row in stored(up).values()][:95] == [b"%d" % n for n in range(95)]
    assert len(stored(up)) == 95 + 31 + 33


def test_async_a_list_that_is_longer_than_may_be_in_flight_is_sent_in_parts(up, connect):
    async def main():
        async with connect(kmq.AsyncProducer, max_in_flight=10) as producer:
            assert await producer.send_many("t", [b"%d" % n for n in range(95)]) == list(range(1, 96))

    asyncio.run(main())
    assert [row[2] for row in stored(up).values()] == [b"%d" % n for n in range(95)]


def test_kmq_produce_refuses_what_is_no_message_or_says_where_it_went(up):
    for key in ("orders/eu", "a b", "orders\n!hello", "-x|", "__own", "append"):
        result = up.kmq("produce", "-m", "lost", "--", key)
        assert result.returncode == CODE_CONFIG and f"routing key {key!r}: " in result.stderr and not result.stdout
    assert not stored(up)
    result = up.kmq("produce", "--raw", text="t|||one\norders/eu|||two\nt|||three\nnothing\n")
    assert result.returncode == 1 and "sent 4; 2 of them are no messages" in result.stderr
    assert "dead.malformed; the first: b'orders/eu|||two" in result.stderr


def test_a_token_that_is_several_words_never_leaves_the_client(up, connect):
    for wrong in ("a b", "a\n!beat", "a\tb", "ä"):
        for kind in (kmq.Producer, kmq.Consumer, kmq.AsyncProducer, kmq.AsyncConsumer):
            with pytest.raises(ConfigError, match=r"^token: must be printable ASCII without spaces$"):
                kind(token=wrong)


def test_the_seq_of_a_message_is_where_it_is_stored(up, connect):
    with connect() as producer:
        seq = producer.send("orders", b"one", key="eu.1", headers={"trace": "a b"}).result()
        assert stored(up)[seq] == (b"orders.@.eu%2E1", b"1;p=%b;trace=a%%20b" % producer.name.encode(), b"one")
        many = producer.send_many("orders", [b"two", b"three\n", b"four"])
        seqs = many.results()
        assert many.result() == seqs[0]
        assert [message_text.decode_payload(*stored(up)[seq][1:]) for seq in seqs] == [b"two", b"three\n", b"four"]


def test_any_bytes_come_back_identical(up, connect):
    payloads = [b"", bytes(range(256)), "größe".encode(), b"\x1b[0m", b"|;%", b"x" * 700_000]
    with connect() as producer:
        seqs = [producer.send("t", payload, key="k|;.ü").result() for payload in payloads]
    found = [stored(up)[seq] for seq in seqs]
    assert [message_text.decode_payload(id, payload) for _, id, payload in found] == payloads
    assert {message_text.decode(key.removeprefix(b"t.@.")) for key, _, _ in found} == {"k|;.ü"}


def test_callbacks_come_in_order_with_the_seqs(up, connect):
    seqs = []
    with connect() as producer:
        for _ in range(5000):
            producer.send("t", b"x", callback=lambda delivery: seqs.append(delivery.seq))
    assert seqs == list(range(1, 5001))


def test_who_sends_and_waits_is_called_back_in_his_own_thread(up, connect):
    """The path of one message has no change of threads: that is half its latency."""
    producer, threads = connect(), []
    for _ in range(200):
        producer.send("t", b"x", callback=lambda _: threads.append(threading.get_ident())).result()
    assert threads.count(threading.get_ident()) > 150


def test_threads_share_a_producer(up, connect):
    results = {}
    with connect(max_in_flight=50) as producer:

        def work(n):
            results[n] = [producer.send("t", f"{n}-{i}").result() for i in range(300)]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = stored(up)
    assert len(found) == 2400
    assert all(found[seq][2] == b"%d-%d" % (n, i) for n, seqs in results.items() for i, seq in enumerate(seqs))


def test_the_window_bounds_what_has_no_reply(up, connect):
    with connect(max_in_flight=10) as producer:
        most = 0
        for _ in range(2000):
            producer.send("t", b"x")
            most = max(most, producer.unanswered)
        assert 1 < most <= 10


def test_what_is_left_in_a_window_that_nobody_fills_goes_all_the_same(up, connect):
    producer = connect(max_in_flight=4)
    for n in range(1, 30):
        producer.send("t", b"x")
        if n % 7 == 0:
            up.wait(lambda n=n: len(up.wal()) == n, f"{n} messages, without anybody waiting for a reply")


# --- what the broker refuses -------------------------------------------------------------------------------------------


def test_a_refused_message_fails_alone_with_code_and_message(up, connect):
    with connect() as producer:
        before, bad, after = producer.send("t", b"1"), producer.send("append", b"2"), producer.send("t", b"3")
        with pytest.raises(kmq.Refused, match=r"reserved_topic.*append") as refused:
            bad.result()
        assert refused.value.code == "reserved_topic"
        assert after.result() == before.result() + 1
        producer.send("append", b"4")
        with pytest.raises(kmq.Refused, match="reserved_topic"):  # nobody looked at this one
            producer.flush()
        producer.flush()


def test_a_line_over_the_limit_is_refused_and_the_next_one_is_not(up, connect):
    with connect() as producer:
        long, after = producer.send("t", b"x" * (1 << 20)), producer.send("t", b"y")
        with pytest.raises(kmq.Refused, match="too_long"):
            long.result()
        assert after.result() == 1


def test_a_newer_producer_of_the_name_ends_the_older(up, connect):
    older = connect(producer="one")
    assert older.send("t", b"x").result() == 1
    newer = connect(producer="one")
    assert newer.send("t", b"y").result() == 2
    with pytest.raises(kmq.Fenced):
        older.send("t", b"z").result()
    with pytest.raises(kmq.Fenced):
        older.send("t", b"z")
    assert newer.send("t", b"y").result() == 3


def ingress(broker):
    return int((broker.pipes / "ingress.port").read_text())


def test_an_earlier_attempt_of_a_run_that_arrives_late_fences_no_later_one(up):
    with contextlib.ExitStack() as stack:

        def say(hello):
            client = stack.enter_context(LineClient(ingress(up)))
            client.send(f"!hello acks=1 producer=one {hello}")
            return client

        current = say("attempt=r.9")
        assert current.line().startswith(b"!ok ")
        # A later one; the program was started again; one that says nothing, and one after it.
        for number, newer in enumerate(("attempt=r.10", "attempt=s.1", "last=?", "attempt=r.1", "attempt=r.3"), 1):
            current.send(f"t|0|{number}|x")
            assert current.line() == b"!ack 1 %d" % number, newer
            older, current = current, say(newer)
            assert current.line().startswith(b"!ok ")
            assert newer != "last=?" or current.line() == b"!last %d" % number
            older.send("t|0|99|x")
            assert older.line().startswith(b"!err 2 fenced ")
        assert say("attempt=r.2 last=?").line().startswith(b"!err 0 fenced attempt 3 of this run ")
        current.send("t|0|6|x")
        assert current.line() == b"!ack 1 6"


def test_a_hello_that_a_door_has_held_back_fences_no_later_connection(up):
    with socket.create_server(("127.0.0.1", 0)) as door, LineClient(ingress(up)) as late:
        where = iter([door.getsockname()[1]])
        with kmq.Producer(port=lambda: next(where, None) or ingress(up), producer="held") as producer:
            waits = producer.send("t", b"x")
            door.settimeout(PATIENCE_S)
            held, _ = door.accept()
            held.settimeout(PATIENCE_S)
            with held, held.makefile("rb") as lines:
                hello = lines.readline()
            assert waits.result() == 1
            late.send_raw(hello)
            assert late.line().startswith(b"!err 0 fenced ")
            assert producer.send("t", b"y").result() == 2


def test_drop_oldest_refuses_acks_with_a_reason(broker, connect):
    broker.up(RB_OVERFLOW_POLICY_FRAMED="drop_oldest")
    producer = connect()
    with pytest.raises(kmq.Refused, match="drop_oldest"):
        producer.send("t", b"x").result()
    result = broker.kmq("produce", "t", "-m", "x", "--acks")
    assert result.returncode == CODE_CONFIG and "drop_oldest" in result.stderr and "Traceback" not in result.stderr


# --- retries ---------------------------------------------------------------------------------------------------------


def test_killed_stages_lose_and_double_nothing(up, connect):
    with connect() as producer:
        deliveries = []
        for victim in ("ingress", "durability", "framer"):
            deliveries += [producer.send("t", b"%d" % n) for n in range(500)]
            os.kill(up.pids()[victim], signal.SIGKILL)
            deliveries += [producer.send("t", b"%d" % n) for n in range(500)]
            up.wait(lambda: up.kmq("status").returncode == 0, "all ready")
        producer.flush()
    seqs = [delivery.result() for delivery in deliveries]
    assert seqs == list(range(1, 3001))
    assert ids(up, producer.name) == list(range(1, 3001))


def test_what_a_program_repeats_after_a_crash_is_stored_once(up, connect):
    with connect(producer="import") as first:
        seqs = [first.send("t", b"x", id=n).result() for n in (1, 2, 5)]
    with connect(producer="import") as second:
        assert [second.send("t", b"x", id=n).result() for n in (1, 2, 5)] == seqs
        assert second.send("t", b"x", id=6).result() == 4
    assert len(stored(up)) == 4


def test_a_named_producer_goes_on_after_a_restart_with_ids_of_its_own_making(up, connect):
    """From the last one that the broker knows, also where the program queued messages before there was a broker."""
    for _ in range(2):
        with connect(producer="meter") as producer:
            producer.send_many("t", [b"x"] * 100)
    up.down()
    producer = connect(producer="meter")
    for _ in range(100):
        producer.send("t", b"x")
    up.up()
    producer.close()
    assert ids(up, "meter") == list(range(1, 301))


def test_an_id_that_comes_again_with_other_content_is_an_error_that_says_so(up, connect):
    """A counter that began anew at 1: `!dup`, as for a retry, lost what it sent without a word."""
    with connect(producer="counter") as first:
        first.send("t", b"old", id=1).result()
        first.send("t", b"old", id=5).result()
    with connect(producer="counter") as second:
        with pytest.raises(kmq.Refused, match="id 1 was stored before, as seq 1, with other content") as reused:
            second.send("t", b"new", id=1).result()
        with pytest.raises(kmq.Refused, match="id 2 is below the last one stored") as too_old:
            second.send("t", b"new", id=2).result()
        assert (reused.value.code, too_old.value.code) == ("id_reused", "id_too_old")
        assert second.send("t", b"new").result() == 3
    assert ids(up, "counter") == [1, 5, 6]


def test_ids_of_a_window_are_stored_once(up, connect):
    with connect(window="orders") as producer:
        first = producer.send("t", b"x", id="order 7;|").result()
        assert producer.send("t", b"x", id="order 7;|").result() == first
        assert producer.send("t", b"x").result() == first + 1
        assert producer.send_many("t", [b"x"] * 3).results() == [first + 2, first + 3, first + 4]


def test_without_dedupe_everything_is_stored_as_often_as_sent(up, connect):
    with connect(dedupe=False) as producer:
        assert [producer.send("t", b"x", id="same").result() for _ in range(3)] == [1, 2, 3]
        assert producer.send_many("t", [b"x"] * 3).results() == [4, 5, 6]
    assert stored(up)[1] == (b"t", b"same", b"x")


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_nobody_listens_and_every_call_that_waits_says_so(broker, connect):
    (port,) = free_ports(1)
    said = []
    producer = kmq.Producer(port=port, max_in_flight=1, timeout_s=0.3, stall_s=0.1, on_stall=said.append)
    delivery = producer.send("t", b"x")
    until(lambda: any("nothing listens on" in text for text in said), "an attempt to connect", lambda: said)
    words = rf"unanswered, the oldest for .*not connected for .*nothing listens on 127\.0\.0\.1:{port}"
    for call in (delivery.result, producer.flush, lambda: producer.send("t", b"y"), producer.close):
        began = time.monotonic()
        with pytest.raises(kmq.NotAnswered, match=words):
            call()
        assert 0.2 < time.monotonic() - began < PATIENCE_S
    with pytest.raises(kmq.NotAnswered, match="closed before"):
        delivery.result()


def test_a_stall_is_reported_also_when_no_caller_waits(up, connect):
    said = threading.Event()
    producer = connect(stall_s=0.1, on_stall=lambda text: "does not answer" in text and said.set())
    producer.send("t", b"x").result()
    os.kill(up.pids()["durability"], signal.SIGSTOP)
    delivery = producer.send("t", b"x")
    assert said.wait(PATIENCE_S)
    os.kill(up.pids()["durability"], signal.SIGCONT)
    assert delivery.result() == 2


def test_a_stall_is_logged_when_it_begins_and_when_it_ends_and_not_between(up, connect, caplog):
    producer = connect(stall_s=0.1)
    producer.send("t", b"x").result()
    os.kill(up.pids()["durability"], signal.SIGSTOP)
    delivery = producer.send("t", b"x")
    up.wait(lambda: "does not answer" in caplog.text, "the begin")
    os.kill(up.pids()["durability"], signal.SIGCONT)
    assert delivery.result() == 2
    up.wait(lambda: "replies again" in caplog.messages[-1], "the end")
    assert [record.name for record in caplog.records] == ["kmq.producer"] * len(caplog.records)
    assert ["replies again" in text for text in caplog.messages] == [False, True] * (len(caplog.messages) // 2)


def test_a_broker_that_comes_up_later_gets_what_waits_for_it(broker, connect):
    (broker.pipes).mkdir()
    (broker.pipes / "ingress.port").write_text("1\n")
    producer = connect()
    delivery = producer.send("t", b"x")
    broker.up()
    assert delivery.result() == 1


def test_a_full_window_waits_for_room_with_a_timeout(up, connect):
    producer = connect(max_in_flight=5)
    producer.send("t", b"x").result()
    os.kill(up.pids()["durability"], signal.SIGSTOP)
    deliveries = [producer.send("t", b"x") for _ in range(5)]
    with pytest.raises(kmq.NotAnswered, match="room among the messages in flight: 5 messages unanswered"):
        producer.send("t", b"x", timeout=0.2)
    os.kill(up.pids()["durability"], signal.SIGCONT)
    assert producer.send("t", b"x").result() == 7
    assert [delivery.result() for delivery in deliveries] == [2, 3, 4, 5, 6]


def test_a_delivery_has_a_timeout_of_its_own_if_asked_for(up, connect):
    producer = connect(delivery_timeout_s=4)  # less than that takes a reply on a busy machine, too
    producer.send("t", b"x", timeout=10).result()
    os.kill(up.pids()["durability"], signal.SIGSTOP)
    late = producer.send("t", b"late")
    with pytest.raises(kmq.NotAnswered, match=r"no reply within 4 s"):
        late.result()
    os.kill(up.pids()["durability"], signal.SIGCONT)
    assert producer.send("t", b"x", timeout=10).result() == 3


def test_a_program_that_ends_without_close_has_sent_everything(up):
    code = "import kmq; p = kmq.Producer.local(); [p.send('t', str(n)) for n in range(1000)]"
    result = up.run(sys.executable, "-c", code)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(stored(up)) == 1000
    result = up.run(sys.executable, "-c", "import kmq; kmq.Producer.local().send('append', b'x')")
    assert "at exit: refused by the broker: reserved_topic" in result.stderr and "Traceback" not in result.stderr


def test_a_callback_may_send_and_one_that_fails_stops_nobody(up, connect, caplog):
    with connect(max_in_flight=4) as producer:

        def follow(delivery):
            if delivery.seq < 50:
                producer.send("t", b"again", callback=follow)
            else:
                raise RuntimeError("from the callback")

        producer.send("t", b"first", callback=follow)
        up.wait(lambda: len(stored(up)) == 50, "fifty messages")
        producer.flush()
        assert producer.send("t", b"x").result() == 51
    assert "from the callback" in caplog.text


# --- TLS and tokens --------------------------------------------------------------------------------------------------


@pytest.fixture
def secured(broker, authority):
    """A broker with TLS that wants tokens; what a producer elsewhere needs to know of it."""
    cert, key = authority.issue("server")
    tokens = broker.root / "tokens"
    broker.env |= {"KMQ_TLS_HOST": "127.0.0.1", "KMQ_TLS_PORT": "0", "KMQ_TLS_CERT": str(cert), "KMQ_TLS_KEY": str(key)}
    broker.env["KMQ_TOKENS"] = str(tokens)
    made = broker.kmq("token", "new", "orders")
    assert made.returncode == 0, made.stderr
    broker.up()
    return {
        "port": lambda: int((broker.pipes / "tls.port").read_text()),
        "tls": ssl.create_default_context(cafile=authority.path),
        "token": next(word for word in made.stdout.split() if word.startswith("orders.")),
    }


def test_over_tls_messages_of_any_size_survive_a_kill(broker, secured):
    with kmq.Producer(**secured) as producer:
        assert producer.send_many("t", [b"%d" % n for n in range(30_000)]).results() == list(range(1, 30_001))
        deliveries = [producer.send("t", b"x" * 300_000) for _ in range(20)]
        broker.kill("ingress")
        deliveries += [producer.send("t", b"x" * 300_000) for _ in range(20)]
        assert [delivery.result() for delivery in deliveries] == list(range(30_001, 30_041))
    assert ids(broker, producer.name) == list(range(1, 30_041))


def test_async_over_tls(broker, secured):
    async def main():
        async with kmq.AsyncProducer(**secured) as producer:
            assert await producer.send_many("t", [b"x" * 1000] * 5000) == list(range(1, 5001))
            broker.kill("ingress")
            assert await producer.send("t", b"x") == 5001

    asyncio.run(main())


def test_a_token_that_is_wrong_ends_the_producer_and_local_programs_have_one(broker, secured, connect):
    for token in ("", "orders.wrong", "nobody.x"):
        with pytest.raises(kmq.Refused, match="unauthorized"):
            kmq.Producer(**secured | {"token": token}).send("t", b"x").result()
    with connect() as producer:
        assert producer.send("t", b"x").result() == 1
    assert broker.kmq("produce", "t", "-m", "x", "--acks").stdout == "stored 1, last seq 2\n"


def test_a_certificate_nobody_vouches_for_is_said_and_not_trusted(broker, secured):
    producer = kmq.Producer(**secured | {"tls": ssl.create_default_context()})
    delivery = producer.send("t", b"x")

    def is_said() -> bool:
        with pytest.raises(kmq.NotAnswered) as said:
            delivery.result(timeout=0.5)
        return bool(re.search(r"not connected for .*certificate verify failed", str(said.value)))

    broker.wait(is_said, "the producer says why it is not connected")
    producer.abort()


# --- asyncio ---------------------------------------------------------------------------------------------------------


def test_async_messages_are_stored_in_the_order_of_the_calls(up, connect):
    async def main():
        async with connect(kmq.AsyncProducer, max_in_flight=100) as producer:
            assert await producer.send("t", bytes(range(256)), key="k") == 1
            assert await producer.send_many("t", [b"a", b"b\n"]) == [2, 3]
            replies = [await producer.submit("t", b"%d" % n) for n in range(1000)]
            assert await asyncio.gather(*replies) == list(range(4, 1004))
            sends = (producer.send("t", b"%d" % n) for n in range(1000))
            assert await asyncio.gather(*sends) == list(range(1004, 2004))

    asyncio.run(main())
    assert [payload for _, _, payload in stored(up).values()][1003:] == [b"%d" % n for n in range(1000)]


def test_async_a_named_producer_goes_on_from_its_last_id(up, connect):
    async def run():
        for _ in range(2):
            async with connect(kmq.AsyncProducer, producer="meter") as producer:
                await producer.send_many("t", [b"x"] * 10)

    asyncio.run(run())
    assert ids(up, "meter") == list(range(1, 21))


def test_async_killed_stages_lose_and_double_nothing(up, connect):
    async def main():
        async with connect(kmq.AsyncProducer) as producer:
            replies = []
            for victim in ("ingress", "durability"):
                replies += [await producer.submit("t", b"x") for _ in range(500)]
                os.kill(up.pids()[victim], signal.SIGKILL)
                replies += [await producer.submit("t", b"x") for _ in range(500)]
                await asyncio.to_thread(up.wait, lambda: up.kmq("status").returncode == 0, "all ready")
            assert await asyncio.gather(*replies) == list(range(1, 2001))
            return producer.name

    assert ids(up, asyncio.run(main())) == list(range(1, 2001))


def test_async_refusals_fencing_and_timeouts_are_exceptions(up, connect):
    async def main():
        async with connect(kmq.AsyncProducer, producer="one") as producer:
            with pytest.raises(kmq.Refused, match="reserved_topic"):
                await producer.send("append", b"x")
            assert await producer.send("t", b"x") == 1
            os.kill(up.pids()["durability"], signal.SIGSTOP)
            with pytest.raises(kmq.NotAnswered, match="the reply to this message: 1 messages unanswered"):
                await producer.send("t", b"x", timeout=0.2)
            os.kill(up.pids()["durability"], signal.SIGCONT)
            await producer.flush()
            async with connect(kmq.AsyncProducer, producer="one") as newer:
                assert await newer.send("t", b"y") == 3
                with pytest.raises(kmq.Fenced):
                    await producer.send("t", b"z")
            await producer.abort()

    asyncio.run(main())


def test_async_a_full_window_waits_and_a_cancelled_send_harms_nobody(up, connect):
    async def main():
        async with connect(kmq.AsyncProducer, max_in_flight=5) as producer:
            await producer.send("t", b"x")
            os.kill(up.pids()["durability"], signal.SIGSTOP)
            sends = [asyncio.create_task(producer.send("t", b"x")) for _ in range(20)]
            await asyncio.sleep(0)
            with pytest.raises(kmq.NotAnswered, match="room among the messages"):
                await producer.submit("t", b"x", timeout=0.1)
            for task in sends[::2]:
                task.cancel()
            os.kill(up.pids()["durability"], signal.SIGCONT)
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert all(isinstance(result, int) for result in results[1::2])
            assert await producer.send("t", b"last") == len(up.wal())

    asyncio.run(main())


# --- kmq produce --acks --------------------------------------------------------------------------------------------


def test_produce_with_acks_says_what_is_stored(up):
    assert up.kmq("produce", "test.a", "--acks", "-m", "one", "-m", "two|2").stdout == "stored 2, last seq 2\n"
    assert up.kmq("produce", "--raw", "--acks", text="t|0|id|five\n").stdout == "stored 1, last seq 3\n"
    assert [row[2] for row in stored(up).values()] == [b"one", b"two|2", b"five"]
    result = up.kmq("produce", "--raw", "--acks", text="t|0|1|six\nno separator\nappend|0|2|x\n")
    assert result.returncode == 1
    assert "stored 1, last seq 4; 2 refused, the first: refused by the broker: no_separator" in result.stderr


def producing(up, *options):
    """`kmq produce t`, which reads what is written to its stdin."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(["kmq", "produce", "t", *options], env=up.env, cwd=up.root, **pipes)


def numbers(*ends):
    return "".join(f"{n}\n" for n in range(*ends))


def test_the_same_lines_given_again_as_the_same_producer_are_stored_once(up):
    def produce(count):
        return up.kmq("produce", "test.a", "--producer", "import-7", text=numbers(count))

    assert produce(5000).stdout == "stored 5000, last seq 5000\n"
    again = produce(5000)
    assert again.stdout == "stored 0, 5,000 were stored before under this name, last seq 5000\n"
    assert (again.returncode, "not one line was new" in again.stderr) == (0, True)
    more = produce(6000)
    assert more.stdout == "stored 1000, 5,000 were stored before under this name, last seq 6000\n"
    assert (more.returncode, more.stderr) == (0, "")
    assert ids(up, "import-7") == list(range(1, 6001))


def test_other_lines_under_a_used_name_are_no_success(up):
    """Only the contents of the last ids are known: what was said of older ones is in their number."""
    assert up.kmq("produce", "t", "--producer", "imp", text=numbers(10_000)).returncode == 0
    other = up.kmq("produce", "t", "--producer", "imp", text=numbers(20_000, 25_000))
    assert other.returncode == 1
    assert "stored 0, 5,000 were stored before under this name" in other.stderr
    assert "10,000 lines were sent under this name before, and these are 5,000" in other.stderr
    assert len(stored(up)) == 10_000


def test_what_a_broken_connection_repeats_was_not_stored_before(up):
    with producing(up, "--producer", "imp") as sender:
        sender.stdin.write(numbers(100_000))
        sender.stdin.flush()
        up.wait(lambda: len(up.wal()) > 1000, "it has begun")
        up.kill("ingress")
        sender.stdin.write(numbers(100_000, 200_000))
        sender.stdin.close()
        assert sender.stdout.read() == "stored 200000, last seq 200000\n"


def test_lines_with_ids_of_their_own_may_all_be_repeats(up):
    for count in (9, 3):
        lines = "".join(f"t|0|{n}|x\n" for n in range(1, count + 1))
        done = up.kmq("produce", "--raw", "--producer", "imp", text=lines)
        assert done.returncode == 0
    assert done.stdout == "stored 0, 3 were stored before under this name, last seq 3\n"


def test_produce_with_acks_says_when_nobody_listens(broker):
    result = broker.kmq("produce", "t", "-m", "x", "--acks")
    assert result.returncode == CODE_CONFIG and "is the broker up?" in result.stderr


def test_produce_with_acks_waits_over_a_restart(up):
    text = "".join(f"{n}\n" for n in range(200_000))
    with producing(up, "--acks") as sender:
        sender.stdin.write(text[: len(text) // 2])
        up.wait(lambda: len(up.wal()) > 1000, "it has begun")
        up.kill("ingress", "durability")
        sender.stdin.write(text[len(text) // 2 :])
        sender.stdin.close()
        assert sender.stdout.read() == "stored 200000, last seq 200000\n"
    assert sorted(int(payload) for _, _, payload in stored(up).values()) == list(range(200_000))
