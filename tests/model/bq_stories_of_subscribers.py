"""Short stories of subscribers: what has to happen for one guard of the Broadcast Queue to matter. As `bq_stories`."""

from bq_ghost import demand
from bq_stage import Stage
from consul_model import Pair

# --- the place --------------------------------------------------------------------------------------------------------


def two_processes_want_to_be_the_subscriber(stage: Stage) -> None:
    stage.publish()
    stage.following()
    second = stage.subscriber("s2", "b1")
    stage.until(second, "GET kv/bq-subscriber/b1")
    stage.clock.forward(10.0)
    stage.until(second, "session/destroy")
    demand(stage.is_noted("BusyError"), "the second is told who is the subscriber")


def a_subscriber_marks_after_another_has_taken_over(stage: Stage) -> None:
    first = stage.subscriber("s", "b1")
    stage.until(first, ":bq-delivered/b1")
    stage.forget(first)
    stage.until(stage.subscriber("s2", "b1"), "get-tree:epoch")
    stage.until(first, "session/destroy")


def a_subscriber_is_displaced_after_consul_was_restored(stage: Stage) -> None:
    stage.publish(names=["settings/s"])
    subscriber = stage.following()
    stage.save()
    stage.publish(2, names=["settings/s"])
    stage.until(subscriber, ":bq-delivered/b1")
    stage.restore(0)
    stage.expire(subscriber.presence.session)
    stage.until(subscriber, "session/destroy")
    demand(stage.is_noted("Displaced"), "the subscriber is displaced in this story")


def a_subscriber_comes_back_and_others_have_gone_on(stage: Stage) -> None:
    stage.publish()
    first = stage.following()
    stage.publish(names=["settings/s"])
    stage.next(first, "pause")  # it has the message, and has not processed it
    stage.forget(first)
    second = stage.following("s2")
    stage.publish(names=["settings/s"])
    stage.follow(second)
    stage.until(first, "session/destroy")
    stage.bury(second)
    stage.follow(first)


def a_subscriber_whose_handler_fails_again_and_again_loses_its_place(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.publish()
    stage.failing = 1
    stage.until(subscriber, "lock:bq-subscriber/b1")
    stage.next(subscriber, "GET kv/bq/")
    stage.beat(subscriber)
    stage.expire(subscriber.presence.session)  # by hand: it goes on beating
    stage.following("s2")
    stage.beat(subscriber)
    stage.failing = 10
    stage.until(subscriber, "session/destroy")
    demand(stage.failing > 0, "who has lost its place is told so before the handler succeeds")
    stage.failing = 0


def a_subscriber_that_was_stopped_wakes_up_with_a_message(stage: Stage) -> None:
    stage.publish()
    first = stage.following()
    stage.forget(first)
    second = stage.following("s2")
    stage.publish()
    stage.follow(second)
    stage.beat(first)
    stage.until(first, "session/destroy")
    demand(not stage.is_noted("s handles 2"), "who was away for long looks whether its place is still its own")


# --- what is handed out -----------------------------------------------------------------------------------------------


def a_handler_fails_at_the_first_of_two_messages(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.publish(2)
    stage.failing = 1
    stage.follow(subscriber)


def nine_and_ten_come_together(stage: Stage) -> None:
    stage.publish(8)
    subscriber = stage.following()
    stage.publish(2)
    stage.follow(subscriber)


def a_message_comes_after_those_that_were_processed(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    for _ in range(2):
        stage.publish()
        stage.follow(subscriber)


def a_broker_was_away_from_before_the_first_message_until_past_a_trim(stage: Stage) -> None:
    stage.bury(stage.following())
    stage.a_day_passes()
    stage.publish(12)
    stage.following("s2")


def the_snapshot_after_a_gap_is_not_answered(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.forget(subscriber)
    stage.a_day_passes()
    stage.publish(12)
    stage.until(subscriber, "get-tree:epoch")
    stage.hear(subscriber, "lost")
    stage.follow(subscriber)


def what_is_no_message_lies_behind_one(stage: Stage) -> None:
    subscriber = stage.following()
    stage.publish(2)
    stage.consul.state.pairs[stage.keys.message(2)] = Pair(b"by hand", 0, 0)
    try:
        stage.follow(subscriber)
    except ValueError:
        demand(stage.ghost.brokers["b1"].furthest == 1, "what comes before it is handed out")
    else:
        demand(False, "what is no message is not passed over")
    del stage.consul.state.pairs[stage.keys.message(2)]
    stage.bury(subscriber)


def keys_above_the_epoch_lie_beside_the_messages(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    message = stage.consul.state.pairs[stage.keys.message(1)].value
    for stray, value in ((2, b"by hand"), (10**6, message)):
        stage.consul.state.pairs[stage.keys.message(stray)] = Pair(value, 0, 0)
        stage.hear(subscriber)
        stage.follow(subscriber)
        del stage.consul.state.pairs[stage.keys.message(stray)]
    demand(stage.times_noted("get-tree") == 1, "a stray key gives no snapshot")


def a_snapshot_is_read_while_a_message_is_published(stage: Stage) -> None:
    stage.names = ["topics/t"]
    stage.publish()
    subscriber = stage.subscriber("s", "b1")
    stage.until(subscriber, "get-tree:epoch")
    stage.step(subscriber)
    stage.publish()
    stage.follow(subscriber)


def nothing_was_ever_published(stage: Stage) -> None:
    subscriber = stage.following()
    stage.hear(subscriber)
    stage.follow(subscriber)
    demand(stage.times_noted("get-tree") == 1, "one snapshot of nothing is enough")


def the_newest_message_is_deleted_by_hand(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.publish(names=["settings/s"])
    stage.consul.answer(next(stage.code.consul.txn([stage.code.consul.KvOperation("delete", stage.keys.message(2))])))
    stage.hear(subscriber)
    stage.follow(subscriber)
    demand(stage.marks()["b1"][0] == 2, "a snapshot follows though nothing was published since")


def a_message_comes_after_a_watch_was_answered(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.step(subscriber)
    stage.publish()
    stage.step(subscriber)
    stage.follow(subscriber)
    demand(stage.marks()["b1"][0] == 2 and stage.times_noted("get-tree") == 1, "what is there is handed out")


def messages_come_one_by_one(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    before = stage.times_noted(f"s GET /v1/kv/{stage.keys.epoch}")
    for _ in range(3):
        stage.publish()
        stage.follow(subscriber)
    asked = stage.times_noted(f"s GET /v1/kv/{stage.keys.epoch}") - before
    demand(not asked, "a message costs no read of the epoch")


# --- Consul is restored -----------------------------------------------------------------------------------------------


def the_epoch_goes_back(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.save()
    stage.publish(3)
    stage.follow(subscriber)
    stage.restore(0)


def consul_is_restored_to_nothing(stage: Stage) -> None:
    stage.save()
    stage.publish(2)
    subscriber = stage.following()
    stage.restore(0)
    stage.until(subscriber, "GET kv/epoch")
    stage.until(subscriber, "get-tree:epoch")


def other_messages_come_under_the_same_epochs(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.save()
    stage.publish(2)
    stage.follow(subscriber)
    stage.restore(0)
    stage.publish(2)


def other_messages_come_under_the_epoch_of_a_snapshot(stage: Stage) -> None:
    stage.publish()
    stage.save()
    stage.publish(2)
    stage.following()
    stage.restore(0)
    stage.publish(2)


def what_was_processed_last_is_replaced_and_deleted(stage: Stage) -> None:
    stage.publish(4)
    subscriber = stage.following()
    stage.save()
    stage.publish()
    stage.follow(subscriber)
    stage.restore(0)
    stage.a_day_passes()
    stage.forget(subscriber)
    stage.publish(4)
    demand(stage.keys.message(5) not in stage.consul.state.pairs, "message 5 is deleted in this story")
    demand(stage.keys.message(6) in stage.consul.state.pairs, "there is no gap in this story")
    stage.follow(subscriber)


def the_number_of_a_watch_goes_back(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.save()
    stage.publish(3)
    stage.follow(subscriber)
    stage.restore(0)
    stage.hear(subscriber)
    stage.follow(subscriber)
    stage.hear(subscriber)


def the_epoch_is_not_answered_after_it_went_back(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.save()
    stage.publish(3)
    stage.follow(subscriber)
    stage.restore(0)
    stage.until(subscriber, "GET kv/epoch")
    stage.hear(subscriber, "lost")
    stage.follow(subscriber)


# --- marks ------------------------------------------------------------------------------------------------------------


def a_mark_arrives_after_a_newer_one(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.publish()
    stage.until(subscriber, ":bq-delivered/b1")
    stage.hear(subscriber, "flying")
    stage.publish()
    stage.follow(subscriber)
    stage.land(0)


def the_answer_to_a_mark_is_lost(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.publish()
    stage.until(subscriber, ":bq-delivered/b1")
    stage.hear(subscriber, "unheard")
    stage.publish()
    stage.follow(subscriber)


def the_wall_clock_is_put_back(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.clock.wall -= 3600.0
    stage.publish()
    stage.follow(subscriber)


def nothing_comes_for_two_hours(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    stage.clock.wall += 7200.0
    stage.hear(subscriber)
    stage.follow(subscriber)
    mark = stage.code.publisher.Mark.decode(stage.consul.state.pairs[stage.keys.delivered_to("b1")].value)
    demand(stage.clock.wall - mark.ts < 3600.0, "an idle subscriber does not look absent")
