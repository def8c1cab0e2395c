"""Dead letters for people: grouped by reason, and sent back.

Bounds      The newest _SCANNED letters are grouped, for at most _SCAN_S. At most _HELD_BYTES of examples are held, and
            as many are shown as an answer has room for, so a reason may have none. A replay ends after _REPLAY_S or at
            its limit, and says if letters are left. The same replay again continues with them, because the limit counts
            only letters that had not gone back.
            One replay at a time.
"""

import time
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from kmq.deadletters.selection import Filter, Selection, StoredRecord, replay
from kmq.errors import ConfigError, KmqError
from kmq.gateway.console.messages import ANSWER_BYTES, damage_json, shown, weight
from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.partitions import Partition, Partitions
from kmq.log.damage import DamageError
from kmq.message.letters import is_dead_letters, parse_letter, why_dead
from kmq.message.record import DLQ

_SCANNED, _SCAN_S, _REPLAY_S = 20_000, 2.0, 50.0
_EXAMPLES, _REASONS, _REASON = 5, 200, 200
_CHUNK_BYTES = 256 << 10
_HELD_BYTES = 16 << 20


class _Over(Exception):
    """The time of a replay is over."""


class DeadLetters:
    """The letters of one broker. Call it in a thread."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions, self._data = partitions, partitions.data
        self._replaying = Lock()

    def topic_of(self, name: str) -> str:
        """Return the topic of letters, given its own or its origin's name. Raises RequestRefused."""
        try:
            self._partitions.count(f"{name}{DLQ}")
        except RequestRefused:
            self._partitions.count(name)
            return name
        return f"{name}{DLQ}"

    def grouped(self, name: str) -> dict[str, Any]:
        """Return the letters by reason, the most frequent first, ready for JSON."""
        found: dict[str, dict[str, Any]] = {}
        topic = self.topic_of(name)
        total, more, damage, room = 0, False, None, _HELD_BYTES
        until = time.monotonic() + _SCAN_S
        for partition in self._open(topic):
            share = _SCANNED // self._partitions.count(partition.topic)
            first = max(partition.start(), partition.end() - max(1, share))
            more |= first > partition.start()
            try:
                for message in (each for some, _ in partition.chunks(first, _CHUNK_BYTES) for each in some):
                    if not is_dead_letters(topic) and parse_letter(message.line) is None:
                        continue
                    reason = why_dead(message.line)[:_REASON]
                    if reason not in found and len(found) >= _REASONS:
                        reason = "(other reasons)"
                    room = _count(found, reason, message, room)
                    total += 1
                    if time.monotonic() > until:
                        more = True
                        break
            except DamageError as err:
                more, damage = True, err
        groups = sorted(found.values(), key=lambda row: -row["count"])
        _show_examples(groups)
        return {
            "as_of": round(time.time(), 3),
            "topic": topic,
            "groups": groups,
            "total": total,
            "more": more,
            "error": None if damage is None else damage_json(damage),
        }

    def replay(self, name: str, filters: Sequence[str], rate: float, most: int, dry_run: bool) -> dict[str, Any]:
        """Send letters back to their topics, or only count them. Returns the result for JSON."""
        topic = self.topic_of(name)
        try:
            chosen = Selection.of_letters(
                self._data, topic, [Filter.parse(text) for text in filters], most=most, tick=_clock()
            )
        except ConfigError as err:
            raise bad_field("filter", str(err).removeprefix("--filter ")) from None
        if not self._replaying.acquire(blocking=False):
            raise RequestRefused("too_many", "another replay is going on; it ends within a minute")
        try:
            return self._replay(chosen, rate, dry_run)
        finally:
            self._replaying.release()

    def _replay(self, chosen: Selection, rate: float, dry_run: bool) -> dict[str, Any]:
        total = 0

        def in_time() -> Iterator[tuple[StoredRecord, bytes]]:
            nonlocal total
            try:
                for pair in chosen:
                    yield pair
                    total += 1
            except _Over:  # letters yielded before are still sent and counted
                pass

        try:
            return replay(chosen, in_time(), rate, dry_run)
        except KmqError as err:
            if dry_run:
                raise
            raise RequestRefused("not_answered", f"after {total} letters: {err}; the same replay goes on") from err

    def _open(self, topic: str) -> list[Partition]:
        return [self._partitions.open(topic, number) for number in range(self._partitions.count(topic))]


def _count(found: dict[str, dict[str, Any]], reason: str, message: Any, room: int) -> int:
    """Count a letter, and keep it as an example if there is room. Returns the bytes that further examples have."""
    at = message.recv_timestamp
    row = found.setdefault(reason, {"reason": reason, "count": 0, "first_at": at, "last_at": at, "examples": []})
    row["count"] += 1
    row["first_at"], row["last_at"] = min(row["first_at"], at), max(row["last_at"], at)
    examples = row["examples"]
    examples.append(message)
    room -= message.size
    while len(examples) > _EXAMPLES or (examples and room < 0):
        room += examples.pop(0).size
    return int(room)


def _show_examples(groups: list[dict[str, Any]]) -> None:
    """Convert examples for JSON, the newest of each group first, until the answer is full."""
    size = 0
    for row in groups:
        rows: list[dict[str, Any]] = []
        for message in reversed(row["examples"]) if size < ANSWER_BYTES else ():
            one = shown(message)
            size += weight(one)
            if size > ANSWER_BYTES:
                break
            rows.append(one)
        row["examples"] = rows[::-1]


def _clock() -> Any:
    until = time.monotonic() + _REPLAY_S

    def tick() -> None:
        if time.monotonic() > until:
            raise _Over

    return tick
