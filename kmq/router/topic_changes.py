"""Changes under topics/ while the router runs: new declarations, and requests to set limits, to grow or to delete.

Owner       the router process: commands only submit declarations and requests (kmq/log/requests.py).
Invariant   A deleted topic's last seq is on disk in `deletions` before any of its files is removed, and no record after
            that seq is in the deleted queue. A grown topic's first seq with more partitions is on disk in topic.toml
            before a record is routed by it. A request is removed after it was carried out.
Crash       A request that was carried out may be carried out again: that changes nothing. Between `deletions` and the
            removal of the directory, the next start removes it (`finish_deletions`). Between topic.toml and the new
            partitions, the next start makes them (declarations.py).
"""

import os
import time
from collections.abc import Callable

from kmq.errors import ConfigError
from kmq.log import deletions, requests, topics
from kmq.log.disk import sync_file
from kmq.router.checkpoints import Checkpoints
from kmq.router.context import Context
from kmq.router.declarations import Declarations
from kmq.router.in_force import TopicsInForce
from kmq.router.logs import Logs
from kmq.router.sorting import Sorter
from kmq.routing import Topic

_COARSE_NS = 50_000_000  # two changes of a directory within this time may have the same mtime


class TopicChanges:
    """Carries out requests, and adopts new declarations."""

    def __init__(
        self,
        context: Context,
        in_force: TopicsInForce,
        logs: Logs,
        declarations: Declarations,
        sorter: Sorter,
        checkpoints: Checkpoints,
    ) -> None:
        self._context, self._in_force, self._logs = context, in_force, logs
        self._declarations, self._sorter, self._checkpoints = declarations, sorter, checkpoints
        self.retain: Callable[[], None] = lambda: None  # seals and deletes what is over its limits, at once
        self._read_mtime = 0  # mtime of topics/ when it was last read

    def carry_out(self) -> None:
        """Carry out new requests, and put new declarations in force from the next seq on."""
        data = self._context.data
        mtime = os.stat(f"{data}/topics").st_mtime_ns
        if mtime == self._read_mtime:
            return
        self._read_mtime = mtime if abs(time.time_ns() - mtime) > _COARSE_NS else 0
        for request in requests.waiting(data):
            self._carry_out(request)
        for name in topics.names(data):
            if not self._in_force.has(name) and name.encode() not in self._sorter.newcomers:
                self._adopt(name)

    def _adopt(self, name: str) -> Topic:
        return self._declarations.adopt(name, self._sorter.sorted_seq + 1)

    def _carry_out(self, request: requests.Request) -> None:
        try:
            if request.verb == requests.SET:
                self._set_limits(request.topic, request.limits)
            elif request.verb == requests.GROW:
                self._grow(request.topic, int(request.limits["partitions"]))
            elif request.verb == requests.DELETE:
                self._delete(request.topic)
            elif request.verb == requests.RETAIN:
                self.retain()
            else:
                raise ConfigError(f"unknown request {request.verb!r}")
        except (ConfigError, LookupError, ValueError) as err:
            self._context.logger.warn("request_refused", file=request.path, topic=request.topic, reason=err)
        request.remove()

    def _topic_of(self, name: str) -> Topic:
        """Return the topic in force that a request names. Raises ConfigError if there is none."""
        if name in topics.names(self._context.data) and not self._in_force.has(name):
            self._sorter.make_topics()
            if not self._in_force.has(name):  # declared since the last look
                return self._adopt(name)
        if not self._in_force.has(name):
            raise ConfigError(f"topic {name!r} does not exist")
        return self._in_force.table[name.encode()]

    def _set_limits(self, name: str, changes: dict[str, str]) -> None:
        """Change the limits in a topic's file and of its logs. Raises ConfigError if a limit is invalid."""
        topic = self._topic_of(name)
        path = topics.toml_path(self._context.data, name)
        with open(path, encoding="utf-8") as file:
            text = topics.with_limits(file.read(), changes)
        declared = topics.parse(text)
        limits = self._in_force.default_limits.with_changes(declared.limits)
        self._context.replace(path, text.encode())
        self._in_force.set_limits(name, declared)
        for log in self._logs.of_topic(topic):
            self._logs.use(log)
            log.set_limits(limits, int(self._context.now_s() * 1e6))
            self._logs.unsynced.add(log)
        texts = {limit: value or "unset" for limit, value in changes.items()}
        self._context.logger.info("topic_limits_set", topic=name, **texts)

    def _grow(self, name: str, partitions: int) -> None:
        """Give a topic more partitions from the next seq on. Raises ConfigError if that cannot be."""
        self._sorter.make_topics()  # waiting lines may be of this topic, and older than the seq written below
        topic, data = self._topic_of(name), self._context.data
        topics.check_growth(data, name, topic.partitions, partitions)
        if partitions == topic.partitions:  # carried out before a kill
            return
        self._sync_wal()
        next_seq = self._sorter.sorted_seq + 1
        grown = Topic(
            name, partitions, topic.from_seq, (), [*topic.grown, (next_seq, topic.partitions)], topic.partitioner
        )
        path = topics.toml_path(data, name)
        with open(path, encoding="utf-8") as file:
            text = topics.with_growth(file.read(), grown)
        self._context.replace(path, text.encode())
        self._in_force.put(grown)
        self._logs.relink(grown)
        removed = [f"{name}.log"] if topics.drop_single_link(data, grown) else []
        self._logs.unsynced.update(self._logs.of_topic(grown))
        if not self._checkpoints.is_busy:  # else the next one, because there is something to sync
            self._checkpoints.start()  # it has a second copy of the growth
        self._context.logger.info(
            "topic_grown", topic=name, partitions=partitions, from_seq=next_seq, removed=",".join(removed) or "none"
        )

    def _sync_wal(self) -> None:
        """Sync the WAL, or after a power cut other records could get the seqs up to which all is sorted."""
        if not self._context.wal_is_synced:
            sync_file(os.path.realpath(f"{self._context.data}/append.log"))

    def _delete(self, name: str) -> None:
        """Delete a topic with all its records, for good. Raises ConfigError if there is no such topic."""
        topic, data = self._topic_of(name), self._context.data
        self._sorter.make_topics()  # waiting lines may be older than the last seq written below
        self._checkpoints.finish()  # a running checkpoint syncs files by name, which are about to go
        last_seq = self._sorter.sorted_seq
        ends = [log.state.end_offset for log in self._logs.of_topic(topic)]
        all_deletions = deletions.read(data)
        has_had_records = topic.from_seq <= last_seq
        if has_had_records:
            self._sync_wal()
            deletion = deletions.Deletion(name, topic.from_seq, last_seq, deletions.now(), ends)
            self._in_force.write_deletions([*all_deletions, deletion])
        self._forget(topic)
        if not has_had_records:  # no seq distinguishes it from a later topic of its name
            self._checkpoints.start()
            self._checkpoints.finish()
        deletions.remove_files(data, topic, self._context.check)
        if not has_had_records:
            # The content is unchanged, but its new mtime makes the framer read the topics again.
            self._in_force.write_deletions(all_deletions)
        self._context.logger.info(
            "topic_deleted", topic=name, from_seq=topic.from_seq, last_seq=last_seq, messages=sum(ends)
        )

    def _forget(self, topic: Topic) -> None:
        self._logs.forget(topic)
        self._checkpoints.forget(topic)
        self._in_force.forget(topic)

    def finish_deletions(self) -> None:
        """Remove what a kill has left of deleted topics; call at a start, before anything else."""
        data = self._context.data
        all_deletions = deletions.read(data)
        if deletions.faults(data):
            self._in_force.write_deletions(all_deletions)  # one of the two files may be missing, or damaged
        for name, partitions in topics.left_over(data):
            last_seq = self._in_force.deleted.last_seq(name)
            self._context.logger.warn("topic_deleted_again", topic=name, last_seq=last_seq)
            deletions.remove_files(data, Topic(name, partitions, 0), self._context.check)
        deletions.sweep(data, self._context.check)
