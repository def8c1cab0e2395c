"""Clients that know all brokers of a shard by address, while its leader is killed. With a real Consul."""

import itertools
import threading
from contextlib import suppress

import httpx
import pytest
from test_shard import BROKERS
from test_shard_status import Brokers
from waiting import PATIENCE_S, until

import kmq

HOST = "127.0.0.1"


class Whole(Brokers):
    """Three whole brokers of a shard, their ports fixed by what they had at their first start."""

    def begin(self):
        for name in BROKERS:
            started = self.kmq(name, "up")
            assert started.returncode == 0, started.stderr
        self.init()
        self.await_whole()
        for name in BROKERS:
            until(lambda name=name: self.status(name)["ready"], f"readiness of {name}")

    def hosts(self, port, *names):
        return ",".join(
            f"{HOST}:{(self.root / name / 'pipes' / f'{port}.port').read_text().strip()}" for name in names or BROKERS
        )

    def post(self, name, path, body):
        body.pop("assignment", None)
        port = (self.root / name / "pipes" / "http.port").read_text().strip()
        return httpx.post(f"http://{HOST}:{port}/{path}", json=body, trust_env=False, timeout=PATIENCE_S)

    def join(self, name, group):
        """Join by HTTP through this broker; return the member's generation and assignment, None while nobody leads."""
        with suppress(httpx.TransportError):
            response = self.post(name, f"api/groups/{group}/members", {"member": "m", "topics": ["t"]})
            if response.status_code == 200:
                return response.json()
        return None

    def await_members(self, group):
        """Until all brokers have the members of the group: they are written while the members are answered."""
        for name in BROKERS:
            logs = self.root / name / "data" / "topics" / "__consumer_offsets"
            until(
                lambda logs=logs: any(b"%b..0|" % group.encode() in log.read_bytes() for log in logs.rglob("*.log")),
                f"the members of {group} at {name}",
            )


@pytest.fixture
def shard(consul, tmp_path):
    made = Whole(consul.address, tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def test_a_killed_leader_costs_producer_and_group_nothing(shard):
    """Every message that was acked is read once, in order, though the leader is killed in the middle.

    The group goes on with its members and their generation, also without commits before.
    """
    acked, read, refused, stop = {}, [], [], threading.Event()

    def produce():
        with kmq.Producer(shard.hosts("ingress"), timeout_s=PATIENCE_S) as producer:
            for n in itertools.count():
                if stop.is_set():
                    return
                acked[n] = producer.send("t", b"%d" % n, key="k").result()

    def consume():
        with kmq.Consumer("t", host=shard.hosts("egress"), group_id="g", max_poll_records=20) as consumer:
            while not stop.is_set() or len(read) < len(acked):
                batch = consumer.poll(timeout=0.5)
                read.extend((message.partition, message.offset, int(message.value)) for message in batch)
                if batch:
                    try:
                        consumer.commit(timeout=PATIENCE_S)
                    except kmq.Refused as error:
                        refused.append(error)

    threads = [threading.Thread(target=work, daemon=True) for work in (produce, consume)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(acked) > 50 and len(read) > 50, "messages")
        leader = shard.leader()
        other = next(name for name in BROKERS if name != leader)
        old = shard.join(other, "h")
        shard.await_members("h")
        shard.kill(leader)
        before = len(acked)
        until(lambda: len(acked) > before + 50, "messages of the next leader")
        assert shard.leader() != leader
        new = until(lambda: shard.join(other, "h"), "a member of the next leader")
        assert new == old and new["assignment"]
        late = shard.post(
            other, "api/topics/t/commit", old | {"group": "h", "offsets": [{"partition": 0, "offset": 1}]}
        )
        assert late.status_code == 200, late.text
        now = shard.post(other, "api/topics/t/commit", new | {"group": "h", "offsets": [{"partition": 0, "offset": 2}]})
        assert now.status_code == 200, now.text
    finally:
        stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert sorted(acked) == list(range(len(acked))) and len(set(acked.values())) == len(acked)
    assert [value for _, _, value in read] == list(range(len(read))), "each once, in order"
    assert not refused
    offsets = [offset for _, offset, _ in read]
    assert offsets == sorted(set(offsets)) and len(read) >= len(acked)
