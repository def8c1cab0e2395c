"""One mutant for each guard of the Broadcast Queue: the guard taken out of a copy of the code.

python tests/unit/bq_mutants.py [word …]     which walk finds each mutant; exit code 1 if one is not found
"""

import sys
import time
from typing import NamedTuple

from bq_code import Edit, load
from bq_explorer import Walk, walk


class Mutant(NamedTuple):
    name: str
    edits: tuple[Edit, ...]


def _in(module: str, *pairs: tuple[str, str]) -> tuple[Edit, ...]:
    return tuple((module, old, new) for old, new in pairs)


PUBLISHER = [
    Mutant(
        "who holds the lock publishes without a look at it",
        _in("lock", ("return [check_session(self.key, session), *operations]", "return [*operations]")),
    ),
    Mutant(
        "who does not hold the lock publishes without taking it",
        _in("lock", ("return [taken, *operations, ", 'return [Operation("get-tree", self.key), *operations][:] or [')),
    ),
    Mutant(
        "a publisher that waited in vain says that its message is not there, though it may come to be",
        _in("publisher", ("except (ConsulError, BusyError) as error:", "except ConsulError as error:")),
    ),
    Mutant(
        "an epoch that was refused is tried again for ever",
        _in("publisher", ("            self._last = None\n", "")),
    ),
    Mutant(
        "the epoch is set, whatever it was",
        _in("publisher", ('cas(keys.epoch, b"%d" % epoch, version)', 'Operation("set", keys.epoch, b"%d" % epoch)')),
    ),
    Mutant(
        "a state key is set, whatever it was",
        _in(
            "publisher",
            ("cas(change.key, change.value, change.version)", 'Operation("set", change.key, change.value)'),
        ),
    ),
    Mutant(
        "an unknown outcome is not read back", _in("publisher", ("        if not self._tried:\n", "        if True:\n"))
    ),
    Mutant(
        "any message under the epoch that was tried is taken for ours",
        _in("publisher", ("Message.decode(found.value, self._tried).id == message.id", "True")),
    ),
    Mutant(
        "a message that was trimmed is taken for one that was not published",
        _in(
            "publisher",
            (
                '            raise self._nobody_knows(message, "it may have been deleted again")\n',
                "            return False\n",
            ),
        ),
    ),
    Mutant(
        "a refusal after an unknown outcome says that the message was not published",
        _in("publisher", ("            if self._tried:\n", "            if False:\n")),
    ),
    Mutant(
        "a failed trimming says that the message was not published",
        _in(
            "publisher",
            (
                "            except ConsulError:\n                pass",
                "            except ConsulError:\n                raise",
            ),
        ),
    ),
    Mutant(
        "a conflict at a state key is taken for one at the epoch",
        _in("publisher", ("if conflict.op_index <= len(changes):", "if False:")),
    ),
    Mutant(
        "a conflict at the lock is taken for one at the epoch",
        _in(
            "publisher",
            (
                "        if conflict.op_index == 0:\n            raise",
                "        if conflict.op_index == 0:\n            return\n            raise",
            ),
        ),
    ),
    Mutant(
        "a message that is too long is sent for ever",
        (
            *_in("publisher", ("        check_size(", "        (lambda *_: None)(")),
            *_in("consul", ("if response.status >= 500:", "if response.status >= 413:")),
        ),
    ),
]

SUBSCRIBER = [
    Mutant(
        "who marks need not hold the lock",
        _in(
            "subscriber",
            ("ours = check_session(self._key, self._presence.session)", 'ours = Operation("get-tree", self._key)'),
        ),
    ),
    Mutant(
        "what is handed out counts as processed",
        _in(
            "subscriber",
            (
                "            self._handed_out = items[-1].epoch\n",
                "            self._handed_out = items[-1].epoch\n"
                "            self.done = Mark(items[-1].epoch, items[-1].id, time.time())\n",
            ),
        ),
    ),
    Mutant(
        "epochs are sorted as text",
        _in(
            "subscriber",
            (
                "sorted(epoch for epoch in found if epoch > done.epoch)",
                "sorted((n for n in found if n > done.epoch), key=str)",
            ),
        ),
    ),
    Mutant(
        "what was processed is handed out again",
        _in("subscriber", ("sorted(epoch for epoch in found if epoch > done.epoch)", "sorted(found)")),
    ),
    Mutant(
        "a gap is passed over",
        _in("subscriber", ("if any(epoch not in found for epoch in range(last + 1, newest + 1)):", "if False:")),
    ),
    Mutant(
        "an epoch that went back is not noticed",
        _in("subscriber", ("return epoch is None or int(epoch.value) < last", "return False")),
    ),
    Mutant(
        "the id under the epoch that was processed last is not compared",
        _in(
            "subscriber",
            ("return last not in found or Message.decode(found[last].value, last).id != done.id", "return False"),
        ),
    ),
    Mutant(
        "a message that is gone is taken for the one that was processed",
        (
            *_in("subscriber", ("return last not in found or ", "return last in found and ")),
            *_in("trimming", ("if kept and (", "if epoch != max(sizes) and (")),
        ),
    ),
    Mutant(
        "a snapshot does not tell the id of its message",
        _in("subscriber", ('Message.decode(newest, epoch).id if newest is not None else ""', '""')),
    ),
    Mutant(
        "a snapshot is read in several Txns",
        _in(
            "subscriber",
            (
                'entries = yield from consul.txn([Operation("get-tree", tree) for tree in trees])',
                "entries = []\n        for tree in trees:\n"
                '            entries += yield from consul.txn([Operation("get-tree", tree)])',
            ),
        ),
    ),
    Mutant(
        "a mark that arrives late undoes a newer one",
        _in("subscriber", ("cas(where, mark.encode(), self._version)", 'Operation("set", where, mark.encode())')),
    ),
    Mutant(
        "what is left of a list waits for the next message",
        _in("subscriber", ("self._position if self._handed_out in (None, done.epoch) else 0", "self._position")),
    ),
    Mutant(
        "a watch goes on though its answer led to nothing",
        _in("subscriber", ("        found = {}\n", "        self._position = watched.position\n        found = {}\n")),
    ),
    Mutant(
        "nothing is marked after the clock was put back",
        _in("subscriber", ("self.done[:2] != self._marked[:2]:", "self.done.ts > self._marked.ts:")),
    ),
]

OTHERS = [
    Mutant(
        "a subscriber that was displaced forgets what it knew",
        _in("subscriber", ("            self.done = known\n", "            pass\n")),
    ),
    Mutant(
        "who deletes need not hold the lock",
        _in(
            "trimming",
            ("lock.around([guard, *deletions])", "[guard, *deletions]"),
        ),
    ),
    Mutant(
        "what was read before Consul was restored decides what is deleted",
        _in("trimming", ('Operation("check-index", keys.epoch, version=last.version)', 'Operation("get", keys.epoch)')),
    ),
    Mutant("the quickest broker decides what is deleted", _in("trimming", ("return min(epochs", "return max(epochs"))),
    Mutant("the last message is deleted", _in("trimming", ("if kept and (", "if ("))),
    Mutant("what nobody has processed is deleted", _in("trimming", ("if epoch <= read_by_all)", "if True)"))),
    Mutant(
        "a broker that is there and has not marked for a day is not waited for",
        _in("trimming", ("if entry.key.removeprefix(keys.delivered) in here or now", "if now")),
    ),
    Mutant(
        "a broker that was killed just now is not waited for",
        _in("trimming", (" in here or now - mark.ts < ABSENT_S:", " in here:")),
    ),
    Mutant(
        "a lock is written by anybody",
        _in("presence", ('Operation("lock", key, value, session=self.session)', 'Operation("set", key, value)')),
    ),
    Mutant(
        "a lock that another holds is taken for ours",
        _in("presence", ("return None if holder.session == self.session else holder", "return None")),
    ),
    Mutant(
        "a number of a watch that went back is kept",
        _in("consul", ("now if now >= position else 0", "max(now, position)")),
    ),
    Mutant(
        "an outcome that is unknown is taken for a refusal",
        _in(
            "consul",
            (
                '        raise Unanswered(f"Consul: {text or response.status}"',
                '        raise ConsulError(f"Consul: {text or response.status}"',
            ),
        ),
    ),
    Mutant(
        "a key that must not be there is set",
        _in(
            "consul",
            (
                '{"Verb": operation.verb,',
                '{"Verb": operation.verb if operation.version or operation.verb != "cas" else "set",',
            ),
        ),
    ),
]

MUTANTS = [*PUBLISHER, *SUBSCRIBER, *OTHERS]

# Found only after dozens or hundreds of walks: for the soak.
RARE = {
    "a message that was trimmed is taken for one that was not published",
    "a refusal after an unknown outcome says that the message was not published",
    "a gap is passed over",
    "an epoch that went back is not noticed",
    "the id under the epoch that was processed last is not compared",
    "a message that is gone is taken for the one that was processed",
    "a snapshot does not tell the id of its message",
    "a mark that arrives late undoes a newer one",
    "a watch goes on though its answer led to nothing",
    "what was read before Consul was restored decides what is deleted",
    "a number of a watch that went back is kept",
}


def find(mutant: Mutant, walks: int) -> tuple[int, str] | None:
    """Return the first walk that the mutant breaks, and how; None if it survives them all."""
    for seed in range(walks):
        try:
            walk(load(mutant.edits), Walk(seed))
        except Exception as error:  # also one that the mutant itself runs into
            return seed, f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main(words: list[str]) -> int:
    left = 0
    for mutant in MUTANTS:
        if words and not any(word in mutant.name for word in words):
            continue
        begun = time.monotonic()
        found = find(mutant, 400)
        left += found is None
        print(f"{time.monotonic() - begun:6.1f} s  {mutant.name}: {found or 'NOT FOUND'}", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
