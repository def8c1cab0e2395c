"""One mutant for each guard of trimming: the guard taken out, and the story that it breaks."""

import bq_stories as stories
from bq_stage import Mutant, edited

TRIMMING = [
    Mutant(
        "a broker whose clock was ahead is waited for",
        stories.a_broker_whose_clock_was_ahead_is_gone,
        edited(
            "publisher",
            (
                "abs(now - mark.ts) < ABSENT_S",
                "now - mark.ts < ABSENT_S",
            ),
        ),
    ),
    Mutant(
        "the marks of brokers that are gone are kept",
        stories.a_broker_is_gone_for_good,
        edited(
            "publisher",
            (
                "            gone.append(entry)\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "the mark of a broker that has come back is deleted",
        stories.a_broker_that_was_gone_comes_back_and_marks,
        edited(
            "publisher",
            (
                'KvOperation("delete-cas", entry.key, version=entry.version)',
                'KvOperation("delete", entry.key)',
            ),
        ),
    ),
    Mutant(
        "a key above the epoch is taken for the last message",
        stories.a_key_above_the_epoch_lies_beside_the_messages,
        edited(
            "publisher",
            (
                " and epoch <= newest}",
                "}",
            ),
        ),
    ),
    Mutant(
        "a failed trimming says that the message was not published",
        stories.trimming_is_refused,
        edited(
            "publisher",
            (
                ("            except ConsulError:\n                pass"),
                ("            except ConsulError:\n                raise"),
            ),
        ),
    ),
    Mutant(
        "who deletes need not hold the lock",
        stories.more_messages_are_published_than_are_kept,
        edited(
            "publisher",
            (
                "lock.around([guard, *deletions[at : at + room]])",
                "[guard, *deletions[at : at + room]]",
            ),
        ),
    ),
    Mutant(
        "any number of messages is kept",
        stories.more_messages_are_published_than_are_kept,
        edited(
            "publisher",
            (
                "if count and (count == KEPT or ",
                "if count and (",
            ),
        ),
    ),
    Mutant(
        "any number of bytes is kept",
        stories.longer_messages_are_published_than_are_kept,
        edited(
            "publisher",
            (
                "(count == KEPT or kept_bytes > KEPT_BYTES)",
                "count == KEPT",
            ),
        ),
    ),
    Mutant(
        "messages that nobody waits for are kept",
        stories.more_messages_are_published_than_are_kept,
        edited(
            "publisher",
            (
                "max(sizes) if read_by_all is None else read_by_all",
                "read_by_all or 0",
            ),
        ),
    ),
    Mutant(
        "a Txn that deletes is longer than Consul allows",
        stories.more_messages_are_deleted_than_one_txn_may_hold,
        edited(
            "publisher",
            (
                "MAX_OPERATIONS - GUARDS - 1",
                "MAX_OPERATIONS - GUARDS",
            ),
        ),
    ),
    Mutant(
        "the last message is deleted",
        stories.a_message_is_longer_than_all_that_are_kept,
        edited(
            "publisher",
            (
                "if count and (",
                "if (",
            ),
        ),
    ),
    Mutant(
        "what nobody has processed is deleted",
        stories.one_broker_is_behind_another,
        edited(
            "publisher",
            (
                "if epoch <= read_by_all)",
                "if True)",
            ),
        ),
    ),
    Mutant(
        "the quickest broker decides what is deleted",
        stories.one_broker_is_behind_another,
        edited(
            "publisher",
            (
                "return min(epochs",
                "return max(epochs",
            ),
        ),
    ),
    Mutant(
        "a broker that was killed just now is not waited for",
        stories.a_broker_is_killed_before_it_has_received_all,
        edited(
            "publisher",
            (
                " in here or abs(now - mark.ts) < ABSENT_S:",
                " in here:",
            ),
        ),
    ),
    Mutant(
        "a broker that is there and has not marked for a day is not waited for",
        stories.a_broker_is_there_and_has_not_marked_for_a_day,
        edited(
            "publisher",
            (
                "if entry.key.removeprefix(keys.delivered) in here or abs",
                "if abs",
            ),
        ),
    ),
    Mutant(
        "who is there is read before the marks",
        stories.a_broker_comes_back_while_the_marks_are_read,
        edited(
            "publisher",
            (
                (
                    "    marks = yield from consul.watch(keys.delivered, 0, 0)\n"
                    "    present = yield from consul.watch(keys.subscribers, 0, 0)\n"
                ),
                (
                    "    present = yield from consul.watch(keys.subscribers, 0, 0)\n"
                    "    marks = yield from consul.watch(keys.delivered, 0, 0)\n"
                ),
            ),
        ),
    ),
    Mutant(
        "what was read before Consul was restored decides what is deleted",
        stories.consul_is_restored_while_a_publisher_decides_what_to_delete,
        edited(
            "publisher",
            (
                'KvOperation("check-index", keys.epoch, version=last.version)',
                'KvOperation("get", keys.epoch)',
            ),
        ),
    ),
    Mutant(
        "there is an epoch whenever something is deleted",
        stories.consul_is_restored_to_nothing_before_a_publisher_deletes,
        edited(
            "publisher",
            (
                ("    if last is None:\n        return\n"),
                "    assert last is not None\n",
            ),
        ),
    ),
    Mutant(
        "there is a message whenever something is deleted",
        stories.consul_is_restored_to_nothing_while_a_publisher_reads_the_messages,
        edited(
            "publisher",
            (
                ("    if not sizes:\n        return\n"),
                "",
            ),
        ),
    ),
    Mutant(
        "what is no mark stops all publishers",
        stories.what_is_no_mark_and_no_message_lies_beside_them,
        edited(
            "publisher",
            (
                "        except (KeyError, ValueError):\n",
                "        except ZeroDivisionError:\n",
            ),
        ),
    ),
    Mutant(
        "a key that is no message's stops all publishers",
        stories.what_is_no_mark_and_no_message_lies_beside_them,
        edited(
            "presence",
            (
                " if _EPOCH.fullmatch(number) else None",
                "",
            ),
        ),
    ),
]
