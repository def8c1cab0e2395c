"""Three brokers of a shard, with real sockets, rings and logs, whatever comes between them: what is committed stays.

The test itself is the register. Each broker learns of it as late as chance has it, and acts meanwhile on what it knows.
"""

import asyncio
import random

import pytest
from shard_parts import LEADING, WAITING, first_register, play

from kmq.log import wal

ACTIONS = 40


def log_of(broker, last):
    """The lines of its WAL up to a seq."""
    return b"".join(wal.read(broker.data, 1, last)).splitlines() if last else []


class Walk:
    """What happens, by chance, and what an outside observer knows of it."""

    def __init__(self, rng, shard, brokers):
        self.rng, self.shard, self.brokers = rng, shard, brokers
        self.by_id = {broker.id: broker for broker in brokers}
        self.committed = []
        self.spent = set()  # epochs whose leader was started again
        self.sent = 0
        self.register = first_register(brokers[0].id, [broker.id for broker in brokers])

    @property
    def leader(self):
        return self.by_id[self.register.leader]

    def judge(self):
        """What a broker takes for committed is what all others take for it."""
        for task in self.shard.tasks:
            if task.done():
                task.result()
        for broker in self.brokers:
            role, hw = broker.page.read().role, broker.page.hw
            if role == WAITING or not hw:
                continue
            lines = log_of(broker, hw)
            if len(lines) < hw:  # of a follower that has it in its ring only
                continue
            known = min(len(lines), len(self.committed))
            assert lines[:known] == self.committed[:known], f"{broker.name} has other records up to {hw}"
            self.committed += lines[known:]

    def tell(self, broker):
        """Let a broker learn of the register."""
        if (self.register.epoch, broker.id) in self.spent or not self.register.descends_from(
            broker.files.promised.version if broker.files.promised else self.register.version
        ):
            return
        leader = self.leader
        broker.promise(self.register, "" if leader is broker else self.shard.address(leader.name))

    def send(self):
        for broker in self.brokers:
            if broker.page.read().role == LEADING and broker.page.hw + 200 > broker.end:
                for _ in range(self.rng.randrange(1, 4)):
                    self.sent += 1
                    broker.send(b"t|||%d of %s" % (self.sent, broker.name.encode()))

    def elect(self):
        others = [member for member in self.register.isr if self.by_id[member] is not self.leader]
        if others:
            self.register = self.register.elect(self.rng.choice(others), [*self.by_id])
            self.tell(self.rng.choice(self.brokers))

    def change_isr(self, may_fail=True, may_shrink=True):
        """The leader asks somebody in or out, if it knows the register. Its write may never come to Consul."""
        leader, isr = self.leader, self.register.isr
        if leader.files.promised != self.register or leader.leading is None:
            return
        for other in self.brokers:
            if other.id not in isr and leader.roles.may_join(other.id):
                break
        else:
            if not may_shrink or len(isr) < 3:
                return
            other = self.rng.choice([each for each in self.brokers if each is not leader])
        wanted = [*isr, other.id] if other.id not in isr else [each for each in isr if each != other.id]
        leader.roles.prepare_isr(wanted)
        if not may_fail or self.rng.randrange(3):
            self.register = self.register.with_isr(wanted)

    async def restart(self):
        broker = self.rng.choice(self.brokers)
        promised = broker.files.promised
        if promised is not None and promised.leader == broker.id:
            self.spent.add((promised.epoch, broker.id))
        await self.shard.restart(broker)

    def cut_connections(self):
        for port in self.shard.ports.values():
            for link, _ in [*port._serving.values()]:
                if self.rng.randrange(2):
                    link.abort()

    def stop_or_go_on(self):
        broker, parts = self.rng.choice(self.brokers), ["stores", "routes", "frames", "lets_go"]
        is_whole = all(getattr(broker, part) for part in parts)
        for part in [self.rng.choice(parts)] if is_whole else parts:
            setattr(broker, part, not is_whole)

    async def act(self):
        actions = {
            self.send: 10,
            lambda: self.tell(self.rng.choice(self.brokers)): 8,
            self.elect: 1,
            self.change_isr: 3,
            self.cut_connections: 1,
            self.stop_or_go_on: 3,
            self.restart: 1,
            lambda: self.rng.choice(self.brokers).let_go(): 1,  # its stages are killed, and start again
        }
        result = self.rng.choices([*actions], [*actions.values()])[0]()
        if result is not None:
            await result
        for _ in range(self.rng.randrange(40)):
            await asyncio.sleep(0.0005)
            self.judge()

    async def heal(self):
        """Nothing fails any more: all get the same log, and a new record is committed everywhere."""
        for broker in self.brokers:
            broker.stores = broker.routes = broker.frames = broker.lets_go = True
        if (self.register.epoch, self.leader.id) in self.spent or self.leader.roles.is_spent(self.register.epoch):
            self.elect()

        def is_whole():
            for broker in self.brokers:
                if broker.files.promised != self.register or broker.roles._duty is None:
                    self.tell(broker)
            self.change_isr(may_fail=False, may_shrink=False)
            self.judge()
            return len(self.register.isr) == len(self.brokers) and self.leader.page.read().role == LEADING

        await self.shard.until(is_whole)
        self.leader.send(b"t|||the last one")
        await self.shard.until(lambda: is_whole() and len({broker.page.hw for broker in self.brokers}) == 1)
        end = self.leader.page.hw
        await self.shard.until(
            lambda: all(log_of(broker, broker.end)[-1].endswith(b"|the last one") for broker in self.brokers)
        )
        logs = [log_of(broker, broker.end) for broker in self.brokers]
        assert logs[0] == logs[1] == logs[2] and logs[0][: len(self.committed)] == self.committed
        await self.shard.until(lambda: all(broker.page.hw == len(logs[0]) >= end for broker in self.brokers))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_between_three_brokers_what_is_committed_stays(tmp_path, seed):
    async def scene(shard, *brokers):
        walk = Walk(random.Random(seed), shard, brokers)
        for broker in brokers:
            walk.tell(broker)
        await shard.until(lambda: brokers[0].page.read().role == LEADING)
        for _ in range(ACTIONS):
            await walk.act()
        await walk.heal()
        assert walk.committed

    play(tmp_path, scene, *"abc")
