"""What waits for Consul: an answer that does not come in time ends nothing that may be asked again."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kmq.cluster.consul import ConsulAddress, Request, Unanswered, read
from kmq.cluster.presence import Lock
from kmq.cluster.queue import BroadcastQueue, Place


def place(address, cluster):
    return Place(ConsulAddress.of(address), cluster, "a", 10.0)


class Forgetful:
    """Carries out the steps, and loses the answers of the first requests, or the requests."""

    def __init__(self, queue, lost, are_sent):
        self.queue, self.lost, self.are_sent = queue, lost, are_sent

    def run(self, steps):
        return self.queue.run(self._forget(steps))

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
    with BroadcastQueue(place(consul.address, f"waiting-{are_sent}")) as queue, queue.subscribed() as (_, heart):
        forgetful = Forgetful(queue, 2, are_sent)
        lock = Lock(queue.keys.coordinator, heart.presence, "test")
        forgetful.run(lock.take(30))
        queue.run(lock.give())
        forgetful.lost = 1000
        with pytest.raises(Unanswered):
            forgetful.run(lock.take(0.2))


def test_two_threads_that_leave_a_silent_address_both_reach_the_next(consul, monkeypatch):
    monkeypatch.setattr("kmq.cluster.consul._ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = f"127.0.0.1:{silent.getsockname()[1]},{consul.address}"
        with BroadcastQueue(place(addresses, "waiting")) as queue, ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(lambda: queue.run(read("waiting/none"))) for _ in range(2)]
            assert [thread.result() for thread in reading] == [None, None]


def test_an_address_where_nobody_listens_or_answers_is_named_in_the_words_of_the_system(monkeypatch):
    monkeypatch.setattr("kmq.cluster.consul._ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with BroadcastQueue(place(address, "waiting")) as queue, pytest.raises(Unanswered) as caught:
            queue.run(read("waiting/none"))
        assert str(caught.value) == f"Consul at http://{address}: timed out"
    with BroadcastQueue(place(address, "waiting")) as queue, pytest.raises(Unanswered) as caught:
        queue.run(read("waiting/none"))
    assert str(caught.value) == f"Consul at http://{address}: [Errno 111] Connection refused"
