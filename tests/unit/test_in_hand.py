"""Messages that members gave back, without a broker: which are due, who has them, and which commit says they are done."""

from kmq.gateway.groups.in_hand import NEVER, Answer, Hand, InHand, given_back, is_paused, is_spent
from kmq.gateway.groups.offset_table import MAX_NACKS, Nack, decode_payload, encode_payload

PLACE, OTHER = ("orders", 0), ("orders", 1)
ROWS = {7: Nack(1, 100.0), 3: Nack(2, 50.0), 9: Nack(1, 300.0)}


def test_what_is_due_comes_in_order_and_only_once_while_it_is_in_hand():
    hands = InHand()
    assert hands.due("g", PLACE, ROWS, 200.0) == [3, 7] and hands.next_due("g", PLACE, ROWS) == 50.0
    hands.take("g", PLACE, 3, Hand("m", 20))
    assert hands.due("g", PLACE, ROWS, 200.0) == [7] and hands.next_due("g", PLACE, ROWS) == 100.0
    assert hands.due("other", PLACE, ROWS, 200.0) == [3, 7] and hands.due("g", OTHER, ROWS, 200.0) == [3, 7]
    assert hands.give_back("g", PLACE, 3) and not hands.give_back("g", PLACE, 3)
    assert hands.due("g", PLACE, ROWS, 200.0) == [3, 7]
    assert hands.next_due("g", PLACE, {}) == NEVER


def test_only_a_commit_behind_the_delivery_says_that_a_message_is_done():
    hands = InHand()
    hands.take("g", PLACE, 3, Hand("m", 20))
    hands.take("g", PLACE, 7, Hand("m", 22))
    assert hands.done_by("g", PLACE, 4) == []  # it may be a commit of before the delivery
    for offset, position in ((3, 20), (7, 22)):
        hands.show("g", PLACE, offset, position)
    assert [hands.done_by("g", PLACE, offset) for offset in (0, 3, 4, 8, 19, 20, 21, 22, 99)] == [
        *([], [], [3], [7], []),
        *([3], [3], [3, 7], [3, 7]),
    ]
    assert hands.done_by("g", OTHER, 99) == [] and hands.done_by("other", PLACE, 99) == []


def test_what_a_member_had_in_hand_is_due_again_when_it_reads_that_partition_no_more():
    hands = InHand()
    for place, offset, member in ((PLACE, 3, "m"), (PLACE, 7, "n"), (OTHER, 3, "m")):
        hands.take("g", place, offset, Hand(member, 20))
    hands.release("g", "m", keeps=[OTHER])
    assert (hands.due("g", PLACE, ROWS, 200.0), hands.due("g", OTHER, ROWS, 200.0)) == ([3], [7])
    hands.release("g", "m")
    assert hands.due("g", OTHER, ROWS, 200.0) == [3, 7]


def test_the_count_and_the_first_time_stay_when_a_message_is_given_back_again():
    row = given_back(None, 100.0, 5.0, "busy")
    assert row == Nack(1, 105.0, "busy", first=100.0)
    assert decode_payload(encode_payload(row)) == row
    assert encode_payload(row) == b"deliveries=1 due=105.000 reason=busy first=100.000"
    later = given_back(row._replace(deliveries=4, seq=9), 200.0, 0.0, "still")
    assert later == Nack(4, 200.0, "still", 9, 100.0)
    assert decode_payload(b"deliveries=1 due=105.000 reason=busy") == Nack(1, 105.0, "busy")  # of an older release
    assert decode_payload(b"deliveries=1 due=105.000 reason= later=x") == Nack(1, 105.0)  # of a later one


def test_a_limit_of_deliveries_and_of_waiting_messages_is_kept():
    assert [is_spent(Nack(count, 0.0), 3) for count in (1, 2, 3, 4)] == [False, False, True, True]
    assert not is_spent(Nack(999, 0.0), 0)
    rows = {offset: Nack(1, 0.0) for offset in range(MAX_NACKS)}
    assert is_paused(rows) and not is_paused(dict(list(rows.items())[1:]))


def sent(hands, *offsets, again=(), member="m"):
    answer = Answer({PLACE: list(offsets)} if offsets else {}, [(PLACE, offset) for offset in again])
    hands.answers.send("g", member, answer)
    return answer


def lost(hands, offset, member="m"):
    return [new for _, new in hands.answers.commit("g", member, PLACE, offset)]


def test_a_commit_loses_what_a_later_answer_has_passed_unless_it_has_arrived():
    hands = InHand()
    first = sent(hands, 0, 1, 2)
    assert lost(hands, 3) == [], "no later answer has shown this offset, so the member has the first"
    sent(hands, 3, 4)
    assert lost(hands, 0) == [] and lost(hands, 3) == [[0, 1, 2]] and lost(hands, 5) == [[0, 1, 2]]
    assert lost(hands, 5, member="n") == []
    hands.answers.end("g", "m", first)
    assert lost(hands, 5) == []


def test_who_commits_an_offset_from_inside_an_answer_has_it():
    hands = InHand()
    answer = sent(hands, 0, 1, 2)
    sent(hands)  # no messages, but it shows where the first one ended
    assert lost(hands, 3) == [[0, 1, 2]]
    assert lost(hands, 2) == [] and not hands.answers.has("g", "m", answer)


def test_what_is_sent_again_is_on_the_way_once():
    hands = InHand()
    for offset in (1, 2):
        hands.take("g", PLACE, offset, Hand("m", 9, is_shown=True))
    sent(hands, 5, 6, 7, again=[1, 2])
    answer = sent(hands, 5, 6, again=[1])
    sent(hands, 8)
    assert sorted(lost(hands, 9)) == [[5, 6], [7]]
    hands.answers.end("g", "m", answer)
    assert lost(hands, 9) == [[7]]
    assert (hands.done_by("g", PLACE, 9), hands.lost_by("g", PLACE, 9)) == ([1], [2])
    assert (hands.done_by("g", PLACE, 3), hands.lost_by("g", PLACE, 3)) == ([], [2]), "or of what was read before"


def test_a_member_that_has_ended_or_reads_a_partition_no_more_has_nothing_on_the_way():
    hands = InHand()
    for end in (
        lambda: hands.died("g", "m"),
        lambda: hands.release("g", "m", keeps=[OTHER]),
        lambda: hands.drop("g", PLACE),
        lambda: hands.forget_topics(["orders"]),
    ):
        sent(hands, 0, 1)
        sent(hands, 2)
        end()
        assert lost(hands, 3) == []


def test_more_than_can_be_kept_is_not_left_behind():
    hands = InHand()
    sent(hands, 0, 1, 2)
    sent(hands, 3, 4)
    first_kept = hands.answers.first_kept
    assert [first_kept("g", "m", PLACE, 0, most) for most in (5, 4)] == [None, 0]
    assert [first_kept("g", "m", PLACE, 2, most) for most in (3, 2)] == [None, 2], "committed up to 2"
