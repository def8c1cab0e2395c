"""`kmq consume` and `kmq tail`: print the messages of a topic, once or as they arrive.

Commits     With --group the offsets are committed when the messages were written to stdout, at most a second later and
            at the end. Messages that a reader such as `head` has left unread in the pipe count as written.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import quote

import typer

from kmq.cli.elsewhere import ask, elsewhere, unknown_topic
from kmq.cli.output import examples, grouped
from kmq.client.consumer_options import logger, to_topic
from kmq.client.lines import STALL_S, say
from kmq.config import terminal
from kmq.config.settings import load
from kmq.errors import ConfigError, CorruptError, KmqError, RetryError
from kmq.log import gaps, topics
from kmq.log.partition import directory_of
from kmq.sending.failures import Refused
from kmq.wire.refusals import RETRYABLE

if TYPE_CHECKING:
    from kmq.client.consumer import Consumer
    from kmq.client.consumer_options import ConsumerChoices, Start
    from kmq.message.message import Message
    from kmq.wire.requests import TopicPartition

_POLL_S = 0.5  # longest wait before the next check for something to report on the terminal
_BLOCK = 5000  # messages written at once
_COMMIT_S = 1.0  # longest time between printing and committing
_COME_UP_S = 60.0  # with --follow: longest wait at the start for a broker that is down
_GIVE_UP_S = 10.0  # without --follow: longest wait for a broker that has just gone away

_TOPIC = Annotated[str, typer.Argument(help="The topic to read.", show_default=False)]
_JSON = Annotated[
    bool,
    typer.Option(
        "--json", help="One JSON object a line: topic, partition, offset, seq, timestamp, key, value, headers."
    ),
]


class ReadingOptions(NamedTuple):
    """What is read, and until when."""

    group: Annotated[
        str, typer.Option("--group", "-g", help="Read as a member of this group, and commit what was printed.")
    ] = ""
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="earliest, latest, an offset, or a time: 10m (ago), 2026-11-23T12:00. With --group it counts only"
            " where nothing is committed. \\[default: earliest; latest with --follow and no group]",
        ),
    ] = ""
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more at the end, until Ctrl-C.")] = False
    most: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many messages; 0: no limit.")] = 0


@grouped
def consume(topic: _TOPIC, reading: ReadingOptions, as_json: _JSON = False) -> None:
    """Print the values of a topic's messages, one a line.

    Without --follow the command ends where the topic ended when it began. From a broker elsewhere: kmq --host <host> consume …
    """
    topic = to_topic(topic, "kmq consume")
    start = reading.start or ("latest" if reading.follow and not reading.group else "earliest")
    _require(topic, reading.follow)
    printer = _Printer(_json if as_json else _value)
    with _open(topic, printer, group_id=reading.group, start=parse_start(start)) as consumer:
        printer.print(consumer, reading)


def tail(
    topic: _TOPIC,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="The last messages of each partition.")] = 10,
    as_json: _JSON = False,
) -> None:
    """Print the last messages of a topic with place, time and key, and then those that come, until Ctrl-C."""
    places = _require(to_topic(topic, "kmq tail"), follows=True)
    printer = _Printer(_json if as_json else _row)
    with _open(topic, printer, start="latest") as consumer:
        if places:
            _rewind(consumer, topic, count)
        printer.print(consumer, ReadingOptions(follow=True))


def parse_start(text: str) -> "Start":
    """Return a position in the form of kmq.Consumer. Raises ConfigError."""
    from kmq.log.show import parse_time

    if text in ("earliest", "latest") or text.isdecimal():
        return text
    try:
        return datetime.fromtimestamp(parse_time(text) / 1e6, UTC)
    except (ConfigError, OverflowError, OSError, ValueError):
        raise ConfigError(
            f"--from {text!r}: must be earliest, latest, an offset, or a time such as 10m or 2026-11-23T12:00"
        ) from None


def _open(topic: str, printer: "_Printer", group_id: str = "", start: "Start" = "earliest") -> "Consumer":
    from kmq.client.consumer import Consumer

    def give_up(_: object) -> None:
        printer.commit()

    options: ConsumerChoices = {"group_id": group_id, "start": start, "max_poll_records": _BLOCK}
    if (there := elsewhere()) is None:
        return Consumer.local(topic, on_revoke=give_up, **options)
    options |= {"token": there.token, "tls": there.tls}
    return Consumer(topic, host=there.host, port=there.lines_out, on_revoke=give_up, **options)


def _require(topic: str, follows: bool) -> int:
    """Return the number of partitions. Raises RetryError without a broker, ConfigError without a topic."""
    places = _awaited_partitions(topic) if follows else _partitions(topic)
    if not places and not follows:
        raise unknown_topic(topic)
    if not places:
        say(f"{topic}: no such topic yet; waiting for its first message")
    return len(places)


def _partitions(topic: str) -> "list[TopicPartition]":
    """Return a topic's partitions; [] if it does not exist. Raises RetryError or ConfigError without a broker."""
    from kmq.client.connection import ServerAddress, local_consumer_address
    from kmq.client.consumer_calls import discover
    from kmq.client.lines import no_connection

    there = elsewhere()
    server = local_consumer_address() if there is None else ServerAddress(there.host, there.lines_out, there.token)
    try:
        return list(
            discover([topic], server.host, server.port, server.token, None if there is None else there.tls, None)
        )
    except OSError as err:
        reason = no_connection(str(server), err)
        raise RetryError(reason.replace("broker up?", "broker up, with its gateway? (kmq status)")) from err


def _awaited_partitions(topic: str) -> "list[TopicPartition]":
    """Do the same, but wait for a broker that is not up yet, and report that. Raises the last error after
    _COME_UP_S.
    """
    load()  # do not wait if the settings are wrong
    deadline, has_said = time.monotonic() + _COME_UP_S, False
    while True:
        try:
            places = _partitions(topic)
        except (RetryError, ConfigError, Refused) as err:
            is_lasting = isinstance(err, Refused) and err.code not in RETRYABLE
            if is_lasting or time.monotonic() > deadline:
                raise
            if not has_said:
                say(f"waiting, at most {_COME_UP_S:g} s: {err}")
            has_said = True
            time.sleep(_POLL_S)
        else:
            if has_said:
                say("goes on")
            return places


def _rewind(consumer: "Consumer", topic: str, count: int) -> None:
    """Seek back by `count` records in every partition."""
    places = consumer.connect(_GIVE_UP_S)
    ends, starts = consumer.end_offsets(places), consumer.beginning_offsets(places)
    found = _gaps(topic)
    for place in places:
        consumer.seek(place, max(starts[place], gaps.back(found.get(place.partition, ()), ends[place], count)))


def _gaps(topic: str) -> dict[int, gaps.Gaps]:
    """Return the gaps of the topic's partitions by number; {} if the broker does not show them to this client."""
    data = load().data
    if elsewhere() is None:
        numbers = range(topics.read(data, topic).partitions) if os.path.isdir(f"{data}/topics/{topic}") else ()
        return {number: gaps.read(directory_of(data, topic, number)) for number in numbers}
    try:
        rows = ask("GET", f"/api/admin/topics/{quote(topic)}")["partitions"]
    except KmqError:
        return {}
    return {row["partition"]: tuple(gaps.Gap(*each) for each in row.get("gaps", ())) for row in rows}


# --- how a message looks ---------------------------------------------------------------------------------------------


def _value(message: "Message") -> bytes:
    return (message.value or b"") + b"\n"


def _json(message: "Message") -> bytes:
    return json.dumps(message.as_dict(text=True), ensure_ascii=False).encode(errors="replace") + b"\n"


def _row(message: "Message") -> bytes:
    at = datetime.fromtimestamp(message.timestamp).astimezone().isoformat(" ", "milliseconds")
    key = "-" if message.key is None else message.key.decode(errors="replace")
    return f"{at} {message.partition} {message.offset} {key} ".encode() + _value(message)


# --- until when ------------------------------------------------------------------------------------------------------


class _Session:
    """Reads until the end, the count, or until the reader of stdout is gone."""

    def __init__(self, consumer: "Consumer", reading: ReadingOptions) -> None:
        self._consumer, self._reading = consumer, reading
        self._left = reading.most
        self._ends: dict[TopicPartition, int] = {}
        self._moved = time.monotonic()
        self._waits_for = ""
        self._is_over = False
        logger().addFilter(lambda record: record.levelno != logging.WARNING)  # `_look` says what it waits for
        terminal.when_left(self._end)

    def _end(self) -> None:
        self._is_over = True

    def __iter__(self) -> Iterator[list["Message"]]:
        while terminal.is_read() and not self._is_over:
            messages = self._consumer.poll(min(self._left or _BLOCK, _BLOCK), timeout=_POLL_S)
            yield messages  # also an empty list: the caller then commits what was written
            self._left -= len(messages) if self._left else 0
            if self._reading.most and not self._left:
                return
            self._look(bool(messages))
            if not self._reading.follow and self._is_at_end(bool(messages)):
                if damaged := self._consumer.paused():
                    raise CorruptError(f"{', '.join(map(str, damaged))}: damaged, so not all of it was read; see above")
                return

    def _is_at_end(self, has_more: bool) -> bool:
        """Return True if every partition was read up to the end that it had when it was first seen, or to its damage.

        `has_more`: the last poll had messages, so more may wait before the damage.
        """
        consumer = self._consumer
        places, damaged = consumer.assignment(), [] if has_more else consumer.paused()
        try:
            if new := [place for place in places if place not in self._ends and place not in damaged]:
                ends, found = consumer.end_offsets(new, _GIVE_UP_S), _gaps(new[0].topic)
                # no record after a gap at the end brings the position there
                self._ends |= {place: gaps.before(found.get(place.partition, ()), end) for place, end in ends.items()}
        except Refused as err:
            if err.code != "damaged":
                raise
            return False  # the consumer will get the error too
        return bool(places) and all(
            place in damaged or consumer.position(place, _GIVE_UP_S) >= self._ends[place] for place in places
        )

    def _look(self, has_moved: bool) -> None:
        """Report what the command waits for, unless it only waits for the next message."""
        consumer, now = self._consumer, time.monotonic()
        if has_moved or (consumer.connected and consumer.assignment()):
            if self._waits_for:
                say("goes on")
            self._moved, self._waits_for = now, ""
        elif now - self._moved > STALL_S and not self._waits_for:
            self._waits_for = consumer.describe()
            say(f"waiting: {self._waits_for}")
        if not self._reading.follow and not consumer.connected and now - self._moved > _GIVE_UP_S:
            raise RetryError(f"gave up after {_GIVE_UP_S:g} s: {consumer.describe()}")


class _Interrupts:
    """Lets Ctrl-C end the command only after messages were written, so that they can be committed; a second one ends
    it now.
    """

    def __init__(self) -> None:
        self._is_writing = self._is_due = False
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        if not self._is_writing or self._is_due:
            raise KeyboardInterrupt
        self._is_due = True

    @contextmanager
    def after_writing(self) -> Iterator[None]:
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
        if self._is_due:
            raise KeyboardInterrupt


class _Printer:
    """Writes messages to stdout, and commits what was written."""

    def __init__(self, shown: Callable[["Message"], bytes]) -> None:
        self._shown = shown
        self._written: dict[tuple[str, int], int] = {}  # next offsets, not committed yet
        self._again: list[Message] = []  # redelivered and written; each is committed alone
        self._consumer: Consumer | None = None

    def print(self, consumer: "Consumer", reading: ReadingOptions) -> None:
        self._consumer, out, committed_at = consumer, sys.stdout.buffer, time.monotonic()
        interrupts = _Interrupts()
        try:
            for messages in _Session(consumer, reading):
                with interrupts.after_writing():
                    if messages:
                        out.write(b"".join(map(self._shown, messages)))
                        out.flush()
                    if reading.group and terminal.is_read():
                        self._again += [message for message in messages if message.deliveries > 1]
                        self._written.update(
                            ((message.topic, message.partition), message.offset + 1)
                            for message in messages
                            if message.deliveries == 1
                        )
                if time.monotonic() - committed_at >= _COMMIT_S:
                    self.commit()
                    committed_at = time.monotonic()
        finally:
            self.commit()

    def commit(self) -> None:
        """Commit what was written. Partitions that now belong to another member are not committed; it prints them
        again.
        """
        written, self._written, again, self._again = self._written, {}, self._again, []
        if self._consumer is None:
            return
        try:
            for message in again:
                self._consumer.commit(message)
            if written:
                self._consumer.commit(written)
        except Refused as refused:
            if refused.code != "fenced":
                raise
            say(f"not committed, so another member prints it again: {refused.reason}")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(
        epilog=examples(
            "kmq consume test --count 3",
            "kmq consume test --json | head -n 1",
            "kmq consume test --from 10m --json",
            "kmq consume test --group report --count 2",
        )
    )(consume)
    app.command(epilog=examples("kmq tail test | head -n 1", "kmq tail test --count 100 --json | head -n 1"))(tail)
