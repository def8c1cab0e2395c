"""What has really happened to the Broadcast Queue, noted beside it, and the promises that are checked at every step.

A timeline is a chain of messages: each knows the one before it. Restoring Consul goes back to an earlier message, from
which another chain begins, so an epoch alone does not name a message, but an id does.
"""

import re
from typing import Any, NamedTuple

from bq_code import Code
from consul_model import ConsulModel, Pair, Write

_FIELD = re.compile(r"(\w+)=(\S+)")


class Broken(AssertionError):
    """A promise of the queue does not hold."""


def demand(holds: bool, promise: str) -> None:
    if not holds:
        raise Broken(promise)


class Link(NamedTuple):
    """A message that was published. `before`: the id of the one before it in its timeline."""

    epoch: int
    before: str
    states: dict[str, bytes]  # what all messages up to it have led to


class Since(NamedTuple):
    """When a publisher has read the marks: by the wall clock when it asked, by the other when Consul answered."""

    wall: float
    run: float
    marked: dict[str, float] = {}  # by broker: when it had marked, as Consul answered


class Handler(NamedTuple):
    """Who has finished an item. `head`: the last message when it was read; `previous`: the epoch of the item before."""

    name: str
    session: str
    head: str
    previous: int | None


class Broker:
    """What the handler of one broker has really finished."""

    def __init__(self) -> None:
        self.covered = {""}  # ids that were processed, or skipped by a snapshot; "": before the first message
        self.states: dict[str, bytes] = {}
        self.put_back: dict[str, str] = {}  # states, and who has changed them last though it had lost its place
        self.furthest = 0
        self.last = ""
        self.is_healed = True  # since the last restore of Consul
        self.noticer = ""  # the process that must notice it


def fields(value: bytes) -> dict[str, str]:
    return dict(_FIELD.findall(value.partition(b"\n")[0].decode()))


class Ghost:
    """The history, and the judge of each write."""

    def __init__(self, code: Code, consul: ConsulModel, keys: Any) -> None:
        self._code, self._consul, self._keys = code, consul, keys
        self.links = {"": Link(0, "", {})}
        self.head = ""  # the last message
        self.told: dict[str, str] = {}  # by id: what its publisher was told
        self.brokers = {"b1": Broker(), "b2": Broker()}
        self._journal: list[Write] = []
        self.locked_at: dict[str, float] = {}  # by clock.monotonic()
        self.held: set[tuple[str, str]] = set()  # which session has had which lock

    # --- what is written ----------------------------------------------------------------------------------------------

    def judge(self, journal: list[Write], session: str, trim_since: Since) -> None:
        """Check what one request has written. `session`: of its sender."""
        self._journal = journal
        keys, root = self._keys, self._keys.root
        messages = [write for write in journal if write.key.startswith(keys.messages) and write.after is not None]
        epochs = [write for write in journal if write.key == keys.epoch]
        states = [write for write in journal if write.key.startswith((root + "topics/", root + "settings/"))]
        demand(len(messages) == len(epochs) and len(epochs) < 2, "epoch and message are written together")
        demand(not states or bool(epochs), "a state key is written with its message")
        if epochs:
            self._published(epochs[0], messages[0], states, session)
        for write in journal:
            if write.key.startswith(keys.messages) and write.after is None:
                self._deleted(write, session, trim_since)
            elif write.key.startswith(keys.delivered) and write.after is None:
                self._forgotten(write, session, trim_since)
            elif write.key.startswith(keys.delivered):
                self._marked(write, session)
            elif write.after is not None and write.after.session and (write.before is None or not write.before.session):
                self.locked_at[write.key] = self._code.clock.monotonic()
                self.held.add((write.key, write.after.session))

    def _published(self, epoch: Write, message: Write, states: list[Write], session: str) -> None:
        self._holds(self._keys.coordinator, session, "only the holder of the lock publishes")
        assert epoch.after is not None and message.after is not None
        number, id = int(epoch.after.value), fields(message.after.value)["id"]
        demand(
            number == self.links[self.head].epoch + 1, f"epochs are dense: {number} after {self.links[self.head].epoch}"
        )
        demand(message.key == self._keys.message(number), f"the message of epoch {number} lies under {message.key}")
        demand(message.before is None, f"epoch {number} names one message for ever")
        demand(id not in self.ancestors(self.head), f"message {id} is under one epoch")
        demand(self.told[id] not in ("refused", "published"), f"message {id} was {self.told[id]}, and is published now")
        values = dict(self.links[self.head].states)
        for write in states:
            assert write.after is not None
            demand(int(write.after.value) == int(write.before.value if write.before else b"0") + 1, "no update is lost")
            values[write.key.removeprefix(self._keys.root)] = write.after.value
        promised = [line.split(b"=", 1) for line in message.after.value.split(b"\n")[1:] if b"=" in line]
        written = {write.key.removeprefix(self._keys.root): write.after.value for write in states if write.after}
        demand({key.decode(): value for key, value in promised} == written, "a message's changes are made with it")
        same = self.links.get(id, Link(0, "", {}))
        demand(same.epoch != number or same.before == self.head, f"{number} {id} stands for one history")
        self.links[id] = Link(number, self.head, values)
        self.head = id

    def _holds(self, key: str, session: str, promise: str) -> None:
        """Demand that the sender holds a lock, or has taken it and given it back in this request."""
        lock = self._consul.state.pairs.get(key)
        taken = [write.after for write in self._journal if write.key == key and write.after is not None]
        demand(session != "" and any(pair is not None and pair.session == session for pair in (lock, *taken)), promise)

    def _marked(self, write: Write, session: str) -> None:
        broker = write.key.removeprefix(self._keys.delivered)
        self._holds(self._keys.subscriber(broker), session, f"only the subscriber of {broker} marks")
        assert write.after is not None
        mark = fields(write.after.value)
        epoch, id = int(mark["epoch"]), mark.get("id", "")
        before = fields(write.before.value) if write.before is not None else {}
        if before.get("id", "") in self.ancestors(self.head):
            demand(epoch >= int(before["epoch"]), f"{broker} marks {epoch} after {before['epoch']}")
        if not id:  # after a snapshot that does not tell it
            demand(epoch <= self.brokers[broker].furthest, f"{broker} marks {epoch}, which was not processed")
            return
        demand(id in self.brokers[broker].covered, f"{broker} marks {epoch} id={id}, which was not processed")
        demand(self.links[id].epoch == epoch, f"{broker} marks epoch {epoch} with the id of {self.links[id].epoch}")

    def _forgotten(self, write: Write, session: str, since: Since) -> None:
        """A mark is deleted: that of a broker which was away for long, and has not marked since that was seen."""
        self._holds(self._keys.coordinator, session, "only the holder of the lock deletes")
        name, before = write.key.removeprefix(self._keys.delivered), write.before
        marked = float(fields(before.value).get("ts", 0)) if before is not None else 0.0
        place = self._consul.state.pairs.get(self._keys.subscriber(name), Pair(b"", 0, 0))
        came_back = self.locked_at.get(self._keys.subscriber(name), 0.0) >= since.run
        demand(not place.session or came_back, f"{name} is there, and its mark is deleted")
        demand(marked == since.marked.get(name), f"{name} has marked meanwhile, and that is deleted")
        is_gone = abs(since.wall - marked) >= self._code.publisher.GONE_S
        demand(is_gone, f"{name} was here not long ago, and its mark is deleted")

    def _deleted(self, write: Write, session: str, since: Since) -> None:
        self._holds(self._keys.coordinator, session, "only the holder of the lock deletes")
        epoch, pairs = int(write.key.rpartition("/")[2]), self._consul.state.pairs
        demand(epoch < self.links[self.head].epoch, "the last message is never deleted")
        id = next(id for id in self.ancestors(self.head) if self.links[id].epoch == epoch)
        for key, pair in pairs.items():
            # A mark of a message that Consul has lost since: the broker sees that, and a snapshot follows.
            is_of_another = fields(pair.value).get("id", self.head) not in self.ancestors(self.head)
            if key.startswith(self._keys.delivered) and not is_of_another:
                name = key.removeprefix(self._keys.delivered)
                is_absent = abs(since.wall - since.marked.get(name, 0.0)) >= self._code.publisher.ABSENT_S
                place = pairs.get(self._keys.subscriber(name), Pair(b"", 0, 0))
                came_back = self.locked_at.get(self._keys.subscriber(name), 0.0) >= since.run
                is_new = name not in since.marked
                if not is_new and (not is_absent or (place.session and not came_back)):
                    demand(id in self.brokers[name].covered, f"{epoch} is deleted, and {name} has not processed it")
        there = sum(1 for key in pairs if key.startswith(self._keys.messages))
        demand(there >= 1, "a message is there")

    def marked(self) -> dict[str, float]:
        """Return when each broker has marked, as it says itself."""
        under, pairs = self._keys.delivered, self._consul.state.pairs
        return {
            key.removeprefix(under): float(fields(pair.value).get("ts", 0))
            for key, pair in pairs.items()
            if key.startswith(under)
        }

    def ancestors(self, id: str) -> list[str]:
        """Return this message and all before it."""
        chain = []
        while id:
            chain.append(id)
            id = self.links[id].before
        return chain

    # --- what publishers and handlers say -----------------------------------------------------------------------------

    def entered(self, key: str, session: str) -> None:
        demand((key, session) in self.held, f"{key} is taken only by who gets its lock")

    def returned(self, id: str, epoch: int) -> None:
        demand(id in self.links, f"publish returned {epoch}, and message {id} was never there")
        demand(self.links[id].epoch == epoch, f"publish returned {epoch}; message {id} is {self.links[id].epoch}")
        self.told[id] = "published"

    def failed(self, id: str, is_known: bool) -> None:
        """The publisher was told that its message is not there; unless `is_known`, that nobody knows.

        Only what Consul has now counts: a restore to just before the message has undone it.
        """
        is_there = id in self.ancestors(self.head)
        demand(not is_known or not is_there, f"message {id} is there, and its publisher was told that it is not")
        self.told[id] = "refused" if is_known else "unknown"

    def came_back(self, name: str, process: str) -> None:
        """A process is the subscriber of this broker again: what it has put back, it has to put right."""
        put_back = self.brokers[name].put_back
        for key in [key for key, who in put_back.items() if who == process]:
            del put_back[key]

    def handled(self, name: str, item: Any, by: Handler) -> None:
        """The handler has finished `item`."""
        broker, head, previous = self.brokers[name], by.head, by.previous
        before = dict(broker.states)
        is_snapshot = isinstance(item, self._code.subscriber.Snapshot)
        if is_snapshot:
            link = self.links[head]
            demand(item.epoch == link.epoch, f"a snapshot says {item.epoch} at epoch {link.epoch}")
            demand(item.states == link.states, f"the snapshot of {item.epoch} holds {item.states}, not {link.states}")
            broker.covered.update(self.ancestors(head))
            broker.states, broker.last = dict(item.states), head
            broker.is_healed, broker.noticer = True, ""
        else:
            link = self.links[item.id]
            demand(link.epoch == item.epoch, f"message {item.id} is handed out as {item.epoch}, it is {link.epoch}")
            demand(link.before in broker.covered, f"{name} gets {item.epoch}, and has not processed {link.epoch - 1}")
            demand(previous is None or item.epoch == previous + 1, f"{name} gets {item.epoch} after {previous}")
            broker.covered.add(item.id)
            broker.states.update(changes_of(item.payload))
            broker.last = item.id
        broker.furthest = max(broker.furthest, item.epoch)
        changes = item.states if is_snapshot else changes_of(item.payload)
        place = self._consul.state.pairs.get(self._keys.subscriber(name))
        for key in changes if not is_snapshot else {*changes, *before}:
            if place is not None and place.session == by.session:
                broker.put_back.pop(key, None)
            elif broker.states.get(key) != before.get(key):
                broker.put_back[key] = by.name


def changes_of(payload: bytes) -> dict[str, bytes]:
    """Return the states that a message says."""
    return {
        key.decode(): value for key, value in (line.split(b"=", 1) for line in payload.split(b"\n") if b"=" in line)
    }
