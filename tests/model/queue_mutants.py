"""The guards of the model of queues, each taken out of a copy of it, and the configuration that must notice.

python tests/model/queue_mutants.py [word …]     how each mutant is noticed
"""

import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

MODEL = Path(__file__).with_name("queue_model.py")
MOST = 1_000_000  # states

Edit = tuple[str, str, str]  # module, what stands there (once), what is put in its place


class QueueCode(NamedTuple):
    """The model, made anew."""

    queue_model: Any


class Mutant(NamedTuple):
    """The model without one of its guards. `config`: of the exploration that notices."""

    name: str
    config: str
    edits: tuple[Edit, ...]


def load(edits: Iterable[Edit] = ()) -> QueueCode:
    """Return the model with these edits."""
    text = MODEL.read_text()
    for _, old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{MODEL.name}: {old!r} stands there {text.count(old)} times; the mutant must follow")
        text = text.replace(old, new)
    module = types.ModuleType("queue_model")
    exec(compile(text, MODEL.name, "exec"), module.__dict__)
    return QueueCode(module)


def edited(*pairs: tuple[str, str]) -> tuple[Edit, ...]:
    return tuple(("queue_model", old, new) for old, new in pairs)


def resent(change: str) -> str:
    """Return code that puts aside a straggler, and changes the records that it sends: `new`."""
    sent = f"(lambda new: state._replace(pending=state.pending + {change}))"
    return f"{sent}({STRAGGLER}.pending[len(state.pending):])"


STRAGGLER = 'move_start(send(state, ("row", offset, Row(disk.life, 0))))'
ACKED = "        return remember(move_start(state), offset, Message(ACKING, worker))\n"
BIT = '        if offset >= disk.start:\n            state = send(state, ("bit", offset, disk.life))\n'
TOMBSTONE = '        if disk.rows[offset]:\n            state = send(state, ("row", offset, None))\n'
IN_FORCE = "message.state == IN_HAND and is_same and (message.worker, message.number) == (worker, hold.number)"
ONCE = 'remember(send(state, ("row", offset, once)), offset, Message(TAKING, worker, 1))'
SECOND = 'remember(send(state, ("row", offset, counted)), offset, Message(TAKING, worker, ALONE))'
SEVERAL = "                state = self.doubt(suspect(state, offset), offset)\n"
TIMES = "SINGLE if times >= ALONE else DOUBTED"

MUTANTS = [
    # --- the order of records: each prefix may be all that is on disk
    Mutant("the start passes a straggler before its row", "kills", edited((STRAGGLER, resent("new[::-1]")))),
    Mutant("a straggler gets no row", "kills", edited((STRAGGLER, resent("new[1:]")))),
    Mutant(
        "the start passes a message before its done bit",
        "kills",
        edited(
            (BIT, "        before = state.pending\n" + BIT),
            (
                ACKED,
                "        state = move_start(state)\n"
                "        state = state._replace(pending=before + state.pending[len(before):][::-1])\n"
                "        return remember(state, offset, Message(ACKING, worker))\n",
            ),
        ),
    ),
    Mutant("the tombstone comes before the done bit", "kill, lapse", edited((BIT + TOMBSTONE, TOMBSTONE + BIT))),
    Mutant(
        "the tombstone of a done bit comes before the start",
        "kills",
        edited(
            (
                ACKED,
                "        moved, was = move_start(state), state.pending\n"
                "        if view(moved).start > offset >= disk.start:\n"
                '            moved = moved._replace(pending=(*was, ("bit", offset, -1), *moved.pending[len(was):]))\n'
                "        return remember(moved, offset, Message(ACKING, worker))\n",
            )
        ),
    ),
    Mutant(
        "the row of a letter comes before the letter",
        "one, many kills",
        edited(
            (
                "remember(send(state, *records), offset, BURYING)",
                "remember(send(state, *records[::-1]), offset, BURYING)",
            )
        ),
    ),
    Mutant(
        "an ack is answered before it is durable",
        "kills",
        edited(
            (
                ACKED,
                "        state = state._replace(answered=state.answered | {message_of(state, offset)})\n"
                "        return replace_hold(remember(move_start(state), offset, DONE), worker, over)\n",
            )
        ),
    ),
    # --- the reach, and what is in doubt
    Mutant(
        "the reach is in memory only",
        "one, many kills",
        edited(
            (
                "self.forget(state._replace(disk=disk, pending",
                "self.forget(state._replace(disk=disk._replace(reach=disk.start), pending",
            )
        ),
    ),
    Mutant(
        "a message is shown above the reach",
        "kills",
        edited(
            ("kind in (NEW, WAITS) and (offset < durable.reach or row_of(durable, offset))", "kind in (NEW, WAITS)")
        ),
    ),
    Mutant(
        "nothing is in doubt after a start",
        "one, many kills",
        edited(("memory.append(Message(IN_DOUBT))", "memory.append(Message(WAITS if row_of(disk, offset) else NEW))")),
    ),
    Mutant("in doubt once, delivered alone at once", "one, many kills", edited((TIMES, "SINGLE"))),
    Mutant("in doubt twice, delivered as others are", "one, many kills", edited((TIMES, "DOUBTED"))),
    Mutant(
        "no row says that a message was in doubt",
        "one, many kills",
        edited((ONCE, "self.show(state, offset, worker, False)")),
    ),
    Mutant(
        "the row of a message in doubt follows its delivery",
        "one, many kills",
        edited((ONCE, 'send(self.show(state, offset, worker, False), ("row", offset, once))')),
    ),
    Mutant(
        "in doubt once, and it counts",
        "one, many kills",
        edited(("once = Row(disk.life, row.counted, 1)", "once = Row(disk.life, row.counted + 1, 1)")),
    ),
    Mutant("a nack clears the doubt", "one, many kills", edited(("max(doubt, row.doubt)", "doubt"))),
    Mutant(
        "a worker that dies with several leaves no doubt",
        "two deaths",
        edited(
            (SEVERAL, "                state = remember(state, offset, WAITS if row_of(state.disk, offset) else NEW)\n")
        ),
    ),
    # --- counts
    Mutant(
        "a delivery alone is counted after it",
        "one, many kills",
        edited((SECOND, "self.show(state, offset, worker, False)")),
    ),
    Mutant(
        "all that a dead worker had counts",
        "deaths",
        edited((SEVERAL, "                state = self.end_badly(state, offset, False, doubt=ALONE)\n")),
    ),
    Mutant(
        "what was counted and not shown counts twice",
        "one, many kills",
        edited(("COUNTED if message.state == NOTING_COUNT else SINGLE", "SINGLE")),
    ),
    Mutant(
        "a worker that comes back has a delivery that is not counted",
        "one, many kills",
        edited(("        is_alone = bool(row and row.doubt >= ALONE)\n", "        is_alone = False\n")),
    ),
    Mutant("a message alone has neighbours", "deaths", edited(("kind == SINGLE and not mine", "kind == SINGLE"))),
    Mutant(
        "a message alone gets neighbours",
        "deaths",
        edited(
            (
                "        if any(is_single(m) for m in mine):\n",
                "        if False:\n",
            )
        ),
    ),
    Mutant(
        "one delivery more than the limit",
        "kills",
        edited(("        if count >= DELIVERIES:\n", "        if count > DELIVERIES:\n")),
    ),
    Mutant(
        "what is spent is delivered alone",
        "one, many kills",
        edited(("                if row.counted >= DELIVERIES:\n", "                if False:\n")),
    ),
    Mutant(
        "a return counts",
        "return",
        edited(
            (
                "remember(state, offset, SINGLE if row and row.doubt >= ALONE else WAITS if row else NEW)",
                "self.end_badly(state, offset, message.is_alone)",
            )
        ),
    ),
    Mutant(
        "the return of a counted delivery writes nothing",
        "return",
        edited(("            elif message.is_alone and row:\n", "            elif False:\n")),
    ),
    Mutant(
        "a worker with a message alone comes back with another",
        "deaths",
        edited(("        if any(is_single(m) for m in mine) or (is_alone and mine):\n", "        if False:\n")),
    ),
    # --- late answers
    Mutant("any nack ends the delivery in force", "zombies", edited((IN_FORCE, "message.state == IN_HAND"))),
    Mutant(
        "a nack names its delivery by worker and n",
        "kill, lapse",
        edited(
            (
                IN_FORCE,
                "message.state == IN_HAND and hold.life == disk.life"
                " and hold.n == (row_of(disk, offset) or Row(0, 0)).counted + (not message.is_alone)",
            )
        ),
    ),
    Mutant(
        "an ack of an older life counts",
        "reset",
        edited(("        if hold.life != disk.life:\n", "        if False:\n")),
    ),
    Mutant(
        "an ack of what was not in doubt counts",
        "restore",
        edited((" or offset >= state.base\n        ):", "\n        ):")),
    ),
    Mutant(
        "a late ack frees the key",
        "key, lapse",
        edited(
            ("        if self.keys and message.state == IN_HAND and message.worker != worker:\n", "        if False:\n")
        ),
    ),
    # --- keys
    Mutant(
        "a nack frees the key",
        "key, lapse",
        edited(
            ("any(memory[other].state != DONE for", "any(memory[other].state not in (DONE, WAITS, NOTING, SINGLE) for")
        ),
    ),
    Mutant(
        "an ack on its way frees the key",
        "key",
        edited(("any(memory[other].state != DONE for", "any(memory[other].state not in (DONE, ACKING) for")),
    ),
    Mutant(
        "keys are not read after a start",
        "key",
        edited(("return any(memory[other].state", "return not state.kills and any(memory[other].state")),
    ),
    Mutant(
        "a message that is gone keeps its key",
        "key, retention",
        edited(("if memory[low].state in busy else", "if memory[low].state in (*busy, WAITS, SINGLE, DOUBTED) else")),
    ),
    Mutant(
        "a message that is gone frees its key at once",
        "key, retention",
        edited(("if memory[low].state in busy else", "if False else")),
    ),
    Mutant(
        "a message that is gone is in doubt",
        "keys, retention",
        edited(
            (
                "        if offset < state.low:\n            return remember(state, offset, DONE)\n        row",
                "        row",
            )
        ),
    ),
    # --- lives
    Mutant(
        "rows and bits of an older life count",
        "reset",
        edited(
            ("row is None or disk.foreign or row.life >= disk.life", "True"),
            (" and disk.bits[offset] == disk.life", ""),
        ),
    ),
    Mutant(
        "the id of a letter has no life",
        "reset",
        edited(
            (
                "    return disk._replace(letters=",
                "    return disk if disk.letters[offset] >= 0 else disk._replace(letters=",
            )
        ),
    ),
    Mutant(
        "a start without a life has life 0",
        "old",
        edited(
            ("start=offset, foreign=True)", "start=offset, reach=offset, life=0)"),
            ("row is None or disk.foreign or row.life >= disk.life", "row is None or row.life == disk.life"),
            ("noted = Row(disk.life, (row.counted", "noted = Row(0, (row.counted"),
        ),
    ),
    Mutant(
        "a start is adopted before its rows",
        "old, twice",
        edited(("send(state, *rows, start)", "send(state, start, *rows)")),
    ),
]


def breaks(mutant: Mutant) -> str:
    """Return how the mutant is noticed; "" if it is not."""
    model = load(mutant.edits).queue_model
    try:
        model.explore(model.CONFIGS[mutant.config], MOST)
    except model.Violated as violated:
        return str(violated)
    return ""


def main(words: list[str]) -> int:
    left = 0
    for mutant in MUTANTS:
        if words and not any(word in mutant.name for word in words):
            continue
        begun = time.process_time()
        noticed = breaks(mutant)
        left += not noticed
        print(f"{time.process_time() - begun:6.1f} s  {mutant.name}: {noticed or 'NOT NOTICED'}", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
