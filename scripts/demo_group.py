"""The demo's second part: a group of three consumers reads what was shipped, and one of them is killed meanwhile.

Members     Processes of their own with kmq.Consumer. Each reads a batch, reports it, waits for permission, and commits.
Victim      The member that reports a batch when a third has been read. It is killed before it may commit. So that batch
            is delivered again to another member, once the victim's session has ended.
Checked     Everything that was shipped was read, and the group's lag is 0 in each partition.
"""

import json
import queue
import select
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table

import kmq
from kmq.access import tokens
from kmq.client.lines import read_port
from kmq.config.settings import Settings
from kmq.errors import KmqError, RetryError

MEMBERS = 3
SESSION_S = 6.0  # the shortest that a group allows; so long nobody reads the victim's partitions
BATCHES = 12  # at least so many, so that a member can be killed within one
MOST_BATCH = 500  # messages
READY_S = 60.0  # longest wait for the gateway, and for all three members
STALLED_S = 60.0  # nothing is read and nothing committed for this long
POLL_S = 0.05


class Shipped(NamedTuple):
    """What the group is to read: at least this many messages of these topics, all received at `since` or later."""

    run_id: str
    since: float  # seconds since the epoch
    topics: list[str]
    messages: int


# --- a member's process ------------------------------------------------------------------------------------------


def member(group: str, name: str, start: str, batch: int, topics: list[str]) -> None:
    """Read until stdin ends. The first line on stdin means begin; each further line: commit the reported batch and
    go on.
    """
    is_open = False

    def hold(places: Iterable[tuple[str, int]]) -> None:
        for place in () if is_open else places:
            with suppress(KmqError):  # it belongs to another member again
                consumer.pause(place)

    consumer = kmq.Consumer.local(
        *topics, group_id=group, member=name, start=start, session_s=SESSION_S, max_poll_records=batch, on_assign=hold
    )
    with consumer:
        while True:
            messages = consumer.poll(timeout=POLL_S)
            if messages:
                print(json.dumps(extents(messages)), flush=True)
            elif not select.select([sys.stdin], [], [], 0)[0]:
                continue
            if not sys.stdin.readline():
                return
            if messages:
                with suppress(kmq.Refused):  # its session has ended: the partition's new owner gets the batch
                    consumer.commit()
                continue
            is_open = True
            for place in consumer.paused():
                with suppress(KmqError):
                    consumer.resume(place)


def extents(messages: Iterable[Any]) -> list[tuple[str, int, int, int]]:
    """Return (topic, partition, first offset, last offset) of each partition in a batch."""
    offsets = defaultdict(list)
    for message in messages:
        offsets[message.topic, message.partition].append(message.offset)
    return [(topic, number, min(found), max(found)) for (topic, number), found in offsets.items()]


# --- the group ---------------------------------------------------------------------------------------------------


class Reading:
    """What the members have reported: how many messages of each topic were read, and how many of them again."""

    def __init__(self) -> None:
        self.read: dict[str, int] = defaultdict(int)
        self.again: dict[str, int] = defaultdict(int)
        self._next: dict[tuple[str, int], int] = {}

    def add(self, batch: list[tuple[str, int, int, int]]) -> int:
        """Add a batch; return its number of messages. A partition is read in order, so lower offsets were read
        before.
        """
        for topic, number, first, last in batch:
            reached = self._next.get((topic, number), first)
            again = max(0, min(last + 1, reached) - first)
            self.again[topic] += again
            self.read[topic] += last + 1 - first - again
            self._next[topic, number] = max(reached, last + 1)
        return sum(last + 1 - first for _, _, first, last in batch)

    @property
    def count(self) -> int:
        return sum(self.read.values())


class Member:
    """A process, and the number of messages it has read."""

    def __init__(self, name: str, command: list[str], tell: Callable[["Member", Any], None]) -> None:
        self.name, self.count = name, 0
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._thread = threading.Thread(target=self._listen, args=(self.process.stdout, tell), daemon=True)
        self._thread.start()

    def _listen(self, stdout: IO[bytes], tell: Callable[["Member", Any], None]) -> None:
        for line in stdout:
            tell(self, json.loads(line))

    def go_on(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the others read the rest
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def end(self, kill: bool = False) -> None:
        """Let the member leave the group and end, or kill it."""
        assert self.process.stdin is not None
        if kill:
            self.process.kill()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STALLED_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Group:
    """The members, and the group as the gateway shows it."""

    def __init__(self, settings: Settings, shipped: Shipped) -> None:
        self.name, self.shipped, self._settings = f"demo-{shipped.run_id}", shipped, settings
        self.reading, self.victim, self.lost = Reading(), "", 0
        self.members: list[Member] = []
        self._told: queue.Queue[tuple[Member, Any]] = queue.Queue()

    def start(self) -> None:
        since = datetime.fromtimestamp(self.shipped.since, UTC).isoformat()
        batch = str(max(1, min(MOST_BATCH, self.shipped.messages // BATCHES)))
        for number in range(1, MEMBERS + 1):
            name = f"consumer-{number}"
            command = [sys.executable, __file__, self.name, name, since, batch, *self.shipped.topics]
            self.members.append(Member(name, command, lambda *told: self._told.put(told)))
        deadline = time.monotonic() + READY_S
        while len(found := self.ask()["members"]) < MEMBERS:
            if time.monotonic() > deadline:
                raise RetryError(f"only {len(found)} of {MEMBERS} consumers joined within {READY_S:.0f} s")
            time.sleep(POLL_S)

    def ask(self) -> dict[str, Any]:
        """Return the group as in GET /api/groups/{group}; empty while it is unknown. Raises RetryError."""
        token = tokens.local(self._settings)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        port = read_port(self._settings, "http", self._settings.http_port)
        connection = HTTPConnection(self._settings.host, port, timeout=READY_S)
        try:
            connection.request("GET", f"/api/groups/{self.name}", headers=headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, HTTPException) as err:
            raise RetryError(f"the gateway does not answer: {err}") from err
        finally:
            connection.close()
        found: dict[str, Any] = json.loads(text) if response.status == 200 else {"members": [], "partitions": []}
        return found

    def read_all(self) -> None:
        """Let the members read, kill one of them, and wait until all is read, or nothing more arrives."""
        for each in self.members:
            each.go_on()
        moved = time.monotonic()
        while time.monotonic() - moved < STALLED_S:
            try:
                teller, batch = self._told.get(timeout=POLL_S)
            except queue.Empty:
                if self.is_whole and not sum(self.lags().values()):
                    return
                continue
            if not self.is_whole:  # messages from other producers do not count
                moved = time.monotonic()
            self._take(teller, batch)

    def _take(self, teller: Member, batch: list[tuple[str, int, int, int]]) -> None:
        count = self.reading.add(batch)
        if teller.name == self.victim:
            return  # reported before it died
        teller.count += count
        if not self.victim and 3 * self.reading.count >= self.shipped.messages:
            self.victim, self.lost = teller.name, count
            teller.end(kill=True)
        else:
            teller.go_on()

    @property
    def is_whole(self) -> bool:
        return self.reading.count >= self.shipped.messages

    def lags(self) -> dict[str, int]:
        """Return the lag of each topic."""
        found: dict[str, int] = dict.fromkeys(self.shipped.topics, 0)
        for row in self.ask()["partitions"]:
            found[row["topic"]] = found.get(row["topic"], 0) + row["lag"]
        return found

    def end(self) -> None:
        for each in self.members:
            each.end()


def consume(settings: Settings, shipped: Shipped, out: Console) -> bool:
    """Run the group and print what it read. Return True if that is everything. Without a gateway this part is left
    out.
    """
    group = Group(settings, shipped)
    try:
        group.ask()
    except KmqError as error:
        out.print(f"\ngroup      skipped, there is no gateway: {error}", markup=False)
        return True
    begin = time.monotonic()
    out.print(f"\ngroup      {group.name}: {MEMBERS} consumers read what was shipped, and one of them is killed")
    try:
        group.start()
        group.read_all()
        lags = group.lags()
    finally:
        group.end()
    say(group, lags, time.monotonic() - begin, out)
    return group.is_whole


def say(group: Group, lags: dict[str, int], seconds: float, out: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("topic", no_wrap=True)
    for title in ("read", "redelivered", "lag"):
        table.add_column(title, justify="right", no_wrap=True)
    for topic, lag in sorted(lags.items()):
        table.add_row(topic, *(f"{n:,}" for n in (group.reading.read[topic], group.reading.again[topic], lag)))
    out.print(table)
    counts = ", ".join(f"{each.name} {each.count:,}" for each in group.members)
    out.print(f"members    {counts} messages")
    if group.victim:
        out.print(
            f"killed     {group.victim}, before it could commit its last {group.lost:,}: others read them again when its"
            f" session of {SESSION_S:.0f} s had ended"
        )
    read, again = group.reading.count, sum(group.reading.again.values())
    result = (
        "everything that was shipped"
        if group.is_whole
        else f"NOT everything that was shipped ({group.shipped.messages:,})"
    )
    out.print(f"group      read {read:,}, {result}; redelivered {again:,}; lag {sum(lags.values()):,}; {seconds:.1f} s")


if __name__ == "__main__":
    try:
        member(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
    except (KeyboardInterrupt, KmqError) as error:
        sys.exit(f"demo: {sys.argv[2]}: {error}" if str(error) else 130)
