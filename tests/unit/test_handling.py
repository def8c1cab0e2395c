"""The rules of Consumer.run and AsyncConsumer.run, without a broker: what is tried again, buried, committed, and when."""

import signal
import threading

import pytest

from kmq.client.consumer_options import ConsumerOptions
from kmq.client.handling import Attempts, Backoff, Held, Permanent, Rules
from kmq.client.runner import stopping
from kmq.errors import ConfigError
from kmq.message.letters import Failure
from kmq.message.message import Message
from kmq.wire.requests import TopicPartition

PLACE, OTHER = TopicPartition("orders", 0), TopicPartition("orders", 1)
LATER = OSError("later")
RULES = Rules(max_retries=2, backoff=Backoff(first=1.0, longest=8.0), permanent=(KeyError,))


def message(offset: int, partition: int = 0) -> Message:
    return Message("orders", partition, offset, b"1|1.000000|orders|0||x")


def attempts(**changes: object) -> Attempts:
    return Attempts(ConsumerOptions(group_id="g"), RULES._replace(**changes))


def test_a_message_is_tried_again_until_its_retries_are_spent():
    mine = attempts()
    first = mine.failed(message(5), LATER, now=10.0, wall=100.0)
    assert isinstance(first, Held) and first[:3] == (5, 1, 100.0) and 10.5 <= first.due <= 11.0
    second = mine.failed(message(5), LATER, now=12.0, wall=102.0)
    assert isinstance(second, Held) and second[:3] == (5, 2, 100.0) and 13.0 <= second.due <= 14.0
    assert mine.failed(message(5), LATER, now=15.0, wall=105.0) == Failure("g", LATER, 3, 100.0, 105.0)
    mine.succeeded(message(5))  # its letter is on disk
    assert mine.take_handled() == {PLACE: 6} and mine.take_handled() == {}


@pytest.mark.parametrize("error", [Permanent("never"), KeyError("k")])
def test_what_is_permanent_is_not_tried_again(error):
    assert attempts().failed(message(5), error, 10.0, 100.0) == Failure("g", error, 1, 100.0, 100.0)


def test_a_partition_waits_behind_its_message_and_others_go_on():
    mine = attempts()
    mine.begin()
    held = mine.failed(message(5), LATER, 10.0, 100.0)
    assert isinstance(held, Held)
    assert [mine.is_turn_of(each) for each in (message(6), message(9, 1))] == [False, True]
    mine.succeeded(message(9, 1))
    assert mine.take_handled() == {OTHER: 10}
    assert 0.5 <= mine.wait_s(10.0) <= 1.0 and mine.wait_s(held.due + 1) == 0.0
    assert mine.due([PLACE, OTHER], held.due - 0.001) == []
    assert mine.due([PLACE, OTHER], held.due) == [PLACE] and mine.due([PLACE, OTHER], held.due) == []
    mine.begin()
    assert mine.is_turn_of(message(5)) and mine.wait_s(held.due) == 1.0


def test_attempts_of_a_time_before_another_member_read_do_not_count():
    mine = attempts(max_retries=1)
    held = mine.failed(message(5), LATER, 10.0, 100.0)
    assert isinstance(held, Held) and mine.due([OTHER], held.due) == []  # it went to another member
    again = mine.failed(message(5), LATER, 20.0, 110.0)
    assert isinstance(again, Held) and again[:3] == (5, 1, 110.0)
    other = mine.failed(message(8), LATER, 30.0, 120.0)  # the group has moved on meanwhile
    assert isinstance(other, Held) and other[:3] == (8, 1, 120.0)


def test_letters_go_to_the_topic_named_or_beside_their_own():
    assert Rules().topic_of_letters("orders") == "orders.dlq"
    assert Rules(dlq="dead").topic_of_letters("orders") == "dead"


def test_a_consumer_without_a_group_cannot_run_a_handler():
    with pytest.raises(ConfigError, match="needs group_id="):
        Attempts(ConsumerOptions(), RULES)
    with pytest.raises(ConfigError, match="max_retries=-1: must be 0 or more"):
        attempts(max_retries=-1)


@pytest.mark.parametrize(
    ("handler", "changes", "knows", "says"),
    [
        (5, {}, True, "handler=5: must be a function"),
        (print, {"backoff": Backoff(first=float("nan"))}, True, "backoff: first=nan"),
        (print, {"backoff": Backoff(first=-5)}, True, "backoff: first=-5"),
        (print, {"backoff": Backoff(longest=-1)}, True, "longest=-1"),
        (print, {"dlq": "a/b"}, True, "dlq='a/b': must be a topic"),
        (print, {}, False, "producer: must be given"),
    ],
)
def test_what_would_fail_with_the_first_letter_is_refused_at_once(handler, changes, knows, says):
    with pytest.raises(ConfigError, match=says):
        RULES._replace(**changes).check(handler, knows)


def test_without_dead_letters_no_producer_is_needed():
    RULES._replace(dlq=None).check(print, knows_producers=False)
    RULES._replace(dlq="letters").check(print, knows_producers=True)


def test_sigterm_sets_an_event_also_while_this_thread_holds_its_lock():
    """As in `stop.wait(1)` of a handler: a set() inside the signal's handler would wait for that lock for ever."""
    event, lock = threading.Event(), threading.Lock()

    class Stop:
        is_set = event.is_set

        def set(self):
            assert lock.acquire(timeout=5)
            lock.release()
            event.set()

    with stopping(Stop()):
        with lock:
            signal.raise_signal(signal.SIGTERM)
        assert event.wait(30)
