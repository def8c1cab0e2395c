"""One mutant for each guard of the lock and of publishing: the guard taken out, and the story that it breaks."""

import bq_stories as stories
from bq_stage import Mutant, edited, without

LOCK = [
    Mutant(
        "who holds the lock publishes without a look at it",
        stories.a_publisher_that_has_lost_its_lock_publishes_nothing,
        edited(
            "presence",
            (
                "return [check_session(self.key, session), *operations]",
                "return [*operations]",
            ),
        ),
    ),
    Mutant(
        "who does not hold the lock publishes without taking it",
        stories.nobody_publishes_while_another_holds_the_lock,
        edited(
            "presence",
            (
                "return [taken, *operations, ",
                'return [KvOperation("get-tree", self.key), *operations][:] or [',
            ),
        ),
    ),
    Mutant(
        "a lock that was taken for one message is not given back",
        stories.a_lock_that_was_taken_for_one_message_is_given_back_with_it,
        edited(
            "presence",
            (
                'return [taken, *operations, KvOperation("unlock", self.key, session=session)]',
                "return [taken, *operations]",
            ),
        ),
    ),
    Mutant(
        "who has given the lock back goes on as if it were its own",
        stories.a_lock_that_was_given_back_is_taken_again_for_the_next_message,
        edited(
            "presence",
            (
                ("        self.is_held = False\n        yield"),
                "        yield",
            ),
        ),
    ),
    Mutant(
        "who waits for the lock waits for ever",
        stories.a_publisher_that_waited_in_vain_says_so_and_waits_no_longer,
        edited(
            "presence",
            (
                "        if left <= 0:",
                "        if False:",
            ),
        ),
    ),
    Mutant(
        "who does not get the lock asks again at once",
        stories.a_publisher_that_waited_in_vain_says_so_and_waits_no_longer,
        edited(
            "publisher",
            (
                "yield from self.lock.wait(until)",
                "pass",
            ),
        ),
    ),
    Mutant(
        "who asks for the lock while Consul is gone asks for ever",
        stories.consul_is_gone_while_a_publisher_waits_for_the_lock,
        edited(
            "presence",
            (
                "                if self._clock() >= until:\n",
                "                if False:\n",
            ),
        ),
    ),
    Mutant(
        "a publisher that waited in vain says that its message is not there, though it may come to be",
        stories.a_publisher_that_waited_in_vain_has_a_txn_on_its_way,
        edited(
            "publisher",
            (
                "except (ConsulError, BusyError) as error:",
                "except ConsulError as error:",
            ),
        ),
    ),
    Mutant(
        "a conflict at the lock is taken for one at the epoch",
        stories.a_lock_vanishes_and_its_session_goes_on,
        edited(
            "publisher",
            (
                "            if self.lock.is_held:\n",
                "            if False:\n",
            ),
        ),
    ),
    Mutant(
        "who has lost its session waits for the lock",
        stories.a_session_ends_and_nobody_holds_the_lock,
        edited(
            "presence",
            (
                "        if not (yield from self.is_alive()):",
                "        if False:",
            ),
        ),
    ),
    Mutant(
        "the lock of a lost session is asked for again at once",
        stories.the_lock_of_a_lost_session_is_not_given_out_at_once,
        edited(
            "presence",
            (
                "            yield Pause(min(left, _POLL_S))",
                "            pass",
            ),
        ),
    ),
    Mutant(
        "a check that the servers do not know yet is taken for lost",
        stories.the_servers_have_not_heard_of_a_check_yet,
        edited(
            "presence",
            (
                '                if not left or "check" not in str(error):\n',
                "                if True:\n",
            ),
        ),
    ),
    Mutant(
        "who gets no session goes on without one",
        stories.the_servers_never_hear_of_a_check,
        edited(
            "presence",
            (
                'if not left or "check" not in str(error):',
                'if "check" not in str(error):',
            ),
        ),
    ),
]

PUBLISHER = [
    Mutant(
        "an epoch that was refused is tried again for ever",
        stories.another_message_comes_between_two_of_one_publisher,
        without("publisher", "            self._last = None\n"),
    ),
    Mutant(
        "the epoch is set, whatever it was",
        stories.another_message_comes_after_the_epoch_was_read,
        edited(
            "publisher",
            (
                'cas(self._keys.epoch, b"%d" % epoch, version)',
                'KvOperation("set", self._keys.epoch, b"%d" % epoch)',
            ),
        ),
    ),
    Mutant(
        "a key that must not be there is set",
        stories.another_message_comes_after_the_epoch_was_read,
        edited(
            "consul",
            (
                '{"Verb": operation.verb,',
                '{"Verb": operation.verb if operation.version or operation.verb != "cas" else "set",',
            ),
        ),
    ),
    Mutant(
        "a state key is set, whatever it was",
        stories.another_message_changes_a_state_that_was_read,
        edited(
            "publisher",
            (
                "cas(change.key, change.value, change.version)",
                'KvOperation("set", change.key, change.value)',
            ),
        ),
    ),
    Mutant(
        "a conflict at a state key is taken for one at the epoch",
        stories.another_message_changes_a_state_that_was_read,
        edited(
            "publisher",
            (
                "elif conflict.op_index <= len(changes):",
                "elif False:",
            ),
        ),
    ),
    Mutant(
        "a message that is too long is sent for ever",
        stories.a_message_is_too_long,
        (
            *edited(
                "publisher",
                (
                    "        check_size(",
                    "        (lambda *_: None)(",
                ),
            ),
            *edited(
                "consul",
                (
                    "if response.status >= 500:",
                    "if response.status >= 413:",
                ),
            ),
        ),
    ),
    Mutant(
        "an unknown outcome is not read back",
        stories.the_answer_to_a_txn_is_lost,
        edited(
            "publisher",
            (
                "        if not self._tried:\n",
                "        if True:\n",
            ),
        ),
    ),
    Mutant(
        "an unknown outcome is read back only after a refusal",
        stories.the_answer_to_a_txn_is_lost,
        edited(
            "publisher",
            (
                ("            self._last = None\n            if (yield from self._is_published(message)):\n"),
                ("            self._last = None\n            if False:\n"),
            ),
        ),
    ),
    Mutant(
        "a refusal is believed though the same Txn was carried out before",
        stories.a_txn_arrives_before_its_repetition,
        edited(
            "publisher",
            (
                (
                    "            except Conflict as conflict:\n"
                    "                if (yield from self._is_published(message)):\n"
                ),
                ("            except Conflict as conflict:\n                if False:\n"),
            ),
        ),
    ),
    Mutant(
        "the epoch of a repetition is read after the look at what became of the first",
        stories.a_txn_arrives_between_two_reads_of_the_epoch,
        edited(
            "publisher",
            (
                (
                    "            last, version = self._last or (yield from self._read_epoch())\n"
                    "            self._last = None\n"
                    "            if (yield from self._is_published(message)):\n"
                    "                return self._tried\n"
                ),
                (
                    "            if (yield from self._is_published(message)):\n"
                    "                return self._tried\n"
                    "            last, version = self._last or (yield from self._read_epoch())\n"
                    "            self._last = None\n"
                ),
            ),
        ),
    ),
    Mutant(
        "an outcome that is unknown is taken for a refusal",
        stories.the_leader_loses_its_office_after_it_has_carried_out_a_txn,
        edited(
            "consul",
            (
                '        raise Unanswered(f"Consul: {text or response.status}"',
                '        raise ConsulError(f"Consul: {text or response.status}"',
            ),
        ),
    ),
    Mutant(
        "any message under the epoch that was tried is taken for ours",
        stories.a_txn_is_lost_and_another_message_gets_its_epoch,
        edited(
            "publisher",
            (
                "Message.decode(found.value, self._tried).id == message.id",
                "True",
            ),
        ),
    ),
    Mutant(
        "a message that was trimmed is taken for one that was not published",
        stories.a_message_is_deleted_before_its_publisher_has_looked,
        edited(
            "publisher",
            (
                '            raise self._nobody_knows(message, "it may have been deleted again")\n',
                "            return False\n",
            ),
        ),
    ),
    Mutant(
        "a refusal after an unknown outcome says that the message was not published",
        stories.a_token_is_taken_away_while_a_txn_is_on_its_way,
        edited(
            "publisher",
            (
                "            if self._tried:\n",
                "            if False:\n",
            ),
        ),
    ),
    Mutant(
        "what became of a message before is asked for again",
        stories.an_unknown_outcome_is_settled_before_the_next_message,
        edited(
            "publisher",
            (
                ("        self._tried = 0\n        try:\n"),
                "        try:\n",
            ),
        ),
    ),
    Mutant(
        "Consul is asked for ever what became of a message",
        stories.consul_is_gone_after_a_txn,
        edited(
            "publisher",
            (
                "                if self._clock() > until:\n",
                "                if False:\n",
            ),
        ),
    ),
    Mutant(
        "only the epoch tells whether Consul was restored after an unknown outcome",
        stories.consul_is_restored_and_another_message_brings_the_epoch_back_to_where_it_was,
        edited(
            "publisher",
            (
                "if last < self._tried and version != self._before:",
                "if last < self._tried - 1:",
            ),
        ),
    ),
    Mutant(
        "whether Consul was restored after an unknown outcome is not asked",
        stories.consul_is_restored_to_before_a_txn_whose_answer_was_lost,
        edited(
            "publisher",
            (
                "if last < self._tried and version != self._before:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "a Txn that was lost is not sent again",
        stories.an_unknown_outcome_is_settled_before_the_next_message,
        without("publisher", ("        if last < self._tried:\n            return False\n")),
    ),
]
