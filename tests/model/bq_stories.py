"""Short stories of publishers: what has to happen for one guard of the Broadcast Queue to matter. The name tells it.

Each is told twice: of the real code, which keeps every promise, and of a mutant, which breaks one (`bq_mutants`).
"""

from bq_code import DAY_S
from bq_ghost import demand
from bq_stage import Stage
from bq_world import Process
from consul_model import Pair

# --- the lock ---------------------------------------------------------------------------------------------------------


def a_publisher_that_has_lost_its_lock_publishes_nothing(stage: Stage) -> None:
    publisher = stage.publisher("p", 1, holds=[True])
    stage.until(publisher, "set:bq/1")
    stage.forget(publisher)
    stage.finish(publisher)


def nobody_publishes_while_another_holds_the_lock(stage: Stage) -> None:
    holder = stage.lock_holder("h")
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "GET kv/coordinator")
    stage.finish(holder)
    stage.finish(publisher)


def a_lock_that_was_taken_for_one_message_is_given_back_with_it(stage: Stage) -> None:
    publisher = stage.publisher("p", 2)
    stage.until(publisher, "set:bq/2")
    stage.publish()
    stage.finish(publisher)


def a_lock_that_was_given_back_is_taken_again_for_the_next_message(stage: Stage) -> None:
    stage.finish(stage.publisher("p", 2, holds=[True, False]))
    demand(not stage.is_noted("Deposed"), "who gave the lock back takes it again")


def a_publisher_that_waited_in_vain_says_so_and_waits_no_longer(stage: Stage) -> None:
    holder = stage.lock_holder("h")
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "GET kv/coordinator recurse")
    stage.clock.forward(6.0)
    stage.until(publisher, "session/destroy")
    demand(stage.is_noted("BusyError"), "who waits in vain is told who holds the lock")
    stage.finish(holder)


def a_publisher_that_waited_in_vain_has_a_txn_on_its_way(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "flying")
    holder = stage.lock_holder("h")
    stage.until(publisher, "GET kv/coordinator recurse")
    stage.clock.forward(6.0)
    stage.until(publisher, "session/destroy")
    stage.finish(holder)
    stage.land(0)


def a_lock_vanishes_and_its_session_goes_on(stage: Stage) -> None:
    publisher = stage.publisher("p", 1, holds=[True])
    stage.until(publisher, "lock:coordinator")
    stage.save()
    stage.until(publisher, "set:bq/1")
    stage.restore(0)
    stage.finish(publisher)


def a_session_ends_and_nobody_holds_the_lock(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.expire(publisher.presence.session)
    begun = stage.clock.run
    stage.until(publisher, "session/destroy")
    demand(stage.clock.run - begun < 2.0, "who has lost its session is told so at once")


def consul_is_gone_while_a_publisher_waits_for_the_lock(stage: Stage) -> None:
    publisher = stage.publisher("p", 1, holds=[True])
    stage.until(publisher, "lock:coordinator")
    _nothing_is_answered(stage, publisher)


def consul_is_gone_after_a_txn(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    _nothing_is_answered(stage, publisher)


def _nothing_is_answered(stage: Stage, publisher: Process) -> None:
    for _ in range(100):
        if stage.is_asking(publisher, "session/destroy"):
            return
        stage.step(publisher, "lost")
        stage.clock.forward(1.0)
    demand(False, f"{publisher.name} asks for ever while Consul does not answer")


def the_lock_of_a_lost_session_is_not_given_out_at_once(stage: Stage) -> None:
    holder = stage.lock_holder("h")
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.expire(holder.presence.session)
    stage.until(publisher, "pause")
    stage.finish(publisher)


def the_servers_have_not_heard_of_a_check_yet(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "session/create")
    stage.consul.unknown_checks = set(stage.consul.checks)
    stage.until(publisher, "pause")
    stage.consul.unknown_checks.clear()
    stage.finish(publisher)
    demand(stage.times_noted("service/register") == 1, "the session is opened with the check that was registered")


def the_servers_never_hear_of_a_check(stage: Stage) -> None:
    stage.code.presence._SYNC_TRIES = 5
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "session/create")
    stage.consul.unknown_checks = set(stage.consul.checks)
    stage.wait_until(publisher, "another check", lambda: stage.times_noted("service/register") == 2)
    demand(not stage.is_noted("/v1/txn"), "nothing is done without a session")
    stage.finish(publisher)


# --- the epoch and the states -----------------------------------------------------------------------------------------


def another_message_comes_between_two_of_one_publisher(stage: Stage) -> None:
    publisher = stage.publisher("p", 2)
    stage.until(publisher, "set:bq/2")
    stage.publish()
    stage.finish(publisher)


def another_message_comes_after_the_epoch_was_read(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.publish()
    stage.finish(publisher)


def another_message_changes_a_state_that_was_read(stage: Stage) -> None:
    stage.names = ["topics/t"]
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "GET kv/epoch")
    stage.publish()
    stage.finish(publisher)


def a_message_is_too_long(stage: Stage) -> None:
    stage.filler = 400_000
    publisher = stage.publisher("p", 1, holds=[True])
    stage.until(publisher, "session/destroy")
    stage.filler = 1
    stage.finish(publisher)


# --- unknown outcomes -------------------------------------------------------------------------------------------------


def the_answer_to_a_txn_is_lost(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "unheard")
    stage.finish(publisher)


def the_leader_loses_its_office_after_it_has_carried_out_a_txn(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "failed after all")
    stage.finish(publisher)


def a_txn_is_lost_and_another_message_gets_its_epoch(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "lost")
    stage.publish()
    stage.finish(publisher)


def a_message_is_deleted_before_its_publisher_has_looked(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "unheard")
    stage.publish(8)
    demand(stage.keys.message(1) not in stage.consul.state.pairs, "the message is deleted in this story")
    stage.finish(publisher)


def a_token_is_taken_away_while_a_txn_is_on_its_way(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "flying")
    stage.until(publisher, "GET kv/epoch")
    stage.hear(publisher, "forbidden")
    stage.until(publisher, "session/destroy")
    stage.land(0)


def a_txn_arrives_before_its_repetition(stage: Stage) -> None:
    stage.names = ["topics/t"]
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "flying")
    stage.until(publisher, "set:bq/1")
    stage.land(0)
    stage.finish(publisher)


def a_txn_arrives_between_two_reads_of_the_epoch(stage: Stage) -> None:
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "flying")
    stage.until(publisher, "GET kv/epoch")
    stage.hear(publisher)
    stage.land(0)
    stage.finish(publisher)


def an_unknown_outcome_is_settled_before_the_next_message(stage: Stage) -> None:
    publisher = stage.publisher("p", 2)
    stage.until(publisher, "set:bq/1")
    stage.hear(publisher, "lost")
    stage.until(publisher, "set:bq/1")
    stage.step(publisher)
    stage.publish(8)
    stage.finish(publisher)
    demand("unknown" not in stage.ghost.told.values(), "of the next message everything is known")


def consul_is_restored_and_another_message_brings_the_epoch_back_to_where_it_was(stage: Stage) -> None:
    stage.publish()
    subscriber = stage.following()
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "GET kv/epoch")
    stage.save()
    stage.publish()
    stage.until(publisher, "set:bq/3")
    stage.hear(publisher, "unheard")
    stage.follow(subscriber)
    stage.restore(0)
    stage.publish(names=["settings/s"])
    stage.finish(publisher)


def consul_is_restored_to_before_a_txn_whose_answer_was_lost(stage: Stage) -> None:
    stage.publish()
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "GET kv/epoch")
    stage.save()
    stage.publish()
    stage.until(publisher, "set:bq/3")
    stage.hear(publisher, "unheard")
    stage.restore(0)
    stage.finish(publisher)
    demand("unknown" in stage.ghost.told.values(), "what Consul has lost is not published again")


# --- deleting ---------------------------------------------------------------------------------------------------------


def trimming_is_refused(stage: Stage) -> None:
    publisher = stage.publisher("p", 2)
    stage.until(publisher, "GET kv/bq-delivered/")
    stage.hear(publisher, "forbidden")
    stage.finish(publisher)


def more_messages_are_published_than_are_kept(stage: Stage) -> None:
    stage.publish(12)
    kept = stage.code.publisher.KEPT + stage.code.publisher.TRIM_EVERY
    demand(stage.messages_there() < kept, "what all have read is deleted")


def longer_messages_are_published_than_are_kept(stage: Stage) -> None:
    stage.code.publisher.KEPT, stage.filler = 100, 100
    stage.publish(12)
    demand(stage.messages_there() < 5, "what all have read is deleted")


def a_message_is_longer_than_all_that_are_kept(stage: Stage) -> None:
    stage.filler = 300
    stage.publish(4)


def more_messages_are_deleted_than_one_txn_may_hold(stage: Stage) -> None:
    stage.code.publisher.TRIM_EVERY = 80
    stage.publish(80)
    demand(stage.messages_there() < 5, "what all have read is deleted")


def one_broker_is_behind_another(stage: Stage) -> None:
    stage.add_broker("b2")
    quick = stage.following("s1", "b1")
    stage.following("s2", "b2")
    for _ in range(12):
        stage.publish()
        stage.follow(quick)


def a_broker_is_killed_before_it_has_received_all(stage: Stage) -> None:
    stage.bury(stage.following())
    stage.publish(12)


def a_broker_is_there_and_has_not_marked_for_a_day(stage: Stage) -> None:
    stage.add_broker("b2")
    quick = stage.following("s1", "b1")
    stage.following("s2", "b2")
    stage.a_day_passes()
    for _ in range(12):
        stage.publish()
        stage.follow(quick)


def a_broker_whose_clock_was_ahead_is_gone(stage: Stage) -> None:
    stage.a_day_passes()
    stage.bury(stage.following())
    stage.clock.wall -= DAY_S
    stage.publish(12)
    demand(stage.messages_there() < 12, "nobody waits for it for ever")


def a_broker_is_gone_for_good(stage: Stage) -> None:
    stage.publish()
    stage.bury(stage.following())
    stage.a_day_passes()
    stage.publish(2)
    demand("b1" in stage.marks(), "after a day it is known")
    stage.a_day_passes()
    stage.publish(2)
    demand("b1" not in stage.marks(), "after a long time it is not")


def a_broker_that_was_gone_comes_back_and_marks(stage: Stage) -> None:
    stage.publish()
    stage.bury(stage.following())
    stage.clock.wall += 2 * DAY_S
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "delete-cas:bq-delivered/b1")
    stage.following("s2")
    stage.finish(publisher)
    demand("b1" in stage.marks(), "it is known")


def a_broker_comes_back_while_the_marks_are_read(stage: Stage) -> None:
    stage.code.publisher.TRIM_EVERY = 12
    stage.publish()
    stage.bury(stage.following())
    stage.a_day_passes()
    publisher = stage.publisher("p", 11)
    stage.until(publisher, "GET kv/bq-")
    stage.hear(publisher)
    stage.until(stage.subscriber("s2", "b1"), "GET kv/bq-delivered/b1")
    stage.finish(publisher)


def consul_is_restored_while_a_publisher_decides_what_to_delete(stage: Stage) -> None:
    stage.code.publisher.KEPT, stage.code.publisher.TRIM_EVERY = 1, 4
    stage.publish(3)
    subscriber = stage.following()
    publisher = stage.publisher("p", 1)
    stage.until(publisher, "set:bq/4")
    stage.save()
    stage.next(publisher, "GET kv/epoch")
    stage.publish()
    stage.follow(subscriber)
    stage.until(publisher, "delete:bq/4")
    stage.restore(0)
    stage.publish(2)
    stage.finish(publisher)


def consul_is_restored_to_nothing_before_a_publisher_deletes(stage: Stage) -> None:
    stage.save()
    publisher = stage.publisher("p", 2)
    stage.until(publisher, "set:bq/2")
    stage.next(publisher, "GET kv/epoch")
    stage.restore(0)
    stage.finish(publisher)


def consul_is_restored_to_nothing_while_a_publisher_reads_the_messages(stage: Stage) -> None:
    stage.save()
    publisher = stage.publisher("p", 2)
    stage.until(publisher, "GET kv/bq/")
    stage.restore(0)
    stage.finish(publisher)


def a_key_above_the_epoch_lies_beside_the_messages(stage: Stage) -> None:
    stage.code.publisher.KEPT = 1
    stage.consul.state.pairs[stage.keys.message(10**6)] = Pair(b"by hand", 0, 0)
    stage.publish(4)
    demand(stage.keys.message(4) in stage.consul.state.pairs, "the last message is kept")
    del stage.consul.state.pairs[stage.keys.message(10**6)]


def what_is_no_mark_and_no_message_lies_beside_them(stage: Stage) -> None:
    stage.consul.state.pairs[stage.keys.delivered_to("b1")] = Pair(b"by hand", 0, 0)
    stage.consul.state.pairs[stage.keys.messages + "x"] = Pair(b"by hand", 0, 0)
    stage.publish(4)
    stage.consul.state.pairs.pop(stage.keys.delivered_to("b1"), None)
