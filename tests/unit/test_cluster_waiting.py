"""What waits for Consul: an answer that does not come in time ends nothing that may be asked again."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kmq.cluster.consul import ConsulAddress, Request, Transport, Unanswered, read
from kmq.cluster.presence import Lock, Presence
from kmq.cluster.queue import Heart


class Forgetful:
    """Carries out the steps, and loses the answers of the first requests, or the requests."""

    def __init__(self, consul, lost, are_sent):
        self.transport = Transport(ConsulAddress.of(consul.address))
        self.lost, self.are_sent = lost, are_sent

    def run(self, steps):
        return self.transport.run(self._forget(steps))

    def _forget(self, steps):
        asked = next(steps)
        try:
            while True:
                is_lost, self.lost = self.lost > 0 and isinstance(asked, Request), self.lost - 1
                answer = (yield asked) if self.are_sent or not is_lost else None
                asked = steps.throw(Unanswered("nobody answered")) if is_lost else steps.send(answer)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("are_sent", [True, False])
def test_lock_is_asked_for_again_when_no_answer_came(consul, are_sent):
    forgetful = Forgetful(consul, 2, are_sent)
    transport, presence = forgetful.transport, Presence(10)
    transport.run(presence.open())
    heart = Heart(transport, presence)
    try:
        lock = Lock(f"kmq/waiting-{are_sent}/coordinator", presence, "test")
        forgetful.run(lock.take(30))
        transport.run(lock.give())
        forgetful.lost = 1000
        with pytest.raises(Unanswered):
            forgetful.run(lock.take(0.2))
    finally:
        heart.stop()
        transport.run(presence.close())
        transport.close()


def test_two_threads_that_leave_a_silent_address_both_reach_the_next(consul, monkeypatch):
    monkeypatch.setattr("kmq.cluster.consul._ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = Transport(ConsulAddress.of(f"127.0.0.1:{silent.getsockname()[1]},{consul.address}"))
        with ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(lambda: transport.run(read("waiting/none"))) for _ in range(2)]
            assert [thread.result() for thread in reading] == [None, None]
        transport.close()
