"""The topics in force, the deleted topics, and the limits of each topic; and the context that all parts share.

Example: after `in_force.put(topic)` for topic orders, `in_force.has("orders")` is True, and lines with the routing key
`orders.eu` are routed to its partitions.

Owner       the router process. Only this module puts a topic in force or takes it out of force.
Invariant   `table` is always the same object, so the sorter may keep a reference. After the table has changed, cached
            routes are cleared before the next line is routed. If older releases would route a topic's records
            differently, `format` makes these releases refuse the directory before the topic is in force.
Crash       In memory only. A start loads it from topic.toml, router.ckpt and deletions.
"""

from collections.abc import Callable, Iterable, Sequence

from kmq.errors import ConfigError
from kmq.files import WaitForRoom, replace_file, with_room
from kmq.log import deletions, gaps, identity, topic_changes, topics
from kmq.log.damage import DamageError
from kmq.log.gaps import Forks, Gap
from kmq.log.partition import PartitionState
from kmq.log.segment import Limits
from kmq.logfmt import Logger
from kmq.message.routing import Table, Topic


class Context:
    """What all parts of the router share, so that no part needs another part just to wait or to log."""

    __slots__ = (
        *("_make_room", "are_recorded", "check", "damaged", "data", "has_room", "has_store", "in_shard", "lacks_room"),
        *("logger", "now_s", "recount", "shortage", "wait_outside", "wal_is_synced"),
    )

    def __init__(
        self,
        data: str,
        wait_for_room: WaitForRoom,
        logger: Logger,
        wal_is_synced: bool,
        are_recorded: bool,
        in_shard: bool,
        damaged: Callable[[DamageError], object],
        check: Callable[[], None],
        lacks_room: Callable[[], bool],
        has_room: Callable[[int], bool],
        now_s: Callable[[], float],
        make_room: Callable[[], object],
        shortage: Callable[[], int],
        recount: Callable[[], object],
        has_store: bool,
    ) -> None:
        """Take the stage's arguments (see Queues), and `make_room`, which is called while the disk is full."""
        self.data, self.logger, self.wal_is_synced, self.in_shard = data, logger, wal_is_synced, in_shard
        self.wait_outside, self.are_recorded, self.damaged = wait_for_room, are_recorded, damaged
        self.check, self.lacks_room, self.has_room = check, lacks_room, has_room
        self.now_s, self._make_room, self.shortage, self.recount = now_s, make_room, shortage, recount
        self.has_store = has_store

    def wait_for_room(self, path: str) -> None:
        """Make room, then wait, because the disk is full. May be called in the middle of an append."""
        self._make_room()
        self.wait_outside(path)

    def replace(self, path: str, content: bytes) -> None:
        """Replace a file, waiting for room while the disk is full."""
        with_room(path, self.wait_for_room, lambda: replace_file(path, content))


class TopicsInForce:
    """The table of topics, with their limits."""

    def __init__(self, context: Context, limits: Limits, forget_routes: Callable[[], None]) -> None:
        """Begin without topics.

        `limits`: from the settings, for every topic without limits of its own. `forget_routes` clears the cached routes.
        """
        self._context, self.default_limits, self._forget_routes = context, limits, forget_routes
        self.table = Table()  # with the deleted topics
        self.deleted = deletions.Deleted.of(context.data)
        self._forks = gaps.forks(context.data)
        self._own_limits: dict[str, Limits] = {}

    @property
    def count(self) -> int:
        """Return the number of topics in force."""
        return sum(not topic.is_gone for topic in self.table.values())

    def load(self, found: Iterable[Topic]) -> None:
        """Load the table with these topics and the deleted topics."""
        self.table.clear()
        self.table.marks_from = identity.marks_from(self._context.data)
        self.table.update((name.encode(), Topic.gone(name, lives)) for name, lives in self.deleted.lives.items())
        for topic in found:
            self.put(topic)

    def put(self, topic: Topic) -> None:
        """Put a topic in force, from its `from_seq` on."""
        self.raise_format_for(topic)
        topic.lives = self.deleted.lives.get(topic.name, ())
        self.table[topic.name.encode()] = topic
        self._forget_routes()

    def raise_format_for(self, topic: Topic) -> None:
        """Raise the directory's format if older releases would route records of this topic to other partitions."""
        if topic.is_rerouted:
            self.raise_format(identity.ROUTED, topic, "its partitioner or its growth")

    def raise_format(self, number: int, topic: Topic, what: str) -> None:
        """Raise the directory's format to this version, so that releases that do not know `what` do not open it."""
        if text := identity.raised_text(self._context.data, number):
            self._context.replace(f"{self._context.data}/format", f"{text}\n".encode())
            effect = f"releases that do not know {what} do not open the directory any more"
            self._context.logger.info("format_raised", to=number, topic=topic.name, effect=effect)

    def forget(self, topic: Topic) -> None:
        """Take a deleted topic out of force."""
        name = topic.name.encode()
        self._own_limits.pop(topic.name, None)
        del self.table[name]
        if topic.name in self.deleted.lives:
            self.table[name] = Topic.gone(topic.name, self.deleted.lives[topic.name])
        self._forget_routes()

    def has(self, name: str) -> bool:
        """Return True if a topic of this name is in force."""
        topic = self.table.get(name.encode())
        return topic is not None and not topic.is_gone

    def first_state(self, name: str, partition: int) -> PartitionState:
        """Return the state of a partition without records.

        It continues where a deleted partition of its name ended, and after a fork where no lost partition has ended.
        """
        first = self.deleted.first_offset(name, partition)
        if forks := self.forks_of(name):
            topic = self.table.get(name.encode())
            born = identity.NEVER if topic is None or topic.is_gone else topic.exists_since(partition)
            least = gaps.least_offset(forks, name, born)
            if least > first:
                state = PartitionState(least, 0, 0, least)
                state.gaps = (Gap(first, least),)
                return state
        return PartitionState(first, 0, 0, first)

    def forks_of(self, name: str) -> Forks:
        """Return the forks after which the partitions of a topic have a gap."""
        return gaps.forks_of(self._forks, name)

    def limits_of(self, name: str) -> Limits:
        if name == topic_changes.TOPIC:  # it has what retention took from the WAL
            return Limits(self.default_limits.segment_bytes, self.default_limits.segment_age)
        return self._own_limits.get(name, self.default_limits)

    def has_own_limits(self, name: str) -> bool:
        return name in self._own_limits

    def set_default_limits(self, limits: Limits) -> None:
        """Use other limits for every topic without limits of its own."""
        self.default_limits = limits
        for name in [*self._own_limits]:
            self.set_limits(name, topics.read(self._context.data, name))

    def set_limits(self, name: str, declared: topics.Declaration) -> None:
        """Use the limits that a topic declares instead of the settings."""
        try:
            limits = self.default_limits.with_changes(declared.limits)
            if declared.limits or name in self._own_limits:
                self._own_limits[name] = limits
        except ConfigError as err:
            path = topics.toml_path(self._context.data, name)
            self._context.logger.warn("topic_limits_ignored", file=path, reason=err)

    def write_deletions(self, all_deletions: Sequence[deletions.Deletion]) -> None:
        """Replace the list of all deletions; it is on disk when this returns."""
        wait = self._context.wait_for_room
        deletions.write(self._context.data, all_deletions, lambda path, action: with_room(path, wait, action))
        self.deleted = deletions.Deleted(all_deletions)
