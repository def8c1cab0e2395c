"""One mutant for each guard of a subscriber, its place and its marks: the guard taken out, and the story it breaks."""

import bq_stories_of_subscribers as stories
from bq_stage import Mutant, edited

SUBSCRIBER = [
    Mutant(
        "a lock is written by anybody",
        stories.two_processes_want_to_be_the_subscriber,
        edited(
            "presence",
            (
                'KvOperation("lock", key, value, session=self.session)',
                'KvOperation("set", key, value)',
            ),
        ),
    ),
    Mutant(
        "a lock that another holds is taken for ours",
        stories.two_processes_want_to_be_the_subscriber,
        edited(
            "presence",
            (
                "return None if holder.session == self.session else holder",
                "return None",
            ),
        ),
    ),
    Mutant(
        "who marks need not hold the lock",
        stories.a_subscriber_marks_after_another_has_taken_over,
        edited(
            "subscriber",
            (
                "ours = check_session(self._key, self._presence.session)",
                'ours = KvOperation("get-tree", self._key)',
            ),
        ),
    ),
    Mutant(
        "who does not hold the lock tries to mark for ever",
        stories.a_subscriber_marks_after_another_has_taken_over,
        edited(
            "subscriber",
            (
                "if conflict.op_index == 0:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "who wants to be the subscriber waits for ever",
        stories.two_processes_want_to_be_the_subscriber,
        edited(
            "subscriber",
            (
                "            if self._clock() > until:\n",
                "            if False:\n",
            ),
        ),
    ),
    Mutant(
        "a subscriber that was displaced forgets what it knew",
        stories.a_subscriber_is_displaced_after_consul_was_restored,
        edited(
            "subscriber",
            (
                "            self.done = mark\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a subscriber that comes back has not missed what others processed",
        stories.a_subscriber_comes_back_and_others_have_gone_on,
        edited(
            "subscriber",
            (
                "self.done if mark[:2] == self.done[:2] else None",
                "self.done",
            ),
        ),
    ),
    Mutant(
        "what is handed out counts as processed",
        stories.a_handler_fails_at_the_first_of_two_messages,
        edited(
            "subscriber",
            (
                "            self.newest = self._handed_out = following[-1][0]\n",
                (
                    "            self.newest = self._handed_out = following[-1][0]\n"
                    "            self.done = Mark(items[-1].epoch, items[-1].id, time.time())\n"
                ),
            ),
        ),
    ),
    Mutant(
        "what is left of a list waits for the next message",
        stories.a_handler_fails_at_the_first_of_two_messages,
        edited(
            "subscriber",
            (
                "0 if has_more else self._position",
                "self._position",
            ),
        ),
    ),
    Mutant(
        "epochs are sorted as text",
        stories.nine_and_ten_come_together,
        edited(
            "subscriber",
            (
                "for epoch in sorted(found) if epoch > last]",
                "for epoch in sorted(found, key=str) if epoch > last]",
            ),
        ),
    ),
    Mutant(
        "what was processed is handed out again",
        stories.a_message_comes_after_those_that_were_processed,
        edited(
            "subscriber",
            (
                "for epoch in sorted(found) if epoch > last]",
                "for epoch in sorted(found)]",
            ),
        ),
    ),
    Mutant(
        "a gap is passed over",
        stories.a_broker_was_away_from_before_the_first_message_until_past_a_trim,
        edited(
            "subscriber",
            (
                "if missing is not None and (",
                "if False and (",
            ),
        ),
    ),
    Mutant(
        "a message that was deleted while it was the newest is waited for",
        stories.the_newest_message_is_deleted_by_hand,
        edited(
            "subscriber",
            (
                "if newest <= last or any(",
                "if newest < last or any(",
            ),
        ),
    ),
    Mutant(
        "a message that comes after the answer to a watch is taken for deleted",
        stories.a_message_comes_after_a_watch_was_answered,
        edited(
            "subscriber",
            (
                "(yield from consul.read(self._keys.message(epoch))) is None\n",
                "True\n",
            ),
        ),
    ),
    Mutant(
        "the epoch is asked for with every message",
        stories.messages_come_one_by_one,
        edited(
            "subscriber",
            (
                "if newest <= last or any(",
                "if newest or any(",
            ),
        ),
    ),
    Mutant(
        "a watch goes on though its answer led to nothing",
        stories.the_snapshot_after_a_gap_is_not_answered,
        edited(
            "subscriber",
            (
                "        self._position = 0  # an error",
                "        self._position = watched.position  # an error",
            ),
        ),
    ),
    Mutant(
        "a watch waits for a number from before Consul was restored",
        stories.the_epoch_is_not_answered_after_it_went_back,
        edited(
            "subscriber",
            (
                "        self._position = 0  # an error",
                "        # an error",
            ),
        ),
    ),
    Mutant(
        "what is no message hides those before it",
        stories.what_is_no_message_lies_behind_one,
        edited(
            "subscriber",
            (
                "                if not items:\n",
                "                if True:\n",
            ),
        ),
    ),
    Mutant(
        "a key above the epoch is taken for a message",
        stories.keys_above_the_epoch_lie_beside_the_messages,
        edited(
            "subscriber",
            (
                "if (yield from self._read_epoch()) >= epoch:",
                "if True:",
            ),
        ),
    ),
    Mutant(
        "a key far above the epoch is taken for the end of a gap",
        stories.keys_above_the_epoch_lie_beside_the_messages,
        edited(
            "subscriber",
            (
                "for epoch, entry in found.items() if epoch <= end}",
                "for epoch, entry in found.items()}",
            ),
        ),
    ),
    Mutant(
        "what is no message is passed over",
        stories.what_is_no_message_lies_behind_one,
        edited(
            "subscriber",
            (
                "                        raise\n",
                "                        break\n",
            ),
        ),
    ),
    Mutant(
        "a snapshot of nothing is followed by another",
        stories.nothing_was_ever_published,
        edited(
            "subscriber",
            (
                "if done.id and newest >= last and",
                "if newest >= last and",
            ),
        ),
    ),
    Mutant(
        "an epoch that went back is not noticed",
        stories.the_epoch_goes_back,
        edited(
            "subscriber",
            (
                "                return None  # Consul was restored",
                "                return []",
            ),
        ),
    ),
    Mutant(
        "the id under the epoch that was processed last is not compared",
        stories.other_messages_come_under_the_same_epochs,
        edited(
            "subscriber",
            (
                "Message.decode(found[last].value, last).id == done.id",
                "True",
            ),
        ),
    ),
    Mutant(
        "a message that is gone is taken for the one that was processed",
        stories.what_was_processed_last_is_replaced_and_deleted,
        edited(
            "subscriber",
            (
                "not (is_there and ",
                "not (not is_there or ",
            ),
        ),
    ),
    Mutant(
        "a snapshot does not tell the id of its message",
        stories.other_messages_come_under_the_epoch_of_a_snapshot,
        edited(
            "subscriber",
            (
                'Message.decode(newest, epoch).id if newest is not None else ""',
                '""',
            ),
        ),
    ),
    Mutant(
        "a snapshot is read in several Txns",
        stories.a_snapshot_is_read_while_a_message_is_published,
        edited(
            "subscriber",
            (
                'entries = yield from consul.txn([KvOperation("get-tree", tree) for tree in trees])',
                (
                    "entries = []\n"
                    "        for tree in trees:\n"
                    '            entries += yield from consul.txn([KvOperation("get-tree", tree)])'
                ),
            ),
        ),
    ),
    Mutant(
        "a number of a watch that went back is kept",
        stories.the_number_of_a_watch_goes_back,
        edited(
            "consul",
            (
                "now if now >= position else 0",
                "max(now, position)",
            ),
        ),
    ),
    Mutant(
        "a mark that arrives late undoes a newer one",
        stories.a_mark_arrives_after_a_newer_one,
        edited(
            "subscriber",
            (
                "cas(where, mark.encode(), self._version)",
                'KvOperation("set", where, mark.encode())',
            ),
        ),
    ),
    Mutant(
        "a mark whose answer was lost keeps all others away",
        stories.the_answer_to_a_mark_is_lost,
        edited(
            "subscriber",
            (
                "            self._version = found.version if found",
                "            found.version if found",
            ),
        ),
    ),
    Mutant(
        "nothing is marked after the clock was put back",
        stories.the_wall_clock_is_put_back,
        edited(
            "subscriber",
            (
                "self.done[:2] != self._marked[:2]:",
                "self.done.ts > self._marked.ts:",
            ),
        ),
    ),
    Mutant(
        "an idle subscriber looks absent",
        stories.nothing_comes_for_two_hours,
        edited(
            "subscriber",
            (
                "return time.time() - self.done.ts > _REFRESH_S",
                "return False",
            ),
        ),
    ),
    Mutant(
        "an error is reported once",
        stories.a_subscriber_whose_handler_fails_again_and_again_loses_its_place,
        edited(
            "subscriber",
            (
                "        self._error = error\n",
                ("        if error == self._error:\n            return\n        self._error = error\n"),
            ),
        ),
    ),
    Mutant(
        "who reports an error need not hold the lock",
        stories.a_subscriber_whose_handler_fails_again_and_again_loses_its_place,
        edited(
            "subscriber",
            (
                '            raise Displaced(f"broker {self._broker} has another subscriber now")\n',
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "there is an epoch whenever there was one",
        stories.consul_is_restored_to_nothing,
        edited(
            "subscriber",
            (
                "return self._keys.decode_epoch(found.value) if found is not None else 0",
                "return self._keys.decode_epoch(found.value)",
            ),
        ),
    ),
    Mutant(
        "there is an epoch before the first message",
        stories.nothing_was_ever_published,
        edited(
            "subscriber",
            (
                'values.pop(keys.epoch, b"0")',
                "values.pop(keys.epoch)",
            ),
        ),
    ),
    Mutant(
        "who was away for long processes what has come meanwhile",
        stories.a_subscriber_that_was_stopped_wakes_up_with_a_message,
        edited(
            "presence",
            (
                "if time.monotonic() - self.last_beat > self.ttl_s:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "a beat that comes too late counts",
        stories.a_subscriber_that_was_stopped_wakes_up_with_a_message,
        edited(
            "presence",
            (
                "        yield from self.check_if_late()\n        self.last_beat = sent",
                "        self.last_beat = sent",
            ),
        ),
    ),
]
