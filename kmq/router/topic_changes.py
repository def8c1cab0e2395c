"""What changes under topics/ while the router runs: new declarations, and requests to set limits or to delete a topic.

Owner       the router process: commands only lay declarations and requests down (kmq/log/requests.py).
Invariant   A deleted topic's last seq is on disk in `deletions` before any of its files goes, and no record after that
            seq is in the deleted queue. A request is removed after it was carried out.
Crash       A request that was carried out may be carried out again: that changes nothing. Between `deletions` and the
            removal of the directory, the next start removes it (`finish_deletions`).
"""

import os
import time

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

_COARSE_NS = 50_000_000  # two changes of a directory within such a time may have the same mtime


class TopicChanges:
    """See the module."""

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
        self._looked_at = 0  # mtime of topics/ when it was last read

    def look(self) -> None:
        """Carry out what was asked since the last call, and put new declarations in force from the next seq on."""
        data = self._context.data
        mtime = os.stat(f"{data}/topics").st_mtime_ns
        if mtime == self._looked_at:
            return
        self._looked_at = mtime if abs(time.time_ns() - mtime) > _COARSE_NS else 0
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
            elif request.verb == requests.DELETE:
                self._delete(request.topic)
            else:
                raise ConfigError(f"unknown request {request.verb!r}")
        except (ConfigError, LookupError, ValueError) as err:
            self._context.logger.warn("request_refused", file=request.path, topic=request.topic, reason=err)
        request.remove()

    def _topic_of(self, name: str) -> Topic:
        """The topic in force that a request names. Raises ConfigError where there is none."""
        if name in topics.names(self._context.data) and not self._in_force.has(name):
            self._sorter.make_topics()
            if not self._in_force.has(name):  # declared since the last look
                return self._adopt(name)
        if not self._in_force.has(name):
            raise ConfigError(f"topic {name!r} does not exist")
        return self._in_force.table[name.encode()]

    def _set_limits(self, name: str, changes: dict[str, str]) -> None:
        """Change the limits in a topic's file, and those of its logs. Raises ConfigError where one is not valid."""
        topic = self._topic_of(name)
        path = topics.toml_path(self._context.data, name)
        with open(path, encoding="utf-8") as file:
            text = topics.with_limits(file.read(), changes)
        declared = topics.parse(text)
        limits = self._in_force.default_limits.but(declared.limits)
        self._context.replace(path, text.encode())
        self._in_force.set_limits(name, declared)
        for log in self._logs.of_topic(topic):
            self._logs.use(log)
            log.set_limits(limits, int(self._context.now_s() * 1e6))
            self._logs.unsynced.add(log)
        said = {limit: value or "unset" for limit, value in changes.items()}
        self._context.logger.info("topic_limits_set", topic=name, **said)

    def _delete(self, name: str) -> None:
        """Delete a topic with all records up to now, for good. Raises ConfigError where there is none."""
        topic, data = self._topic_of(name), self._context.data
        self._sorter.make_topics()  # the lines that wait for one may be older than the last seq written below
        self._checkpoints.finish()  # it syncs files by their names
        last_seq = self._sorter.sorted_seq
        ends = [log.state.end_offset for log in self._logs.of_topic(topic)]
        every = deletions.read(data)
        has_had_records = topic.from_seq <= last_seq
        if has_had_records:
            if not self._context.wal_is_synced:  # else a power cut may give these numbers to other records
                sync_file(os.path.realpath(f"{data}/append.log"))
            deletion = deletions.Deletion(name, topic.from_seq, last_seq, deletions.now(), ends)
            self._in_force.write_deletions([*every, deletion])
        self._forget(topic)
        if not has_had_records:  # then no seq could tell it from a later topic of its name
            self._checkpoints.start()
            self._checkpoints.finish()
        deletions.remove_files(data, topic, self._context.check)
        if not has_had_records:
            self._in_force.write_deletions(
                every
            )  # unchanged: its time tells the framer that there is something to forget
        self._context.logger.info(
            "topic_deleted", topic=name, from_seq=topic.from_seq, last_seq=last_seq, messages=sum(ends)
        )

    def _forget(self, topic: Topic) -> None:
        self._logs.forget(topic)
        self._checkpoints.forget(topic)
        self._in_force.forget(topic)

    def finish_deletions(self) -> None:
        """Remove what a kill has left of topics that were deleted; at a start, before anything else."""
        data = self._context.data
        every = deletions.read(data)
        if deletions.faults(data):
            self._in_force.write_deletions(every)  # one of the two files may be missing, or damaged
        for name, partitions in topics.left_over(data):
            last_seq = self._in_force.deleted.last_seq(name)
            self._context.logger.warn("topic_deleted_again", topic=name, last_seq=last_seq)
            deletions.remove_files(data, Topic(name, partitions, 0), self._context.check)
        deletions.sweep(data, self._context.check)
