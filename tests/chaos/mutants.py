"""Can the chaos tests fail? Takes one guard out of a copy of the repository at a time, and sees which test goes red.

    python tests/chaos/mutants.py [word …]      all, or those whose name has one of the words; exit code 1 if one stays green

A mutant that stays green is a test that is too weak, or a guard behind which another one stands: the note says which.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
COPIED = ("kmq", "stages", "scripts", "tests", "pyproject.toml")
PATIENCE_S = 900
DURABILITY, FRAMER, ROUTER = "stages/durability.py", "stages/framer.py", "stages/router.py"
RING, STAGING, WAL, PARTITION = "kmq/links/ring.py", "kmq/links/staging.py", "kmq/log/wal.py", "kmq/log/partition.py"
ROUTING, UNIT_GROWTH = "kmq/message/routing.py", "tests/unit/test_topic_growth.py"
CHANGES, RECORDS = "kmq/router/topic_changes.py", "tests/unit/test_topic_records.py"
UNIT_STARTS = "tests/unit/test_starts.py"
FROM_THE_WAL = "tests/chaos/test_from_the_wal.py"
FORMATS = "tests/scenario/test_formats.py"
PARTITION_RECOVERY = "kmq/log/partition_recovery.py"
WIRE, UNIT_WIRE = "kmq/replica/wire.py", "tests/unit/test_wire.py"
BOOTSTRAP, UNIT_BOOTSTRAP = "kmq/replica/bootstrap.py", "tests/unit/test_bootstrap.py"

Edit = tuple[str, str, str]  # file, what stands there (once), what is put in its place


class Mutant(NamedTuple):
    name: str
    edits: list[Edit]
    tests: list[str]  # what pytest is given, in order, until one is red
    covered: str = ""  # why it may stay green


def crash(victim: str, policy: str = "block") -> str:
    return (
        f"tests/chaos/test_crash_points.py::test_a_kill_at_a_random_line_loses_and_doubles_nothing[{victim}-{policy}]"
    )


WRITES = "tests/chaos/test_crash_points.py::test_a_kill_inside_any_write_leaves_nothing_torn"
RACES = "tests/chaos/test_interleavings.py"
BELL, BELLS = "kmq/links/doorbell.py", "tests/contract/test_doorbell.py"
FILES = "tests/chaos/test_files.py"
KILLS = "tests/chaos/test_kill.py"
DROPS = "tests/chaos/test_drop_oldest.py"
FSYNC = "tests/chaos/test_fsync.py"
LINKS = "tests/chaos/test_links.py"
REMOVED, MISPLACED, CLOCK = (f"tests/chaos/test_{name}.py" for name in ("removed", "misplaced", "clock"))
DISK = "tests/chaos/test_disk_full.py"
HANDOVER, HAND_OVER_POINTS = (f"tests/chaos/test_{name}.py" for name in ("handover", "handover_points"))
FUZZ = "tests/chaos/test_fuzz.py::test_whatever_stands_in_the_fifo_the_framer_goes_on"
RECEIVED = "tests/contract/test_ring_received.py"
DEDUPE = "tests/chaos/test_dedupe.py"
LATE_HELLOS = "tests/scenario/test_producer.py::test_an_earlier_attempt_of_a_run_that_arrives_late_fences_no_later_one"
UNIT_FRAMING, UNIT_INTAKE, UNIT_PRODUCERS = (
    f"tests/unit/test_{name}.py" for name in ("framing", "intake", "producers")
)
UNITS, UNIT_UNITS, CONNECTION = "tests/chaos/test_units.py", "tests/unit/test_units.py", "kmq/ingress/connection.py"
FRAMING, DEDUPE_TABLE, INGRESS = "kmq/framing/parser.py", "kmq/framing/dedupe.py", "kmq/ingress/producers.py"
RECEIVING = "kmq/ingress/receiving.py"
SOURCE, UNIT_SOURCE = "kmq/framing/parser.py", "tests/unit/test_source.py"
ACCEPTOR, FRAMER_START, RAW = "kmq/framing/dedupe.py", "kmq/framing/recovery.py", "kmq/links/fifo.py"
DEDUPE_FILE, DEDUPE_SAVER = "kmq/log/dedupe_file.py", "kmq/framing/dedupe.py"
IDS = "kmq/message/ids.py"
TRANSACTIONS, UNIT_TXN = "kmq/gateway/kafka/transactions.py", "tests/unit/test_transactions.py"
TXN_LIMITS = "tests/scenario/test_kafka_transaction_limits.py"
OFFSETS, OFFSETS_POWER = "tests/scenario/test_committed_offsets.py", "tests/chaos/test_offsets_power.py"
SESSION = "tests/unit/test_session.py"
HTTP_GROUPS = "tests/contract/test_http_groups.py"
LEADER_ALONE = "test_in_a_shard_the_leader_alone_reaches_topics_and_all_whenever_it_begins_to_lead"
COMMITTED, UNIT_COMMITTED = "kmq/log/committed.py", "tests/unit/test_committed.py"
TIERING, ROWS, COLD = "kmq/router/tiering.py", "kmq/log/rows.py", "kmq/tier/cache.py"
UNIT_TIER, UNIT_COLD, UNIT_ROWS = (f"tests/unit/test_{name}.py" for name in ("tier_partitions", "cold_reads", "rows"))
UNIT_HEAL = "tests/unit/test_tier_heal.py"
UNIT_FETCH = "tests/unit/test_tier_fetch.py"
GAPS, UNIT_GAPS, UNIT_FORK = "kmq/log/gaps.py", "tests/unit/test_gaps.py", "tests/unit/test_fork.py"
DATA_DIRECTORY = "kmq/broker/data_directory.py"
DISKS, UNIT_DISKS = "kmq/replica/disks.py", "tests/unit/test_replica_disks.py"

FULL_CUT = "                os.ftruncate(self.fd, self.size)\n                self._wait_for_room(self.path)\n"
STORE = "            new, position = self._store(blocks)\n"
REPLY = "            self._reply(committed)  # first, because producers wait for the replies and not for the rest\n"
COUNTER_STORE = "        fence()\n        cells[COUNTER] = counter\n"
FLOOR_STORE = (
    "        cells[FLOOR_MESSAGES] = self._floor_messages\n        cells[FLOOR] = self._floor\n        fence()\n"
)
IN_APPEND = "        words[header + 5] = last.messages + count\n"

MUTANTS = [
    Mutant(
        "acks: replies are said before the sync",
        [
            (DURABILITY, REPLY, ""),
            (
                DURABILITY,
                STORE,
                "            self._reply(blocks)\n" + STORE,
            ),
        ],
        [crash("durability", "acks")],
    ),
    Mutant(
        "acks: replies are not said again after a kill",
        [
            (DURABILITY, REPLY, ""),
            (
                DURABILITY,
                STORE,
                "            unsaid = [b for b in blocks if b.first_seq > self.wal.last_seq]\n"
                + STORE
                + "            self._reply(unsaid)\n",
            ),
        ],
        [crash("durability", "acks")],
    ),
    Mutant(
        "acks: the table is not made from the blocks in the ring",
        [(FRAMER_START, "        if block.first_seq > seq:\n", "        if False:\n")],
        [crash("framer", "acks"), DEDUPE],
    ),
    Mutant(
        "acks: the table is not made from the WAL",
        [(FRAMER_START, "        table.absorb(lines, now)\n", "")],
        [crash("durability", "acks"), DEDUPE],
    ),
    Mutant(
        "acks: the table is not made from its checkpoint",
        [(DEDUPE_TABLE, "        return saved.seq\n", "        self._clear()\n        return saved.seq\n")],
        [crash("framer", "acks"), DEDUPE],
    ),
    Mutant(
        "acks: the checkpoint speaks of what is not synced",
        [
            (
                DEDUPE_SAVER,
                "        if synced is None or synced < snapshot.seq or self.busy:\n",
                "        if self.busy:\n",
            )
        ],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "acks: a name that changes while the table is copied is not copied before",
        [(DEDUPE_TABLE, "        self._copy_to_snapshot(producer)\n        before", "        before")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "power: a checkpoint does not sync the indexes of what it vouches for",
        [
            (
                PARTITION,
                "        files = [*self.unsynced, self.path, segment.index_path(self.path)]\n",
                "        files = [*self.unsynced, self.path]\n",
            )
        ],
        ["tests/unit/test_queues.py"],
    ),
    Mutant(
        "power: a start writes the index of a segment whose other copy has other records",
        [("kmq/log/lost_index.py", " or contradiction(_first_line(opened)) or contradiction(last)\n", "\n")],
        ["tests/unit/test_retention.py"],
    ),
    Mutant(
        "power: a start writes the index of a segment that is not in the order of its neighbours",
        [("kmq/log/lost_index.py", "what = _disorder(*seqs, before, after) or contradiction", "what = contradiction")],
        ["tests/unit/test_retention.py"],
    ),
    Mutant(
        "acks: the crc of the checkpoint is not looked at",
        [(DEDUPE_FILE, "        if checksum(self.seq, self._text) != crc:\n", "        if False:\n")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "acks: messages are taken as one without a look at what its producer has stored",
        [(ACCEPTOR, "        if producer is None or first <= producer.last_id:\n", "        if producer is None:\n")],
        [crash("framer", "acks"), UNIT_FRAMING],
    ),
    Mutant(
        "acks: messages are taken as one although one claims to be another producer's",
        [("kmq/message/record.py", 'rb"(?:;(?![pw]=)', 'rb"(?:;')],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "acks: messages that are taken as one have fingerprints without their headers",
        [(ACCEPTOR, 'start_of(b"%b|%b" % (key, more) if more else key)', "start_of(key)")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "ids: a window forgets without a word to the snapshot that is read",
        [(IDS, "                self._snapshot.save(key, self.ids[key])\n", "                pass\n")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "topics: a turn of the router removes all files of a deleted topic",
        [(CHANGES, "_SWEPT_AT_ONCE = 16 ", "_SWEPT_AT_ONCE = 1 << 30 ")],
        ["tests/unit/test_topic_deletion.py"],
    ),
    Mutant(
        "ids: other content counts as a retry",
        [(ACCEPTOR, "        if print_then not in (0, print):\n", "        if False:\n")],
        [UNIT_FRAMING],
    ),
    Mutant(
        "ids: what was passed over counts as stored",
        [(IDS, "        return 0 if at >= 0 and number <= self.lasts[at] else TOO_OLD\n", "        return 0\n")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "ids: a reply overtakes the last id that was asked for",
        [
            (
                CONNECTION,
                "        if (len(questions) > 0 and questions[0] == done) is not is_last:\n",
                "        if False:\n",
            )
        ],
        [UNIT_INTAKE, UNIT_UNITS],
    ),
    Mutant(
        "ids: a turn of the framer has no limit",
        [(FRAMING, "\nTURN = 8192\n", "\nTURN = 1 << 40\n")],
        [UNIT_FRAMING],
    ),
    Mutant(
        "ids: a record from a clock that was ahead makes the others old",
        [(DEDUPE_TABLE, "min(int(seconds_text), now)", "int(seconds_text)")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "ids: names are not kept in the order of their last messages",
        [(DEDUPE_TABLE, "seconds\n        self.names.move_to_end(producer.name)\n", "seconds\n")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "acks: anybody may say whose message it is",
        [("kmq/message/record.py", '    return b";" in text and (', '    return False and b";" in text and (')],
        [UNIT_FRAMING],
    ),
    Mutant(
        "acks: an older connection of a producer goes on",
        [(INGRESS, '            older.replies.refusal = refusals.reason("fenced").encode()\n', "")],
        [DEDUPE],
    ),
    Mutant(
        "acks: an earlier attempt of a run, which comes late, fences the later one",
        [(INGRESS, "        if later is not None:\n", "        if False:\n")],
        [LATE_HELLOS],
    ),
    Mutant(
        "acks: a program that was started again came late",
        [
            (
                "kmq/wire/attempts.py",
                "self.run == other.run and self.number < other.number",
                "self.number < other.number",
            )
        ],
        [LATE_HELLOS],
    ),
    Mutant(
        "acks: all hellos of a producer are one attempt",
        [("kmq/client/producer_core.py", "self._attempt and self._attempt.next()", "self._attempt")],
        ["tests/unit/test_protocol.py"],
    ),
    Mutant(
        "acks: a hole in the replies is not seen",
        [
            (
                CONNECTION,
                "        if first != (self.questions_answered if is_last else done + 1):\n",
                "        if False:\n",
            )
        ],
        [UNIT_INTAKE, UNIT_UNITS],
    ),
    Mutant(
        "units: a record of the framer's own comes between the lines of a unit",
        [(FRAMER, "numbered = not begun and self._number_changes()", "numbered = self._number_changes()")],
        [UNITS + "::test_a_unit_in_a_full_ring_stays_together_also_if_the_framer_is_killed_in_its_middle"],
    ),
    Mutant(
        "units: a framer that starts does not know that it is within a unit",
        [(FRAMING, "if birth == done.birth and start < done.position < stop else", "if False else")],
        [UNIT_UNITS],
    ),
    Mutant(
        "units: a unit that lies is handed over",
        [(RECEIVING, "        if lines != unit.lines or ", "        if False and ")],
        [UNIT_UNITS],
    ),
    Mutant(
        "units: the rest of a connection is taken after a unit that lies",
        [
            (
                RECEIVING,
                "                return False  # it is unknown where the next line begins\n",
                "                pass\n",
            )
        ],
        [UNIT_UNITS],
    ),
    Mutant(
        "units: what follows a refused unit is taken when more is accepted again",
        [(CONNECTION, "(self.refusal == before and self.taken == self.passed)", "self.refusal == before")],
        [UNIT_UNITS],
    ),
    Mutant(
        "units: what a unit follows need not be stored if all its lines are good",
        [
            (
                DEDUPE_TABLE,
                "        if after is not None and self.table.last_id(name) < (first - 1 if after == FOLLOWS else after):\n",
                "        if False:\n",
            )
        ],
        [UNIT_UNITS],
    ),
    Mutant(
        "units: what a unit follows need not be stored if its lines are looked at one by one",
        [(DEDUPE_TABLE, "        if after is not None and self.table.last_id(name) < after:\n", "        if False:\n")],
        [UNIT_UNITS],
    ),
    Mutant(
        "units: a line need not follow the one before it in its unit",
        [(DEDUPE_TABLE, "        if follows and self.table.last_id(name) < int(id) - 1:\n", "        if False:\n")],
        ["tests/unit/test_producers.py"],
    ),
    Mutant(
        "units: lines that say whose they are need not be of the unit's producer",
        [
            (
                "kmq/message/record.py",
                "        return match is not None and match[1] == producer\n",
                "        return match is not None\n",
            )
        ],
        ["tests/unit/test_producers.py"],
    ),
    Mutant(
        "units: the ids of lines that say whose they are may have gaps",
        [(DEDUPE_TABLE, " if last - first == len(lines) - 1 else None\n", "\n")],
        ["tests/unit/test_producers.py"],
    ),
    Mutant(
        "kafka: a transaction takes any number of offsets",
        [(TRANSACTIONS, "        if len(txn.offsets) + count > _MOST_OFFSETS:\n", "        if False:\n")],
        [f"{TXN_LIMITS}::test_a_transaction_has_so_many_offsets_and_the_table_of_groups_so_much_room"],
    ),
    Mutant(
        "kafka: transactions together take any number of offsets",
        [(TRANSACTIONS, "        if pending + count > _MOST_PENDING:\n", "        if False:\n")],
        [UNIT_TXN],
    ),
    Mutant(
        "kafka: a transaction takes offsets for which there is no room",
        [(TRANSACTIONS, "        self._groups.store.table.check_room(", "        _ = (")],
        [f"{TXN_LIMITS}::test_a_transaction_has_so_many_offsets_and_the_table_of_groups_so_much_room"],
    ),
    Mutant(
        "kafka: all commits are copied at once",
        [(TRANSACTIONS, "                async with self._copying:\n", "                if True:\n")],
        [f"{UNIT_TXN}::test_so_many_commits_are_copied_at_once"],
    ),
    Mutant(
        "kafka: groups of what a former life has decided wait for the next transaction of its id",
        [(TRANSACTIONS, "            self._resumed.remove(txn)", "            pass")],
        [UNIT_TXN],
    ),
    Mutant(
        "kafka: any number of requests waits for a transactional id",
        [("kmq/gateway/kafka/transaction.py", "        if self._waiting >= _MOST_WAITING:\n", "        if False:\n")],
        [UNIT_TXN],
    ),
    Mutant(
        "kafka: a state in front of a long log is not written again",
        [
            (
                "kmq/gateway/kafka/transaction_writer.py",
                "transactions.get(txn.id) is txn and not txn.is_changing",
                "False",
            )
        ],
        [f"{TXN_LIMITS}::test_states_are_written_again_and_what_lies_before_them_is_deleted"],
    ),
    Mutant(
        "kafka: an abort waits until the disk has room",
        [("kmq/gateway/kafka/transaction_writer.py", "self._spare if frees else self._own", "self._own")],
        [f"{TXN_LIMITS}::test_a_transaction_over_its_time_is_aborted_and_frees_what_it_holds_on_a_full_disk"],
    ),
    Mutant(
        "kafka: ids are forgotten in the order in which they were made",
        [(TRANSACTIONS, "        self._transactions[txn.id] = self._transactions.pop(txn.id)", "        pass")],
        [f"{TXN_LIMITS}::test_the_id_that_is_idle_the_longest_makes_room_for_another"],
    ),
    Mutant(
        "kafka: a group is served before all that it has committed is stored",
        [("kmq/gateway/groups/offsets.py", "        if group in self.incomplete:\n", "        if False:\n")],
        [UNIT_TXN],
    ),
    Mutant(
        "kafka: a commit that was written again is a later one",
        [("kmq/gateway/groups/offsets.py", "row._replace(first_seq=row.committed_seq)", "row")],
        [f"{OFFSETS}::test_the_front_of_a_large_log_is_deleted_and_what_is_needed_of_it_was_written_again"],
    ),
    Mutant(
        "kafka: the name of copies is forgotten by age",
        [(DEDUPE_TABLE, "if order is self.names and producer.part is self.copiers:", "if False:")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "kafka: the name of copies that have to wait is forgotten as others are",
        [
            (
                DEDUPE_TABLE,
                "            self._use(producer, seconds)\n        return",
                "            pass\n        return",
            )
        ],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "kafka: a batch does not say which one it follows",
        [("kmq/gateway/kafka/producing.py", "after = min(name.last_stored_id(), first_id - 1)", "after = 0")],
        ["tests/unit/test_kafka_units.py"],
    ),
    Mutant(
        "kafka: replies on a broken connection count for the unit that is sent again",
        [("kmq/sending/window.py", "                delivery.forget()\n", "                pass\n")],
        ["tests/unit/test_kafka_units.py"],
    ),
    Mutant(
        "kafka: a reply to lines answers a question",
        [
            (
                "kmq/sending/window.py",
                "                if not part:\n                    raise",
                "                if not part:\n                    return\n                    raise",
            )
        ],
        ["tests/unit/test_kafka_units.py"],
    ),
    Mutant(
        "kafka: a refusal before the partition is known is forgotten",
        [("kmq/gateway/kafka/producing.py", "if begun is None:\n", "if False:\n")],
        ["tests/scenario/test_kafka_produce.py"],
    ),
    Mutant(
        "kafka: a client is told of a gap while an earlier batch may be stored",
        [("kmq/gateway/kafka/producing.py", "    if name.is_unsure(first_id):\n", "    if False:\n")],
        ["tests/scenario/test_kafka_produce.py"],
    ),
    Mutant(
        "kafka: the framer does not know that it forgot a producer",
        [("kmq/framing/dedupe.py", "self.forgotten = max(self.forgotten, pid_of(producer.name))", "pass")],
        [UNIT_PRODUCERS],
    ),
    Mutant(
        "acks: after a refusal the rest of the connection is taken",
        [(RECEIVING, "            if replies.refusal:\n", "            if False:\n")],
        [UNIT_INTAKE],
    ),
    Mutant(
        "ingress: a request over HTTP is stored",
        [
            (
                RECEIVING,
                "        if connection.speaks is None and self._is_foreign(connection, count):\n",
                "        if False:\n",
            )
        ],
        [UNIT_INTAKE],
    ),
    Mutant(
        "intakes: a message that ends in NUL is a line",
        [("kmq/ingress/intakes.py", "        if is_shaped and (", "        if False and (")],
        ["tests/unit/test_raw_lines.py"],
    ),
    Mutant(
        "intakes: an empty line is stored as null",
        [("kmq/ingress/intakes.py", "for _ in range(2):", "for _ in range(1):")],
        ["tests/unit/test_raw_lines.py"],
    ),
    Mutant(
        "intakes: a topic with a dot has no mark",
        [("kmq/ingress/intakes.py", 'b".@|||" if b"." in topic else b"|||"', 'b"|||"')],
        ["tests/unit/test_raw_lines.py"],
    ),
    Mutant(
        "intakes: an address that is not listed may send",
        [
            (
                "kmq/ingress/intakes.py",
                "raw.may_send[address] = is_among(networks, address)",
                "raw.may_send[address] = True",
            )
        ],
        ["tests/unit/test_raw_lines.py"],
    ),
    Mutant(
        "durability moves its cursor before the work",
        [
            (DURABILITY, "            self.framed.release(blocks[-1])\n", ""),
            (
                DURABILITY,
                STORE,
                "            self.framed.release(blocks[-1])\n" + STORE,
            ),
        ],
        [crash("durability"), KILLS],
    ),
    Mutant(
        "durability: no seq check against the WAL",
        [(DURABILITY, "        if first_seq <= last:", "        if False:")],
        [crash("durability"), KILLS],
    ),
    Mutant(
        "durability: no seq check against the ring durable",
        [(DURABILITY, "if not block.count or block.first_seq < durable.last.next_seq:", "if not block.count:")],
        [crash("durability")],
    ),
    Mutant(
        "router moves its cursor before the work",
        [
            (ROUTER, "        ring.release(blocks[-1])\n", ""),
            (ROUTER, "        for run in in_runs(", "        ring.release(blocks[-1])\n        for run in in_runs("),
        ],
        [crash("router"), KILLS],
        "a start replays the WAL from the checkpoint, so the cursor costs work, never a message",
    ),
    Mutant(
        "a checkpoint speaks of lines that wait for their topic",
        [("kmq/router/recovery.py", "text(self._sorter.routed_seq,", "text(self._sorter.sorted_seq,")],
        ["tests/unit/test_queues.py::test_lines_that_wait_for_their_topic_survive_a_kill_behind_a_checkpoint"],
    ),
    Mutant(
        "a topic that is let through does not count before it is made",
        [
            (
                "kmq/framing/topics.py",
                "            self.names.add(name)\n            self._coming",
                "            self._coming",
            )
        ],
        ["tests/unit/test_catalog.py"],
    ),
    Mutant(
        "router: no seq check on the blocks it takes",
        [(ROUTER, "if block.last_seq > queues.sorter.sorted_seq]", "if True]")],
        [crash("router"), KILLS],
        "each queue passes over what it has, the next mutant",
    ),
    Mutant(
        "router: a queue does not pass over what it has",
        [
            ("kmq/router/logs.py", "        if last_seq <= log.state.last_seq:\n", "        if False:\n"),
            (PARTITION, "        if first_seq <= state.last_seq:\n", "        if False:\n"),
        ],
        [crash("router"), KILLS],
    ),
    Mutant(
        "no cut of a torn tail in the WAL",
        [
            (
                WAL,
                "        if self.cut_bytes:\n            file.truncate",
                "        if False:\n            file.truncate",
            )
        ],
        [WRITES, FILES],
    ),
    Mutant(
        "no cut of a torn tail in a queue",
        [(PARTITION_RECOVERY, "        if tail.size < part.size:\n", "        if False:\n")],
        [WRITES, FILES],
    ),
    Mutant(
        "one staging area instead of two",
        [(STAGING, "        other = 1 - self.active\n", "        other = self.active\n")],
        [crash("framer"), KILLS],
    ),
    Mutant(
        "the other staging area is not zeroed at the start",
        [(STAGING, "        self._zero(1 - self.active, size)\n", "")],
        [crash("framer"), KILLS],
    ),
    Mutant(
        "the other staging area is not zeroed before a carry",
        [(STAGING, "        self._zero(other, max(self._used_other, len(rest)))\n", "")],
        [crash("framer"), KILLS],
    ),
    Mutant(
        "who sleeps on a bell that was removed does not hear of it",
        [(BELL, "        if not self.is_in_place():\n", "        if False:\n")],
        [BELLS],
    ),
    Mutant(
        "a set of semaphores is made before the header names its key",
        [(BELL, "            announce(_text([*named(), (key, -1)]))\n", "")],
        [BELLS],
    ),
    Mutant(
        "doorbells that a ring names are removed as left over",
        [(BELL, '        if f"={semaphore.key}:" not in texts and semaphore', "        if semaphore")],
        [BELLS],
    ),
    Mutant(
        "doorbells of other users are removed as left over",
        [(BELL, " and semaphore.uid == os.geteuid():\n", ":\n")],
        [BELLS],
    ),
    Mutant(
        "a key alone tells whose a doorbell is",
        [(BELL, "        if semaphore is None or semaphore.id != int(id):\n", "        if semaphore is None:\n")],
        [BELLS],
    ),
    Mutant(
        "no fence",
        [("kmq/links/doorbell.py", "    _fence_lock.acquire()\n    _fence_lock.release()\n", "    pass\n")],
        [RACES],
    ),
    Mutant(
        "one commit record instead of two",
        [("kmq/links/layout.py", "RECORD = (8, 24)", "RECORD = (8, 8)")],
        [RACES],
    ),
    Mutant(
        "a reader does not go where an empty ring was begun anew",
        [(RING, "            if self.position < record.begin:\n", "            if False:\n")],
        [RACES],
    ),
    Mutant(
        "a ring that was begun anew takes only what lies before the old place",
        [
            (
                RING,
                "        tail = max(cells[TAIL], self._floor, last.begin)\n",
                "        tail = max(cells[TAIL], self._floor)\n",
            )
        ],
        [LINKS],
    ),
    Mutant(
        "the ring received forgets where it was begun anew",
        [("kmq/links/received.py", "            self._begin = position\n", "            pass\n")],
        ["tests/unit/test_received.py"],
    ),
    Mutant(
        "the counter is bumped before the record is written",
        [
            (RING, COUNTER_STORE, ""),
            (
                RING,
                "        cells[at] = record.head\n",
                "        cells[COUNTER] = counter\n        cells[at] = record.head\n",
            ),
        ],
        [crash("framer"), RACES],
    ),
    Mutant(
        "the drop floor is published after the bytes are overwritten",
        [
            (RING, FLOOR_STORE, ""),
            (RING, IN_APPEND, IN_APPEND + FLOOR_STORE.replace("cells[", "self.cells[")),
        ],
        [RACES, DROPS],
    ),
    Mutant(
        "the reader does not look at the floor again after its copy",
        [(RING, "        if ring.cells[FLOOR] > position:\n", "        if False:\n")],
        [RACES, DROPS],
    ),
    Mutant(
        "an observer trusts a block that was released while it read",
        [(RING, "return bool(self.cells[TAIL] <= position)", "return True")],
        ["tests/unit/test_leading.py"],
    ),
    Mutant(
        "durability does not name what was dropped",
        [
            (
                DURABILITY,
                '        dropped.append(settings.data, "framed"',
                '        (lambda *_: 0)(settings.data, "framed"',
            )
        ],
        [crash("durability", "drop_oldest"), DROPS],
    ),
    Mutant(
        "a record is looked for in the partitions that its topic has now",
        [
            (
                ROUTING,
                "        return next((before for grown_from",
                "        return self.partitions or next((before for grown_from",
            )
        ],
        [UNIT_GROWTH],
    ),
    Mutant(
        "the checkpoint takes a growth back that it does not know yet",
        [("kmq/router/declarations.py", " or topics.has_grown(recorded, topic))", ")")],
        [UNIT_GROWTH],
    ),
    Mutant(
        "a topic that older releases misread leaves the format as it is",
        [("kmq/router/in_force.py", "if topic.is_rerouted:", "if topic.is_rerouted and not topic.name:")],
        [FORMATS],
    ),
    Mutant(
        "records after a fork follow at the end of the log",
        [(PARTITION, "if state.end_offset < fork.offset and last_seq >= fork.seq:", "if False:")],
        [UNIT_GAPS],
    ),
    Mutant(
        "a start after a fork leaves no gap, so consumers stand above the end",
        [("kmq/router/queues.py", "        self.logs.skip_forks()\n", "")],
        [UNIT_GAPS],
    ),
    Mutant(
        "a topic made after a fork begins at 0 again",
        [("kmq/router/in_force.py", "            if least > first:", "            if False:")],
        [UNIT_GAPS],
    ),
    Mutant(
        "a reader in a gap takes it for a lost end",
        [("kmq/log/reader.py", "if gaps.is_gap(self.gaps(), offset, following):", "if False:")],
        [UNIT_GAPS],
    ),
    Mutant(
        "a range of records spans a gap",
        [("kmq/gateway/core/partitions.py", "                if found.is_last:\n                    return\n", "")],
        [UNIT_GAPS],
    ),
    Mutant(
        "missing records are numbered back from the end of a gap",
        [
            (
                PARTITION_RECOVERY,
                "        before_gap = gaps.ends([part.first], found)[0]\n",
                "        before_gap = part.first\n",
            )
        ],
        [UNIT_GAPS],
    ),
    Mutant(
        "a start takes a directory whose fork has not finished",
        [("kmq/log/identity.py", "        _check_forked(path)\n", "")],
        [UNIT_FORK],
    ),
    Mutant(
        "a repeated fork has other numbers",
        [
            (
                "kmq/router/fork.py",
                '    if match is None:\n        raise ConfigError(f"{data}/{FORKING}',
                '    return None\n    if match is None:\n        raise ConfigError(f"{data}/{FORKING}',
            )
        ],
        [UNIT_FORK],
    ),
    Mutant(
        "a repair fills a gap",
        [
            (
                "kmq/repair/heal.py",
                "next_base = gaps.ends([scans[at + 1].first], self.gaps)[0]",
                "next_base = scans[at + 1].first",
            )
        ],
        [UNIT_FORK],
    ),
    Mutant(
        "the lag of a group counts a gap",
        [("kmq/gateway/groups/offset_table.py", " - gaps.count(found, position, end)", "")],
        ["tests/unit/test_offset_table.py"],
    ),
    Mutant(
        "tier: local limits delete what the store does not have",
        [(TIERING, "return sum(1 for _ in takewhile(lambda span: found.covers(*span), spans))", "return most")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: a replica takes the rows of records that it does not have",
        [("kmq/tier/partitions.py", "if end < row.next <= here.end_offset]", "if end < row.next]")],
        ["tests/unit/test_tier_shard_topics.py"],
    ),
    Mutant(
        "tier: a replica deletes records before the first row",
        [(ROWS, "and not is_before_rows", "")],
        ["tests/unit/test_tier_shard_topics.py"],
    ),
    Mutant(
        "tier: rows are made while a broker of the shard does not know them",
        [
            (
                "kmq/tier/turn.py",
                "for each in mine if topic_changes.all_know",
                "for each in mine if True or topic_changes.all_know",
            )
        ],
        ["tests/unit/test_tier_shard_topics.py"],
    ),
    Mutant(
        "tier: lines that were laid out before a fork are taken",
        [(TIERING, "coming.lineage == lineage_of(self._context.data)", "True")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: what retention deleted comes back by a fetch",
        [("kmq/router/queues.py", "and sealed.first >= found.begin(state.start)", "")],
        [UNIT_FETCH],
    ),
    Mutant(
        "tier: a segment that was fetched is put before another one than it ends at",
        [("kmq/router/queues.py", "sealed.end != gaps.ends([state.start], state.gaps)[0]", "False")],
        [UNIT_FETCH],
    ),
    Mutant(
        "tier: half an installation is taken for a whole one",
        [("kmq/router/queues.py", "elif not fetched.is_whole(context.data, sealed):", "elif False:")],
        [UNIT_FETCH],
    ),
    Mutant(
        "tier: records before the start are fetched",
        [("kmq/tier/fetch.py", "max(group[0].base, begin)", "group[0].base")],
        [UNIT_FETCH],
    ),
    Mutant(
        "tier: without a store local limits delete",
        [(TIERING, "if not (limits.is_tiered and self._context.has_store):", "if not limits.is_tiered:")],
        [UNIT_FETCH],
    ),
    Mutant(
        "tier: for room segments go that the store does not have",
        [(TIERING, "count = _covered(found, state, len(state.sealed))", "count = len(state.sealed)")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: for room the WAL goes that the store does not have",
        [(WAL, "free = min(copied_seq(self.data), needed_after())", "free = needed_after()")],
        ["tests/unit/test_wal.py"],
    ),
    Mutant(
        "tier: for room the WAL goes that a restart needs",
        [(WAL, "free = min(copied_seq(self.data), needed_after())", "free = copied_seq(self.data)")],
        ["tests/unit/test_wal.py"],
    ),
    Mutant(
        "tier: what went from the local WAL for room goes from the store",
        [("kmq/tier/turn.py", "not (is_too_much or is_too_old)", "False")],
        ["tests/unit/test_tier_turn.py"],
    ),
    Mutant(
        "tier: what total limits took leaves the start where it was",
        [(TIERING, "if start > found.begin(state.start):", "if False:")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: a lost partition is rebuilt from its first record on, although rows have it",
        [
            (
                "kmq/router/recovery.py",
                "        if row.floor is not None:\n            begin",
                "        if False:\n            begin",
            )
        ],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: a repair leaves a hole where an object has the record",
        [("kmq/repair/heal.py", "if lacks_some and (begin :=", "if False and (begin :=")],
        [UNIT_HEAL],
    ),
    Mutant(
        "tier: a repair believes what the gateway has left in the cache",
        [("kmq/cli/tier.py", "if path not in checked:", "if False:")],
        [UNIT_HEAL],
    ),
    Mutant(
        "tier: a lost file is no reason to refuse what lies before the segments",
        [(TIERING, "return start > self._in_force.first_state(topic.name, number).start", "return False")],
        [UNIT_HEAL],
    ),
    Mutant(
        "tier: an object under another name is deleted as an orphan",
        [("kmq/tier/turn.py", "if sweep.orphans and not self.missing:", "if sweep.orphans:")],
        ["tests/unit/test_tier_turn.py"],
    ),
    Mutant(
        "tier: a start that is known before the rows moves the beginning past them",
        [(TIERING, "if (name, number) in self._unknown and", "if False and")],
        [UNIT_HEAL],
    ),
    Mutant(
        "tier: a gap is invented before the first segment of a partition whose rows are not known",
        [("kmq/log/partition_recovery.py", "{}, None if rows.may_exist", "{}, 0 if rows.may_exist")],
        ["tests/unit/test_tier_restored_rows.py"],
    ),
    Mutant(
        "tier: without a checkpoint a start deletes segments below the end of the rows",
        [("kmq/router/recovery.py", "0 if row.ckpt is row.floor else row.ckpt.start", "row.ckpt.start")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: a start beyond the end is asked of what the disk has",
        [(CHANGES, "if (end := self._tiering.end_at(log.topic, log.number, seq)) is not None:", "if (end := 0):")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: a directory that went on elsewhere adds rows",
        [("kmq/tier/partitions.py", "        self._compare(which, segments[0].first)\n", "")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: a damaged file `tier` moves the start",
        [
            (
                ROWS,
                "            raise DamageError(path, 0,",
                "            return _NOTHING\n            raise DamageError(path, 0,",
            )
        ],
        [UNIT_ROWS],
    ),
    Mutant(
        "tier: a row that does not follow is taken",
        [(ROWS, "if row is None or not self.follows(row.base):", "if row is None:")],
        [UNIT_ROWS],
    ),
    Mutant(
        "tier: readers see rows beyond a hole",
        [(ROWS, "return [] if is_hole else found", "return found")],
        [UNIT_ROWS],
    ),
    Mutant(
        "tier: an id whose record lies in the store is forgotten",
        [("kmq/log/deleted_records.py", "            if cold:\n", "            if False:\n")],
        [UNIT_COLD],
    ),
    Mutant(
        "tier: a fetched object is not compared with its row",
        [
            (
                COLD,
                "pieces = CheckedPieces(store.get(key), key, row.size, row.sha256)",
                "pieces = store.get(key)",
            )
        ],
        [UNIT_COLD],
    ),
    Mutant(
        "tier: readers who wait push one another out of the cache",
        [
            (
                COLD,
                "            return False\n        for path in sorted",
                "            pass\n        for path in sorted",
            )
        ],
        [UNIT_COLD],
    ),
    Mutant(
        "tier: a reader of a cold partition is told of an end",
        [
            (
                "kmq/gateway/core/fetching.py",
                "                    raise refusal(cold)  # an empty",
                "                    pass  # an empty",
            )
        ],
        [UNIT_COLD],
    ),
    Mutant(
        "tier: an object of the WAL goes before the rows have its records",
        [("kmq/tier/turn.py", "min(min(covered) + 1, waiting)", "min(covered) + 1")],
        [UNIT_TIER],
    ),
    Mutant(
        "tier: an object of the WAL goes before a table that has never gone up",
        [("kmq/tier/turn.py", " if self._has_all_tables else 0", "")],
        ["tests/unit/test_tier_tables.py"],
    ),
    Mutant(
        "tier: a start inside of a row is forgotten with the file tier",
        [("kmq/log/rows.py", "self.rows[0].base < self.before:", "False:")],
        ["tests/unit/test_tier_heal.py"],
    ),
    Mutant(
        "tier: a directory whose volume is unmounted is made on the disk below",
        [("kmq/tier/store.py", "elif self._was_there:", "elif False:")],
        ["tests/unit/test_tier_turn.py"],
    ),
    Mutant(
        "tier: rows after a hole in the copied WAL go up without their router.ckpt",
        [("kmq/tier/turn.py", "*rows, *tables, *self._file_rows(found))", "*rows, *tables)")],
        ["tests/unit/test_tier_restored_rows.py"],
    ),
    Mutant(
        "tier: an object that came altered once is damage",
        [
            (
                "kmq/gateway/core/cold.py",
                "(isinstance(err, ObjectError) and found.is_in_doubt)",
                "isinstance(err, ObjectError)",
            )
        ],
        [UNIT_COLD],
    ),
    Mutant(
        "a rebuilt queue has again what a start had deleted",
        [(CHANGES, "is_done = is_done and not self._is_in_force(change)", "pass")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a replay takes for the end of a log what came after the start",
        [(CHANGES, "        if not seq or log.state.last_seq < seq:\n", "        if True:\n")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a copy of the rest of a segment is no segment before it has its name",
        [("kmq/log/segment.py", "return [*(each for each in copies if each < found[0]), *found]", "return found")],
        [UNIT_STARTS],
    ),
    Mutant(
        "an empty log begins anew after a lost checkpoint",
        [("kmq/router/recovery.py", "return checkpoint.emptied_at(self._starts_of(row), end)", "return 0")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a repair fills a queue up to its first record ever",
        [("kmq/repair/heal.py", "start = max(start, min(checkpoint.highest(self._starts()), segments[0][0]))", "pass")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a repair brings back what lies before an emptied start",
        [("kmq/repair/heal.py", "if count == 0:", "if count is None:")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a repair takes for the first record what came after a start",
        [("kmq/repair/heal.py", "bad[0].entry.crc in crcs", "crcs")],
        [UNIT_STARTS],
    ),
    Mutant(
        "what makes room begins a checkpoint with copies that still have their originals",
        [
            ("kmq/router/queues.py", " or self._checkpoints.remnants:", ":"),
            (
                "kmq/router/queues.py",
                "for log in due:\n            if self._owed",
                "for log in ():\n            if self._owed",
            ),
            (
                "kmq/router/queues.py",
                "        whole = sum(end <= offset",
                "        if offset > state.base:\n            self._has_rolled(log)\n        whole = sum(end <= offset",
            ),
        ],
        [UNIT_STARTS],
    ),
    Mutant(
        "a start of the router does not look for starts that are undone",
        [("kmq/router/queues.py", "self.changes.begin_recorded()", "pass")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a log that is to begin later outlives its topic",
        [("kmq/router/queues.py", " and self._logs.states.get((log.topic, log.number)) is log.state", "")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a copy takes the room that the broker keeps",
        [("kmq/router/queues.py", "return self._context.has_room(", "return True or (")],
        [UNIT_STARTS],
    ),
    Mutant(
        "a start beyond the end hides a later one",
        [
            (
                "kmq/log/checkpoint.py",
                "return max((start.seq for start in starts if",
                "return min((start.seq for start in starts if",
            )
        ],
        [UNIT_STARTS],
    ),
    Mutant(
        "a checkpoint that is silent about the partitioner of a topic is believed",
        [("kmq/log/checkpoint.py", "if stated and stated.partitioner:", "if stated:")],
        [FORMATS],
    ),
    Mutant(
        "a repair sets a queue aside for records that belong in another one",
        [
            (
                "kmq/repair/heal.py",
                'if each.kind in ("altered", "foreign")]',
                'if each.kind in ("altered", "foreign", "misplaced")]',
            )
        ],
        [FORMATS],
    ),
    Mutant(
        "a grown topic is routed by before its declaration says so",
        [
            (
                "kmq/router/topic_changes.py",
                "        self._context.replace(path, text.encode())\n        self._in_force.put(grown)",
                "        self._in_force.put(grown)",
            ),
            (
                "kmq/router/topic_changes.py",
                "        removed = [f",
                "        self._context.replace(path, text.encode())\n        removed = [f",
            ),
        ],
        [UNIT_GROWTH],
    ),
    Mutant(
        "router does not name what was dropped",
        [(ROUTER, '        dropped.append(data, "durable"', '        (lambda *_: 0)(data, "durable"')],
        [crash("router", "drop_oldest"), DROPS],
    ),
    Mutant(
        "a start goes on after the first lines of a block that the ring has whole",
        [(DURABILITY, "        if keep < log.last_seq or framed.sync_failed:", "        if framed.sync_failed:")],
        [WRITES],
        "what the WAL has of a block is compared with the ring, and only the rest is appended; this cuts what a dying disk"
        " may have lost of the page cache",
    ),
    Mutant(
        "the WAL's index counts lines",
        [(WAL, "self._wait_for_room, by_seq=True)", "self._wait_for_room)")],
        [DROPS, crash("durability", "drop_oldest")],
    ),
    Mutant(
        "a failed fdatasync is passed over",
        [(DURABILITY, "            self.framed.sync_failed = True\n            raise\n", "            pass\n")],
        [FSYNC],
    ),
    Mutant(
        "after a failed fdatasync the same segment goes on",
        [(DURABILITY, "                log.roll()\n", "                pass\n")],
        [FSYNC],
    ),
    Mutant(
        "a write that the full disk cut short stays",
        [("kmq/files.py", FULL_CUT, "                self._wait_for_room(self.path)\n")],
        [DISK],
    ),
    Mutant(
        "a ring is taken for ours whatever its header says",
        [("kmq/links/ring.py", "read_text(fd, IDENTITY) == self.wanted.text() and", "True or")],
        [LINKS],
    ),
    Mutant(
        "what a ring shows again is not compared with the WAL",
        [(DURABILITY, " or data[: len(stored)] != stored:", ":")],
        [REMOVED],
    ),
    Mutant(
        "a ring is made while somebody reads one that was removed",
        [("kmq/broker/stage.py", "        if reader.is_held():\n", "        if False:\n")],
        [REMOVED],
    ),
    Mutant(
        "a stage does not look whether its rings and lock files are in place",
        [("kmq/broker/stage.py", "            if not held.is_in_place():\n", "            if False:\n")],
        [REMOVED],
    ),
    Mutant(
        "numbers are given out though a checkpoint or a queue knows of later ones",
        [("kmq/log/checkpoint.py", "    if later > seq:\n", "    if False:\n")],
        [MISPLACED],
    ),
    Mutant(
        "what the index says it is of is not looked at",
        [("kmq/log/segment_reader.py", '        if says not in (b"", wanted):\n', "        if False:\n")],
        [MISPLACED],
    ),
    Mutant(
        "a clock that jumps is trusted",
        [
            (
                "kmq/broker/clock.py",
                "        elif abs(offset + _ZERO - row.clock_offset) > JUMP_S * _NS:\n",
                "        elif False:\n",
            )
        ],
        [CLOCK],
    ),
    Mutant(
        "a clock that is days ahead at a start is trusted",
        [("kmq/broker/clock.py", "        is_gap = last_record_us > 0 and", "        is_gap = False and")],
        ["tests/unit/test_clock.py"],
    ),
    Mutant(
        "only ingress and the framer hold the FIFO open",
        [
            (
                "kmq/broker/stage.py",
                '        self.raw = open_fifo(settings.pipes, "raw")\n',
                '        self.raw = open_fifo(settings.pipes, "raw")\n'
                '        if name in ("durability", "router"):\n            os.close(self.raw)\n',
            )
        ],
        [LINKS],
    ),
    Mutant(
        "a table knows its batches by number alone",
        [
            (
                "kmq/spark/tables/base.py",
                "        self.stream.check_same(batch_id, offsets, self.stream.offsets(batch_id) or recorded_offsets, last)\n",
                "",
            )
        ],
        ["tests/unit/test_spark_tables.py::test_a_batch_that_comes_again_is_skipped_only_with_the_same_offsets"],
    ),
    Mutant(
        "a limit of a replay counts letters that went back before",
        [
            (
                "kmq/deadletters/selection.py",
                "if letter is not None and names is not None:",
                "if False:",
            )
        ],
        ["tests/scenario/test_redrive.py::test_letters_go_back_once_whatever_was_selected_before"],
    ),
    Mutant(
        "the framer does not see that the FIFO died",
        [(FRAMER, "        forgotten = staging.forget_unfinished()\n", "        forgotten = 0\n")],
        [KILLS + "::test_a_line_cut_by_the_death_of_the_fifo_is_forgotten_whole"],
    ),
    Mutant(
        "received: ingress does not announce its start",
        [("stages/ingress.py", "    loop.announce()\n", "")],
        [KILLS + "::test_killing_a_stage_loses_and_doubles_nothing[ingress]", HANDOVER],
        "the first line of the next ingress frees what the dead one left; that is much less than the ring",
    ),
    Mutant(
        "received: what a dead ingress left is not said to be free",
        [
            (
                "kmq/links/received.py",
                "        self.say(fifo.lines(self.ring.birth, self.ring.head, self.ring.head))\n",
                "        pass\n",
            )
        ],
        [HAND_OVER_POINTS],
    ),
    Mutant(
        "received: the FIFO is told before the ring shows the bytes",
        [
            ("kmq/links/received.py", "            self.ring.publish()\n", ""),
            (
                "kmq/links/received.py",
                "            done = self._write(text)\n",
                "            done = self._write(text)\n            self.ring.publish()\n",
            ),
        ],
        [HAND_OVER_POINTS],
    ),
    Mutant(
        "received: the tail moves before the commit",
        [
            (FRAMER, "            source.committed(framed.received)\n", ""),
            (
                FRAMER,
                "            staging.append(framed, swaps=is_last and not batch.more)\n",
                "            source.committed(framed.received)\n"
                "            staging.append(framed, swaps=is_last and not batch.more)\n",
            ),
        ],
        [crash("framer"), HANDOVER],
    ),
    Mutant(
        "received: a commit does not say how far the ring is framed",
        [(STAGING, "Consumed(area, offset, *framed.received)", "Consumed(area, offset, *framed.received[:1], 0)")],
        [crash("framer")],
    ),
    Mutant(
        "received: messages of many connections are taken as one although a piece is no whole line",
        [(FRAMING, " or any(body[stop - position - 1] != _NEWLINE for *_, stop in found)", "")],
        [UNIT_FRAMING],
    ),
    Mutant(
        "received: a start takes a piece from its start again",
        [
            (
                FRAMING,
                "            low = max(start, position)\n            if low < stop:\n",
                "            low = start\n            if True:\n",
            )
        ],
        [crash("framer"), UNIT_FRAMING],
    ),
    Mutant(
        "received: ingress puts lines where others are not framed yet",
        [("kmq/links/received.py", "return position if position + nbytes - tail <= size else -1", "return position")],
        [RECEIVED, HANDOVER],
    ),
    Mutant(
        "received: a control line of another ring is obeyed",
        [(SOURCE, "            ring.birth == birth\n            and ring.holds", "            ring.holds")],
        [FUZZ, UNIT_SOURCE],
    ),
    Mutant(
        "received: a made-up range is obeyed",
        [(SOURCE, "            and ring.holds(start, end)\n", "")],
        [FUZZ],
    ),
    Mutant(
        "received: the framer gives no sign of room",
        [("kmq/links/received.py", '                    os.write(self._acks, b"\\n")\n', "                    pass\n")],
        [RECEIVED],
    ),
    Mutant(
        "received: nothing is awaited where the ring is not there",
        [(SOURCE, "            self._wait()\n", "")],
        [REMOVED],
    ),
    Mutant(
        "received: what lies in a ring that was written again passes for made up",
        [(SOURCE, "        if not ring.is_in_place():\n", "        if False:\n")],
        [UNIT_SOURCE],
    ),
    Mutant(
        "received: a new ring is read from where the one before ended",
        [(SOURCE, "self.done.position if ring.birth == self.done.birth else 0", "self.done.position")],
        [HANDOVER + "::test_a_ring_made_anew_is_read_from_its_start"],
    ),
    Mutant(
        "a change is not carried out in a replay",
        [("kmq/router/sorting.py", "                        change(part)\n", "                        pass\n")],
        [RECORDS],
    ),
    Mutant(
        "a change is carried out without a look at the incarnation",
        [(CHANGES, "change.incarnation not in (None, topic.from_seq)", "False")],
        [RECORDS],
    ),
    Mutant(
        "a deletion is of whatever topic has the name by then",
        [("kmq/framing/topics.py", "else request.incarnation", "else None")],
        [RECORDS],
    ),
    Mutant(
        "a change in a gap comes before the topics that wait",
        [
            (
                "kmq/router/sorting.py",
                "self.make_topics()  # named by lines that are older than the change",
                "pass  # of lines",
            )
        ],
        [RECORDS],
    ),
    Mutant(
        "while there is no room a limit puts a declared topic in force",
        [(CHANGES, "if is_new and self._in_force.has(request.topic):", "if is_new:")],
        [RECORDS],
    ),
    Mutant(
        "limits are set again by each replay",
        [(CHANGES, "change.seq <= (self._last_seq if change.verb == topic_changes.SET else self._final)", "False")],
        [RECORDS],
    ),
    Mutant(
        "a request is removed before its record was carried out",
        [
            (
                CHANGES,
                "        is_done = change.seq",
                "        requests.named(self._context.data, change.request).remove()\n        is_done = change.seq",
            )
        ],
        [FROM_THE_WAL],
        "a replay of the WAL carries the record out all the same",
    ),
    Mutant(
        "a record is carried out behind the lines of its blocks",
        [
            (
                "kmq/router/queues.py",
                "written += self._route(blocks[begin:at]) + self.sorter.make_topics()",
                "written += self._route(blocks[begin:]) + self.sorter.make_topics()",
            )
        ],
        [RECORDS],
    ),
    Mutant(
        "the next change of a topic does not wait for the one before",
        [("kmq/framing/topics.py", "            busy.add(request.topic)\n", "")],
        [RECORDS],
    ),
    Mutant(
        "a framer that starts does not know what is numbered",
        [
            (
                "kmq/framing/recovery.py",
                "        numbered.update((change.request, change.seq) for change in topic_changes.changes(lines))\n",
                "",
            )
        ],
        [FROM_THE_WAL],
        "a record that is there twice is refused: it names another incarnation",
    ),
    Mutant(
        "a change that drop_oldest took is not numbered again",
        [("kmq/framing/topics.py", "self._numbered.get(each.name, 0) > routed", "each.name in self._numbered")],
        [RECORDS],
    ),
    Mutant(
        "retention deletes the records of changes",
        [("kmq/router/in_force.py", "if name == topic_changes.TOPIC:", "if False:")],
        [RECORDS],
    ),
    Mutant(
        "a cut takes what readers have seen",
        [(COMMITTED, "    if later > seq:\n", "    if False:\n")],
        [UNIT_COMMITTED],
    ),
    Mutant(
        "a cut takes the oldest segment first",
        [(COMMITTED, "in reversed(newer):", "in newer:")],
        [UNIT_COMMITTED],
    ),
    Mutant(
        "a cut that goes on after a kill forgets what it had cut",
        [(COMMITTED, "        if not os.path.exists(path):\n            break\n", "        break\n")],
        [UNIT_COMMITTED],
    ),
    Mutant(
        "a cut is made before its copy is on disk",
        [(COMMITTED, "        file.flush()\n        os.fsync(file.fileno())\n", "")],
        [UNIT_COMMITTED],
    ),
    Mutant(
        "a cut takes the log before its index",
        [
            (
                COMMITTED,
                "    writer.cut(size)\n    sync_file(index)\n",
                "    os.truncate(part.path, size)\n    writer.cut(size)\n",
            )
        ],
        [UNIT_COMMITTED],
    ),
    Mutant(
        "a directory that is half reset is started",
        [(DISKS, '    _begin(data, state, "resetting", os.path.basename(place))\n', "")],
        [UNIT_DISKS],
    ),
    Mutant(
        "a directory that is half detached is started",
        [(DISKS, '_begin(data, state, "detaching", os.urandom(16).hex())', "os.urandom(16).hex()")],
        [UNIT_DISKS],
    ),
    Mutant(
        "a detached directory keeps its id",
        [(GAPS, 'for name in ("lineage", "id"):', 'for name in ("lineage",):')],
        [UNIT_DISKS],
    ),
    Mutant(
        "indexes of a detached directory keep the lineage of the shard",
        [(GAPS, '                    index.relabel(f"{directory}/{name}", lineage)\n', "                    pass\n")],
        [UNIT_DISKS],
    ),
    Mutant(
        "the directory of a broker that runs is reset",
        [(DATA_DIRECTORY, "            if not lock.try_acquire(describe(stage, data)):\n", "            if False:\n")],
        [UNIT_DISKS],
    ),
    Mutant(
        "a file `committed` that is not whole is believed",
        [(COMMITTED, "match and int(match[2]) == zlib.crc32(match[1])", "match")],
        [UNIT_COMMITTED],
    ),
    Mutant(
        "a queue that has lost epochs is believed",
        [(COMMITTED, "            is_whole = last >= _noted_seq(data)\n", "            is_whole = True\n")],
        [UNIT_COMMITTED],
    ),
    Mutant(
        "a shard adopts a topic that was laid by hand",
        [(CHANGES, "                if self._context.in_shard:\n", "                if False:\n")],
        [RECORDS],
    ),
    Mutant(
        "a message in a shard adopts a topic that was laid by hand",
        [
            (
                "kmq/router/declarations.py",
                "        if is_there and not is_late and self._context.in_shard:\n",
                "        if False:\n",
            )
        ],
        [RECORDS],
    ),
    Mutant(
        "a start in a shard believes a file that its checkpoint does not know",
        [("kmq/router/declarations.py", "if self._context.in_shard and is_early and", "if False and")],
        [RECORDS],
    ),
    Mutant(
        "a repair in a shard numbers records anew",  # repair_follows of the model
        [("kmq/repair/heal.py", '    if os.path.exists(f"{data}/replica"):\n', "    if False:\n")],
        ["tests/unit/test_repair.py::test_two_records_of_one_seq_are_both_kept"],
    ),
    Mutant(
        "readers of a shard's WAL see what may be cut",
        [(COMMITTED, 'return shown_seq(data) if os.path.exists(f"{data}/replica") else None', "return None")],
        [f"{UNIT_COMMITTED}::test_readers_of_a_shards_wal_see_only_what_is_committed"],
    ),
    Mutant(
        "a new leader's agent leaves out what the former one has marked",
        [("kmq/fleet/applying.py", "        if generation in (0, self._led):\n", "        if True:\n")],
        [f"tests/unit/test_fleet_states.py::{LEADER_ALONE}"],
    ),
    Mutant(
        "the agents of followers ask for topics, too",
        [("kmq/fleet/applying.py", "if self._settings.shard and not self._leads():", "if False:")],
        [f"tests/unit/test_fleet_states.py::{LEADER_ALONE}"],
    ),
    Mutant(
        "a request laid at a follower waits until it leads",
        [("kmq/replica/follow.py", "            self.stages.refuse_requests()\n", "")],
        ["tests/contract/test_shard_topics.py"],
    ),
    Mutant(
        "a connection of the pod may write changes of topics",
        [("kmq/message/record.py", "|kmq[.|]", "")],
        ["tests/unit/test_reserved_topics.py"],
    ),
    Mutant(
        "a declaration that the first message overtakes is ignored",
        [("kmq/router/declarations.py", "            return self.adopt(topic.name, seq)\n", "            pass\n")],
        [FILES],
    ),
    Mutant(
        "a queue of the size that the checkpoint knows is not looked at",
        [(PARTITION_RECOVERY, " and ends_as(last.path, last.size, ckpt.last_seq)", "")],
        [FILES],
    ),
    Mutant(
        "kafka: producer ids are numbered as generations are, so those of two leaders may meet",
        [("kmq/gateway/groups/membership.py", "self.epoch * EPOCH_LIVES + starts + 1", "starts + 1")],
        ["tests/unit/test_membership.py"],
    ),
    Mutant(
        "groups: a group that was not stable is taken over as if it were",
        [("kmq/gateway/groups/group.py", "self._is_stale = not is_stable", "self._is_stale = False")],
        ["tests/unit/test_group_records.py"],
    ),
    Mutant(
        "groups: each broker of a shard counts the gateway's lives alone",
        [("kmq/gateway/groups/coordinator.py", "max(epoch * LIVES, life + 1) if epoch else life", "life")],
        ["tests/unit/test_membership.py"],
    ),
    Mutant(
        "groups: who comes back before the first rebalance is told that it has nothing",
        [
            (
                "kmq/gateway/groups/membership.py",
                "if found.partitions or found.revoking or coordinator",
                "if True or coordinator",
            )
        ],
        ["tests/unit/test_membership.py"],
    ),
    Mutant(
        "offsets: a commit returns before it is on disk",
        [("kmq/gateway/groups/offsets.py", "        await outcome\n", "")],
        [OFFSETS_POWER],
    ),
    Mutant(
        "offsets: an older gateway goes on committing beside a newer one",
        [("kmq/gateway/groups/offsets.py", "            producer=PRODUCER,\n", "")],
        [OFFSETS],
    ),
    Mutant(
        "offsets: a commit beyond the end of a partition is stored",
        [("kmq/gateway/groups/membership.py", "            raise refused\n", "            pass\n")],
        ["tests/unit/test_membership.py"],
    ),
    Mutant(
        "offsets: a later commit overtakes one that waits for the router",
        [("kmq/gateway/groups/membership.py", "        async with turn:\n", "        if turn:\n")],
        ["tests/unit/test_membership.py"],
    ),
    Mutant(
        "groups: a commit goes beyond an answer that nobody has seen",
        [
            (
                "kmq/gateway/groups/membership.py",
                "if await self._write_on_the_way(group, name, rows) or has_waited",
                "if has_waited",
            )
        ],
        [HTTP_GROUPS],
    ),
    Mutant(
        "groups: an answer that was sent counts as arrived",
        [("kmq/gateway/http/exchange.py", "        connection.answered(settle)\n", "        settle(True)\n")],
        [HTTP_GROUPS],
    ),
    Mutant(
        "groups: no answer is known to have arrived",
        [
            (
                "kmq/gateway/http/exchange.py",
                "if outcome is not None:\n            outcome(",
                "if False:\n            outcome(",
            )
        ],
        [HTTP_GROUPS],
    ),
    Mutant(
        "segment: where the last read ended is trusted, wherever the next one begins",
        [("kmq/log/segment_reader.py", ".start == near and holds(line.entry):", ".start == near:")],
        ["tests/unit/test_partitions.py"],
    ),
    Mutant(
        "groups: what was read before a revoke or a seek is sent",
        [("kmq/gateway/lines/session.py", "if not self.reader.pass_turn(cursor):", "if False:")],
        [SESSION],
    ),
    Mutant(
        "groups: a seek and a leave overtake the fetch before them",
        [("kmq/gateway/lines/session.py", "                await self.fetches.tried()\n", "                pass\n")],
        [SESSION],
    ),
    Mutant(
        "offsets: commits do not wait for one another",
        [("kmq/gateway/groups/offsets.py", "        async with self._declaring:  #", "        if True:  #")],
        [OFFSETS],
    ),
    Mutant(
        "offsets: the log is read before the router has written it",
        [
            (
                "kmq/gateway/groups/offsets.py",
                "                await self.watermark.passed(stored)\n",
                "                pass\n",
            )
        ],
        [OFFSETS_POWER, OFFSETS],
    ),
    Mutant(
        "offsets: the front of the log is deleted before it is written again",
        [("kmq/gateway/groups/offsets.py", "            await self._write_again(", "            _ = (")],
        [OFFSETS],
    ),
    Mutant(
        "offsets: those of a deleted topic are shown",
        [("kmq/log/deletions.py", "        return seq <= self._deleted.last_seq(topic)\n", "        return False\n")],
        [OFFSETS],
    ),
    Mutant(
        "offsets: whoever is first in the table stays there",
        [("kmq/gateway/groups/offset_table.py", "before.seq > row.seq", "before.seq < row.seq")],
        ["tests/unit/test_offset_records.py"],
    ),
    Mutant(
        "reserved topics: everybody may write to them",
        [(ACCEPTOR, "record.refusal(line, reserved)", "record.refusal(line, True)")],
        ["tests/unit/test_reserved_topics.py"],
    ),
    Mutant(
        "reserved topics: a hello need not show the token",
        [(INGRESS, "hello.reserved and not self._local.matches(hello.token)", "False")],
        [OFFSETS],
    ),
    Mutant(
        "compaction: a tombstone goes while other records of its key are left",
        [("kmq/log/replaced.py", "== _DELETES:", "& _DELETES:")],
        ["tests/unit/test_replaced.py"],
    ),
    Mutant(
        "bootstrap: a leader may write any file",
        [(BOOTSTRAP, "if not _KNOWN.fullmatch(piece.name):", "if False:")],
        [UNIT_BOOTSTRAP],
    ),
    Mutant(
        "bootstrap: a directory of another lineage is replaced",
        [(BOOTSTRAP, "if identity.lineage(data) != lineage:", "if False:")],
        [UNIT_BOOTSTRAP],
    ),
    Mutant(
        "bootstrap: files of different moments are sent",
        [(BOOTSTRAP, "if _survey(data) == before:", "if True:")],
        [UNIT_BOOTSTRAP],
    ),
    Mutant(
        "bootstrap: the WAL is older than the queues",
        [(BOOTSTRAP, '_LOGS = ("topics", "append")', '_LOGS = ("append", "topics")')],
        [UNIT_BOOTSTRAP],
    ),
    Mutant(
        "bootstrap: what only the old directory had stays",
        [(BOOTSTRAP, "for name in {*_entries(data)} - {*names}:", "for name in ():")],
        [UNIT_BOOTSTRAP],
    ),
    Mutant(
        "bootstrap: a follower confirms what it was not sent",
        [(BOOTSTRAP, "not got < message.got <= total - left:", "False:")],
        [UNIT_BOOTSTRAP],
    ),
    Mutant(
        "replica port: a proof of an earlier session is good again",
        [(WIRE, "*follower[0], follower[1], *leader[0], leader[1])", "*follower[0], follower[1], *leader[0])")],
        [UNIT_WIRE],
    ),
    Mutant(
        "replica port: a follower believes whoever answers",
        [(WIRE, 'if not hmac.compare_digest(_mac(secret, "leader", me, *both), match[6]):', "if False:")],
        [UNIT_WIRE],
    ),
    Mutant(
        "replica port: strangers are not bounded",
        [(WIRE, "if len(self._strangers) >= STRANGERS:", "if False:")],
        [UNIT_WIRE],
    ),
    Mutant(
        "replica port: a block with another crc is taken",
        [(WIRE, "if (crc := zlib.crc32(body)) != message.crc:", "if (crc := message.crc) < 0:")],
        [UNIT_WIRE],
    ),
    Mutant(
        "compaction: a tombstone goes at once",
        [("kmq/log/replaced.py", "tombstone.recv_us < self._horizon.before_us and ", "")],
        ["tests/unit/test_replaced.py"],
    ),
    Mutant(
        "compaction: one that is to compact now does not wait for another",
        [("kmq/log/compaction.py", "        if not waits:\n", "        if True:\n")],
        ["tests/unit/test_replaced.py"],
    ),
    Mutant(
        "compaction: keys that come twice are not counted",
        [("kmq/log/replaced.py", "        if not is_new:\n", "        if False:\n")],
        ["tests/unit/test_replaced.py"],
    ),
    Mutant(
        "compaction: the first and the last record of a segment go",
        [
            (
                "kmq/log/replaced.py",
                "segment.first < offset < segment.end - 1",
                "segment.first <= offset <= segment.end - 1",
            )
        ],
        ["tests/unit/test_replaced.py"],
    ),
    Mutant(
        "door: a reset is passed on as an end in order",
        [("kmq/broker/door.py", "socket.SO_LINGER, _RESET)", "socket.SO_LINGER, _ORDERLY)")],
        ["tests/unit/test_door.py"],
    ),
    Mutant(
        "door: a half-close is not passed on",
        [("kmq/broker/door.py", "            other.sock.shutdown(socket.SHUT_WR)\n", "            pass\n")],
        ["tests/unit/test_door.py"],
    ),
    Mutant(
        "door: goes on with a former leader",
        [("kmq/broker/door.py", "        if found == self._leader_doors:\n", "        if self._leader_doors:\n")],
        ["tests/unit/test_door.py"],
    ),
    Mutant(
        "door: who reads nothing keeps it busy",
        [("kmq/broker/door.py", "not each.has_ended and not each.is_blocked", "not each.has_ended")],
        ["tests/unit/test_door.py"],
    ),
]


# --- the guards of tests/model/cluster_model.py, by the names that they have there -----------------------------------

LEAD, FOLLOW, REPLICA, STAGES = (f"kmq/replica/{name}.py" for name in ("lead", "follow", "replica", "stages"))
SHARD, REPLICA_FILES, REGISTER = "kmq/replica/shard.py", "kmq/replica/files.py", "kmq/cluster/register.py"
IN_LEADING, IN_FOLLOWING, UNCOMMITTED = (
    f"tests/unit/test_{name}.py" for name in ("leading", "following", "uncommitted")
)
IN_SHARD = "tests/model/test_shard_model.py"
WALKS, ANEW = (
    f"{IN_SHARD}::test_random_walks_keep_every_promise[]",
    f"{IN_SHARD}::test_a_volume_that_was_restored_joins_as_a_new_replica",
)
GONE_BACK = f"{IN_SHARD}::test_random_walks_keep_every_promise[consul]"
STORIES = f"{IN_SHARD}::test_recovery_loses_nothing_and_chooses_no_branch_by_itself"
DESCENT = "    return promised is None or (register is not None and register.descends_from(promised.version))\n"
PROMISE = "        if before is not None and not register.descends_from(before.version):\n"
KNOWS = "return identity.knows(member.note.start) and (version, self._work.stored()) >= self._noted(member)"
CAS, BLIND_WRITE = (
    "cas(keys.register, register.encode(), view.modified)",
    'KvOperation("set", keys.register, register.encode())',
)
AGREES = "min(diverged.end, self.epochs.end_of(diverged.epoch, end))"
PATIENT = "        if duty.register == self.register:\n            return\n        self.duty, self.register"
NOTICES = (
    "        if self._is_full or not self.files.identity.coming:  # no room: no session\n"
    "            self.files.save(self.files.identity.about_to_start())\n"
)
RESIGNS = "other is not None and self._work.stands() and"

GUARDS: list[tuple[str, list[Edit], str]] = [  # name, edits, the test that notices
    (
        "follower_no_fence",
        [(FOLLOW, "data.epoch != self.epoch or ", "")],
        f"{IN_FOLLOWING}::test_data_of_another_epoch_is_refused",
    ),
    (
        "leader_no_fence",
        [(LEAD, " or fetch.epoch != self.epoch:", ":")],
        f"{IN_LEADING}::test_a_follower_of_another_epoch_is_refused",
    ),
    (
        "shrink_early",
        [
            (
                LEAD,
                "set(register.isr).union(*self._pending_isrs)",
                "set(self._pending_isrs[-1] if self._pending_isrs else register.isr)",
            )
        ],
        f"{IN_LEADING}::test_who_leaves_counts_until_the_register_says_so",
    ),
    (
        "expand_late",
        [(LEAD, ".union(*self._pending_isrs)", "")],
        f"{IN_LEADING}::test_who_joins_counts_at_once_and_as_long_as_nobody_knows_the_outcome",
    ),
    (
        "expand_hw_only",
        [(LEAD, "least = max(self.hw, self.epoch_seq)", "least = self.hw")],
        f"{IN_LEADING}::test_who_joins_has_all_that_is_committed_and_the_record_of_the_epoch",
    ),
    ("truncate_hw", [(FOLLOW, AGREES, "stages.shown()")], f"{IN_FOLLOWING}::test_a_log_is_cut_to_where_it_agrees"),
    ("truncate_naive", [(FOLLOW, AGREES, "diverged.end")], f"{IN_FOLLOWING}::test_a_log_is_cut_to_where_it_agrees"),
    (
        "late_diverged",
        [(FOLLOW, "(message.next, message.last) != position or ", "")],
        f"{IN_FOLLOWING}::test_an_answer_to_a_position_that_was_left_is_no_reason_to_cut",
    ),
    (
        "late_diverged, while data comes",
        [
            (
                FOLLOW,
                "(message.next, message.last) != position or self._is_agreed",
                "(message.next, message.last) != position",
            )
        ],
        f"{IN_FOLLOWING}::test_a_late_answer_does_not_cut_what_has_come_since",
    ),
    (
        "no_compare",
        [(LEAD, "if position > end or epochs.epoch_at(position) != fetch.last:", "if False:")],
        f"{IN_LEADING}::test_a_position_counts_only_after_comparing",
    ),
    (
        "no_compare, a position before it",
        [
            (
                LEAD,
                "if self.followers.get(replica) is not follower:",
                "if not self.followers.setdefault(replica, follower):",
            ),
            (LEAD, "if position > follower.sent:", "if False:"),
        ],
        f"{IN_LEADING}::test_a_position_counts_only_after_comparing",
    ),
    (
        "resume_epoch",
        [(REPLICA, "promised.epoch if promised is not None and promised.leader == files.identity.id else 0", "0")],
        WALKS,
    ),
    ("restored_keeps_id", [(REPLICA, KNOWS, "return True")], ANEW),
    (
        "restored_keeps_id, where only its leader remembers",
        [(LEAD, "if position < self._confirmed.get(link.peer.replica, 0):", "if False:")],
        f"{IN_LEADING}::test_who_has_confirmed_more_than_it_has_is_told_that_it_went_back",
    ),
    (
        "ack_before_sync",
        [(FOLLOW, "synced = self.ring.synced_seq\n", "synced = self.received\n")],
        f"{IN_FOLLOWING}::test_only_what_is_on_disk_is_confirmed",
    ),
    (
        "dup_at_once",
        [
            (
                DURABILITY,
                "                self.uncommitted += blocks\n",
                "                self._reply([block for block in blocks if not block.count])\n"
                "                self.uncommitted += blocks\n",
            )
        ],
        f"{UNCOMMITTED}::test_replies_and_the_router_wait_for_hw",
    ),
    (
        "hw_unchecked",
        [(FOLLOW, "isinstance(message, wire.Data) and self._is_agreed", "isinstance(message, wire.Data)")],
        f"{IN_FOLLOWING}::test_data_before_the_leader_has_compared_is_refused",
    ),
    (
        "hw_unchecked, above what has come",
        [(FOLLOW, "min(seq, self.received)", "seq")],
        f"{IN_FOLLOWING}::test_hw_is_believed_only_up_to_what_was_received",
    ),
    (
        "unclean",
        [
            (SHARD, "            if member.id in register.isr\n            and", "            if"),
            (REGISTER, "        if leader not in self.isr:\n", "        if False:\n"),
        ],
        WALKS,
    ),
    (
        "lineage_kept",
        [
            (
                "kmq/replica/disks.py",
                'lineage = _begin(data, state, "detaching", os.urandom(16).hex())',
                'lineage = _begin(data, state, "detaching", identity.lineage(data))',
            )
        ],
        f"{UNIT_DISKS}::test_a_detached_directory_is_a_broker_of_its_own_with_all_its_records",
    ),
    ("isr_no_version", [(SHARD, CAS, BLIND_WRITE)], WALKS),
    (
        "pending_timeout",
        [
            (
                LEAD,
                PATIENT,
                PATIENT.replace("            return", "            self._pending_isrs = []\n            return"),
            )
        ],
        f"{IN_LEADING}::test_who_joins_counts_at_once_and_as_long_as_nobody_knows_the_outcome",
    ),
    (
        "route_synced",
        [(DURABILITY, "hw, found = self.stage.hw or 0, []", "hw, found = 1 << 62, []")],
        f"{UNCOMMITTED}::test_replies_and_the_router_wait_for_hw",
    ),
    (
        "ckpt_synced",
        [(FRAMER, "return synced if synced is None or hw is None else min(synced, hw)", "return synced")],
        f"{UNCOMMITTED}::test_producers_ckpt_speaks_of_nothing_that_is_not_committed",
    ),
    (
        "isr_below_min",
        [(REGISTER, "if self.leader not in isr or len(isr) < self.least:", "if self.leader not in isr:")],
        "tests/unit/test_register.py::test_a_leader_never_shrinks_the_isr_below_min_insync_nor_leaves_it",
    ),
    (
        "isr_below_min, counted",
        [(LEAD, "if len(register.isr) < register.min_insync:", "if False:")],
        f"{IN_LEADING}::test_nothing_is_committed_while_the_isr_is_too_small",
    ),
    (
        "min_below_majority",
        [(REGISTER, "not majority <= min_insync <= count:", "not 1 <= min_insync <= count:")],
        "tests/unit/test_register.py::test_a_shard_that_cannot_work_is_refused_with_the_reason",
    ),
    (
        "late_record",
        [(LEAD, "if epochs is None or not self.epoch_seq or", "if epochs is None or")],
        f"{IN_LEADING}::test_nobody_is_served_before_the_record_of_the_epoch_is_on_disk",
    ),
    (
        "early_resume",
        [
            (LEAD, "follower.sent < self.synced:", "follower.sent < self.numbered:"),
            (LEAD, "elif chunk.last > self.synced:", "elif False:"),
        ],
        f"{IN_LEADING}::test_only_what_is_on_disk_is_sent",
    ),
    (
        "early_resume, after a start of durability",
        [(LEAD, "if has_begun and stages.durability_starts() != starts:", "if False:")],
        f"{IN_LEADING}::test_an_epoch_in_which_durability_was_started_again_is_spent",
    ),
    (
        "ring_kept",
        [(STAGES, "            layout.remove(instance, name)\n", "            pass\n")],
        f"{UNCOMMITTED}::test_what_was_numbered_and_not_stored_goes_with_the_role",
    ),
    (
        "ring_kept, lines in the FIFO of a follower",
        [(FOLLOW, "            self.stages.drop_fifo()\n", "")],
        f"{IN_FOLLOWING}::test_lines_in_the_fifo_of_a_follower_never_come_up_again",
    ),
    (
        "no_promise",
        [(REPLICA, DESCENT, "    return True\n"), (REPLICA_FILES, PROMISE, "        if False:\n")],
        GONE_BACK,
    ),
    (
        "promise_lost",
        [(REPLICA_FILES, '        replace_file(f"{self.data}/register", _with_crc(text).encode())\n', "")],
        f"{IN_FOLLOWING}::test_a_version_is_promised_on_disk_before_anything_is_answered_under_it",
    ),
    (
        "promise_number",
        [(REGISTER, "return version in self.marks", "return version.number in [mark.number for mark in self.marks]")],
        f"{IN_FOLLOWING}::test_a_register_that_does_not_descend_from_the_promise_is_not_followed",
    ),
    (
        "epoch_promise",
        [(LEAD, "if have.version == self.register.version.number:", "if True:")],
        f"{IN_LEADING}::test_a_position_counts_only_under_the_version_in_force",
    ),
    (
        "epoch_promise, of the version before",
        [(LEAD, "            follower.position = 0\n", "")],
        f"{IN_LEADING}::test_what_was_confirmed_under_the_version_before_does_not_count",
    ),
    ("recover_no_hold", [(SHARD, "each.note.version == held.version}", "each.note.version}")], STORIES),
    ("recover_few", [(SHARD, "    enough = len(base.brokers) - base.min_insync + 1\n", "    enough = 1\n")], STORIES),
    ("recover_any", [(SHARD, "best = max(bound.values(), key", "best = min(bound.values(), key")], STORIES),
    ("recover_fork", [(SHARD, "    if others:\n", "    if False:\n")], STORIES),
    ("recover_outside", [(SHARD, "    if not {*replicas} & {*base.isr}:", "    if False:")], STORIES),
    (
        "no_resign",
        [(REPLICA, RESIGNS, "False and")],
        f"{IN_SHARD}::test_a_leader_whose_hw_stands_lets_another_one_lead",
    ),
    (
        "shrink_blind",
        [(REPLICA, " or not is_heard:", ":")],
        f"{IN_SHARD}::test_a_leader_that_hears_nobody_lets_nobody_leave_the_isr",
    ),
    (
        "doors_early",
        [(LEAD, "0 < self.epoch_seq <= min(self.hw, stages.routed_seq())", "0 < self.epoch_seq")],
        f"{IN_LEADING}::test_the_doors_open_when_the_record_of_the_epoch_is_committed_and_routed",
    ),
    (
        "starts_counted",
        [
            (
                REPLICA_FILES,
                "return self if self.coming else self._replace(coming=new_mark())",
                "return self._replace(coming=new_mark())",
            ),
            (REPLICA, NOTICES, NOTICES.replace("not self.files.identity.coming", "True")),
        ],
        WALKS,
    ),
    ("any_start", [(REPLICA, KNOWS, "return (version, self._work.stored()) >= self._noted(member)")], f"{ANEW}[copy]"),
    # What the model takes for granted:
    (
        "data with a gap",
        [(FOLLOW, "data.epoch != self.epoch or data.first != self.received + 1", "data.epoch != self.epoch")],
        f"{IN_FOLLOWING}::test_data_that_is_not_right_behind_is_refused",
    ),
    (
        "a role begins while a stage holds the rings of the last one",
        [(STAGES, "while held := self._held():", "while held := self._held()[:0]:")],
        f"{UNCOMMITTED}::test_rings_stay_as_long_as_a_stage_holds_them",
    ),
    (
        "a stage goes on in a former role",
        [
            (
                "kmq/broker/stage.py",
                "if role is not None and (role.generation != self.generation or not self._may_serve(role)):",
                "if False:",
            )
        ],
        f"{UNCOMMITTED}::test_a_stage_of_a_former_generation_lets_go_at_its_next_beat",
    ),
    (
        "the end of the WAL counts as shown",
        [(DURABILITY, "else shown_seq(log.data)", "else log.last_seq")],
        f"{UNCOMMITTED}::test_a_new_role_shows_what_is_behind_the_shown_once_it_is_committed",
    ),
    (
        "an epoch begins without its record",
        [(FRAMER, "if ring.last.next_seq == ring.base_seq and stage.role is not None:", "if False:")],
        f"{UNCOMMITTED}::test_the_first_record_of_a_leader_is_that_of_its_epoch",
    ),
    (
        "durability closes the ring with blocks above hw",
        [(DURABILITY, "    job.uncommitted.clear()  # the blocks are views of the ring\n", "")],
        f"{UNCOMMITTED}::test_durability_ends_in_order_with_records_that_are_not_committed",
    ),
]
MUTANTS += [Mutant(f"cluster: {name}", edits, [test]) for name, edits, test in GUARDS]
MUTANTS += [
    Mutant(f"cluster: {name}", [], [], f"no such code: {why}")
    for name, why in {
        "rid_is_node": "the id is random, and a file of the disk: with a wiped disk it is gone",
        "last_at_once": "!last, id_reused and id_too_old go the way of !dup (dup_at_once)",
        "repair_follows": "kmq verify --repair does not ask yet whether the directory is a replica",
        "bq_order": "registers never ride on the Broadcast Queue",
    }.items()
]


def copy_to(target: Path) -> None:
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    if (REPOSITORY / "build").exists():  # Consul, as scripts/consul-setup has left it there
        (target / "build").symlink_to(REPOSITORY / "build")


def mutate(root: Path, edits: list[Edit]) -> None:
    for name, old, new in edits:
        text = (root / name).read_text()
        sites = text.count(old)
        if not sites:
            raise SystemExit(f"{name}: nothing to mutate, {old!r} is not there; the mutant must follow the code")
        (root / name).write_text(text.replace(old, new))


def first_red(root: Path, tests: list[str]) -> tuple[str, str]:
    """The first test that fails and what it says; empty when all are green."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not soak",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "200",
    ]
    for test in tests:
        result = subprocess.run(
            [*command, test],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
        )
        if result.returncode not in (0, 1):
            raise SystemExit(f"pytest could not run {test}:\n{result.stdout[-3000:]}{result.stderr[-1000:]}")
        if result.returncode:
            found = re.findall(r"^(?:FAILED|ERROR) \S*/(\S+?\.py::[^\n]*?)(?: - .*)?$", result.stdout, re.MULTILINE)
            kinds = re.findall(r"^E .*finding=(\w+)", result.stdout, re.MULTILINE)
            words = re.findall(r"^E  +(?:\w+Error: )?(\S.{0,70})", result.stdout, re.MULTILINE)
            return found[0] if found else test, ", ".join(sorted(set(kinds))) or "".join(words[:1])
    return "", ""


def main(words: list[str]) -> int:
    wanted = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    rows, surprises = [], 0
    for mutant in wanted:
        with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
            root = Path(directory)
            copy_to(root)
            mutate(root, mutant.edits)
            red, says = first_red(root, mutant.tests)
        surprises += not red and not mutant.covered
        row = f"| {mutant.name} | {red or '-'} | {'red' if red else 'GREEN'} | {says if red else mutant.covered} |"
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    print("| guard removed | test | result | it says |\n|---|---|---|---|", *rows, sep="\n")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
