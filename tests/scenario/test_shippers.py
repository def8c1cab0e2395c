"""rsyslog and syslog-ng as docs/ship-logs.md sets them up: what they lose when the broker is killed and comes back."""

import itertools
import random
import socket
import threading

import pytest
from brokers import PATIENCE_S
from shippers import NAMES, Shipper, recipe


def own_address():
    """Return an address and a port of it that stay ours while nobody listens there: others have 127.0.0.1."""
    while True:
        host = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}"
        with socket.socket() as sock:
            port = random.randrange(20_000, 30_000)  # below those that the kernel gives to who asks for any
            if not sock.connect_ex((host, port)):
                continue
            sock.bind((host, port))
            return host, port


def stored(broker):
    """The payloads of the topic, in order; not of a line that is being written."""
    text = b"".join(path.read_bytes() for path in (broker.data / "topics/app").glob("*/*.log"))
    return [line.split(b"|", 5)[5] for line in text[: text.rfind(b"\n") + 1].splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_a_kill_of_the_broker_costs_no_line_but_those_on_their_way(broker, tmp_path, name):
    host, port = own_address()
    broker.gateway = False
    broker.env |= {"KMQ_HOST": host, "KMQ_INTAKES": f"{port}=app"}
    broker.up()
    root = tmp_path / "shipper"
    shipper = Shipper(name, root, recipe(name, root, host, port))
    logged = []

    def log(stage, count):
        lines = [b"%b %d | !hello acks=1 ; other.key|1|2|3" % (stage, number) for number in range(count)]
        for line in lines:
            logged.append(line)
            shipper.log(line)
        return set(lines)

    sent = []

    def go_on():
        """Log some lines and wait until they are stored, again and again: few are on their way at any moment."""
        for number in itertools.count():
            lines = log(b"meanwhile%d" % number, 50)
            while not lines <= set(stored(broker)):
                if stop.wait(0.02):
                    return
            sent.append(lines)
            flows.set()

    stop, flows, thread = threading.Event(), threading.Event(), threading.Thread(target=go_on)
    try:
        thread.start()
        try:
            assert flows.wait(PATIENCE_S), shipper.said()
            broker.kill()
        finally:
            stop.set()
            thread.join()
        away = log(b"away", 500)
        broker.wait(shipper.has_taken_all, "all of it taken by the shipper")
        if name == "syslog-ng":  # rsyslog gives what it has read only some time to get into its queue when it ends
            shipper.end()
            shipper.start()
        broker.up()
        expected = set().union(*sent, away, log(b"after", 500))
        broker.wait(lambda: expected <= set(stored(broker)), f"all but what was on its way\n{shipper.said()}")
        assert {*stored(broker)} <= {*logged}, "a line was changed"
        assert not broker.lines("dead")
    finally:
        shipper.close()
