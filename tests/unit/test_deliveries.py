"""Messages that members gave back, without a broker: which are due, who has them, and which commit says they are done."""

from kmq.gateway.groups.deliveries import NEVER, Answer, Deliveries, OpenDelivery, given_back, is_paused, is_spent
from kmq.gateway.groups.offset_table import MAX_NACKS, NackRow, decode_payload, encode_payload

PLACE, OTHER = ("orders", 0), ("orders", 1)
ROWS = {7: NackRow(1, 100.0), 3: NackRow(2, 50.0), 9: NackRow(1, 300.0)}


def test_what_is_due_comes_in_order_and_only_once_while_it_is_in_hand():
    deliveries = Deliveries()
    assert deliveries.due("g", PLACE, ROWS, 200.0) == [3, 7] and deliveries.next_due("g", PLACE, ROWS) == 50.0
    deliveries.open("g", PLACE, 3, OpenDelivery("m", 20))
    assert deliveries.due("g", PLACE, ROWS, 200.0) == [7] and deliveries.next_due("g", PLACE, ROWS) == 100.0
    assert deliveries.due("other", PLACE, ROWS, 200.0) == [3, 7] and deliveries.due("g", OTHER, ROWS, 200.0) == [3, 7]
    assert deliveries.give_back("g", PLACE, 3) and not deliveries.give_back("g", PLACE, 3)
    assert deliveries.due("g", PLACE, ROWS, 200.0) == [3, 7]
    assert deliveries.next_due("g", PLACE, {}) == NEVER


def test_only_a_commit_behind_the_delivery_says_that_a_message_is_done():
    deliveries = Deliveries()
    deliveries.open("g", PLACE, 3, OpenDelivery("m", 20))
    deliveries.open("g", PLACE, 7, OpenDelivery("m", 22))
    assert deliveries.done_by("g", PLACE, 4) == []  # it may be a commit of before the delivery
    for offset, position in ((3, 20), (7, 22)):
        deliveries.show("g", PLACE, offset, position)
    assert [deliveries.done_by("g", PLACE, offset) for offset in (0, 3, 4, 8, 19, 20, 21, 22, 99)] == [
        *([], [], [3], [7], []),
        *([3], [3], [3, 7], [3, 7]),
    ]
    assert deliveries.done_by("g", OTHER, 99) == [] and deliveries.done_by("other", PLACE, 99) == []


def test_what_a_member_had_in_hand_is_due_again_when_it_reads_that_partition_no_more():
    deliveries = Deliveries()
    for place, offset, member in ((PLACE, 3, "m"), (PLACE, 7, "n"), (OTHER, 3, "m")):
        deliveries.open("g", place, offset, OpenDelivery(member, 20))
    deliveries.release("g", "m", keeps=[OTHER])
    assert (deliveries.due("g", PLACE, ROWS, 200.0), deliveries.due("g", OTHER, ROWS, 200.0)) == ([3], [7])
    deliveries.release("g", "m")
    assert deliveries.due("g", OTHER, ROWS, 200.0) == [3, 7]


def test_the_count_and_the_first_time_stay_when_a_message_is_given_back_again():
    row = given_back(None, 100.0, 5.0, "busy")
    assert row == NackRow(1, 105.0, "busy", first=100.0)
    assert decode_payload(encode_payload(row)) == row
    assert encode_payload(row) == b"deliveries=1 due=105.000 reason=busy first=100.000"
    later = given_back(row._replace(deliveries=4, seq=9), 200.0, 0.0, "still")
    assert later == NackRow(4, 200.0, "still", 9, 100.0)
    assert decode_payload(b"deliveries=1 due=105.000 reason=busy") == NackRow(1, 105.0, "busy")  # of an older release
    assert decode_payload(b"deliveries=1 due=105.000 reason= later=x") == NackRow(1, 105.0)  # of a later one


def test_a_limit_of_deliveries_and_of_waiting_messages_is_kept():
    assert [is_spent(NackRow(count, 0.0), 3) for count in (1, 2, 3, 4)] == [False, False, True, True]
    assert not is_spent(NackRow(999, 0.0), 0)
    rows = {offset: NackRow(1, 0.0) for offset in range(MAX_NACKS)}
    assert is_paused(rows) and not is_paused(dict(list(rows.items())[1:]))


def sent(deliveries, *offsets, again=(), member="m"):
    answer = Answer({PLACE: list(offsets)} if offsets else {}, [(PLACE, offset) for offset in again])
    deliveries.answers.send("g", member, answer)
    return answer


def lost(deliveries, offset, member="m"):
    return [new for _, new in deliveries.answers.commit("g", member, PLACE, offset)]


def test_a_commit_loses_what_a_later_answer_has_passed_unless_it_has_arrived():
    deliveries = Deliveries()
    first = sent(deliveries, 0, 1, 2)
    assert lost(deliveries, 3) == [], "no later answer has shown this offset, so the member has the first"
    sent(deliveries, 3, 4)
    assert lost(deliveries, 0) == [] and lost(deliveries, 3) == [[0, 1, 2]] and lost(deliveries, 5) == [[0, 1, 2]]
    assert lost(deliveries, 5, member="n") == []
    deliveries.answers.end("g", "m", first)
    assert lost(deliveries, 5) == []


def test_who_commits_an_offset_from_inside_an_answer_has_it():
    deliveries = Deliveries()
    answer = sent(deliveries, 0, 1, 2)
    sent(deliveries)  # no messages, but it shows where the first one ended
    assert lost(deliveries, 3) == [[0, 1, 2]]
    assert lost(deliveries, 2) == [] and not deliveries.answers.has("g", "m", answer)


def test_what_is_sent_again_is_on_the_way_once():
    deliveries = Deliveries()
    for offset in (1, 2):
        deliveries.open("g", PLACE, offset, OpenDelivery("m", 9, is_shown=True))
    sent(deliveries, 5, 6, 7, again=[1, 2])
    answer = sent(deliveries, 5, 6, again=[1])
    sent(deliveries, 8)
    assert sorted(lost(deliveries, 9)) == [[5, 6], [7]]
    deliveries.answers.end("g", "m", answer)
    assert lost(deliveries, 9) == [[7]]
    assert (deliveries.done_by("g", PLACE, 9), deliveries.lost_by("g", PLACE, 9)) == ([1], [2])
    assert (deliveries.done_by("g", PLACE, 3), deliveries.lost_by("g", PLACE, 3)) == ([], [2]), (
        "or of what was read before"
    )


def test_a_member_that_has_ended_or_reads_a_partition_no_more_has_nothing_on_the_way():
    deliveries = Deliveries()
    for end in (
        lambda: deliveries.died("g", "m", {}),
        lambda: deliveries.release("g", "m", keeps=[OTHER]),
        lambda: deliveries.drop("g", PLACE),
        lambda: deliveries.forget_topics(["orders"]),
    ):
        sent(deliveries, 0, 1)
        sent(deliveries, 2)
        end()
        assert lost(deliveries, 3) == []


def test_more_than_can_be_kept_is_not_left_behind():
    deliveries = Deliveries()
    sent(deliveries, 0, 1, 2)
    sent(deliveries, 3, 4)
    first_on_the_way = deliveries.answers.first_on_the_way
    assert [first_on_the_way("g", "m", PLACE, 0, most) for most in (5, 4)] == [None, 0]
    assert [first_on_the_way("g", "m", PLACE, 2, most) for most in (3, 2)] == [None, 2], "committed up to 2"
