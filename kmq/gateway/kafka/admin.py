"""Administration by Kafka's clients: topics, their settings, sizes, users, transactions.

Owner       core/topics.py changes topics; this module translates its options, names and refusals.
Replicas    One, which is this broker.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from kmq.access.tokens import Tokens
from kmq.broker.door import host_port
from kmq.config.settings import Settings
from kmq.errors import RetryError
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.topics import OPTIONS, TopicState
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.connection import MAX_FRAME, ApiHandler, Call, Connection, Handler
from kmq.gateway.kafka.door import NAMES, BrokerNodes
from kmq.gateway.kafka.topic_settings import (
    ATTRIBUTES,
    BOOLEAN,
    DEFAULT,
    FIXED,
    INT,
    LIST,
    MOST_BYTES,
    OF_BROKER,
    OF_TOPIC,
    STANDARD,
    STRING,
    TOPIC_SETTINGS,
    Row,
    TopicSetting,
    longest_message,
    options_of,
    setting,
    stored_setting,
    stored_settings,
    value_of,
)
from kmq.gateway.kafka.transaction import Transaction
from kmq.gateway.kafka.transaction_log import ABORT, COMMIT, EMPTY
from kmq.gateway.kafka.transactions import Transactions
from kmq.gateway.kafka.wire import ErrorCode, Fields, KafkaRefused, Key
from kmq.log import bounds
from kmq.log.topics import MAX_PARTITIONS
from kmq.message import record

_DEFAULT_COUNT = -1  # of partitions or replicas: as the settings of the broker say
_END = -1  # the offset of DeleteRecords that means the end
_LEAST_PATIENCE_S = 5.0  # as for other changes: a leader of Kafka deletes at once, so clients may say 0
_MOST_PATIENCE_S = 60.0  # with the router, because later requests on the connection wait, too


def code_of(err: RequestRefused) -> ErrorCode:
    """Return the error for a topic that cannot be made or changed."""
    if err.code != "bad_field":
        return wire.code_of(err)
    by_field = {"name": ErrorCode.invalid_topic_exception, "partitions": ErrorCode.invalid_partitions}
    return by_field.get(str(err.fields["field"]), ErrorCode.invalid_config)


def code_of_change(err: RequestRefused) -> ErrorCode:
    """Return the same for one that the router has not carried out yet, too: no partition's leader is to be looked for."""
    return ErrorCode.request_timed_out if err.code == "not_ready" else code_of(err)


# --- requests --------------------------------------------------------------------------------------------------------

_TOPIC, _BROKER = 2, 4  # kinds of a resource
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)  # what IncrementalAlterConfigs does with a setting
_SHA_256, _SHA_512 = 1, 2  # mechanisms of SCRAM


class AdminHandler(ApiHandler):
    """Answers what consoles and administrators ask."""

    def __init__(
        self,
        settings: Settings,
        core: Core,
        tokens: Tokens | None,
        nodes: Callable[[Connection], BrokerNodes],
        transactions: Transactions,
    ) -> None:
        self._settings, self._topics, self._tokens, self._nodes = settings, core.topics, tokens, nodes
        self._partitions, self._transactions = core.partitions, transactions
        self.handlers: dict[Key, Handler] = {
            Key.CREATE_TOPICS: self._create_topics,
            Key.DELETE_TOPICS: self._delete_topics,
            Key.DELETE_RECORDS: self._delete_records,
            Key.CREATE_PARTITIONS: self._create_partitions,
            Key.DESCRIBE_CONFIGS: self._describe_configs,
            Key.ALTER_CONFIGS: self._alter_configs,
            Key.INCREMENTAL_ALTER_CONFIGS: self._alter_some_configs,
            Key.DESCRIBE_LOG_DIRS: self._describe_log_dirs,
            Key.DESCRIBE_ACLS: self._describe_acls,
            Key.DESCRIBE_SCRAM_USERS: self._describe_scram_users,
            Key.ALTER_SCRAM_USERS: self._alter_scram_users,
            Key.DESCRIBE_TRANSACTIONS: self._describe_transactions,
            Key.LIST_TRANSACTIONS: self._list_transactions,
        }

    def _fixed(self, nodes: BrokerNodes) -> dict[str, Row]:
        """Return the settings that are the same in every topic."""
        of_broker = {MOST_BYTES: longest_message(self._settings), "min.insync.replicas": nodes.min_insync}
        return FIXED | {name: (INT, str(value)) for name, value in of_broker.items()}

    # --- topics ------------------------------------------------------------------------------------------------------

    async def _create_topics(self, call: Call) -> Fields:
        nodes, patience_s = self._nodes(call.connection), _patience_s(call)

        async def create(topic: Any) -> None:
            partitions, replicas = topic.num_partitions, topic.replication_factor
            if topic.assignments:
                if (partitions, replicas) != (_DEFAULT_COUNT, _DEFAULT_COUNT):
                    raise KafkaRefused(ErrorCode.invalid_request, "give either an assignment, or how many partitions")
                _check_assignment([row.broker_ids for row in topic.assignments], nodes.replicas)
                if sorted(row.partition_index for row in topic.assignments) != [*range(len(topic.assignments))]:
                    raise KafkaRefused(ErrorCode.invalid_replica_assignment, "must be of partitions 0, 1, 2 and so on")
                partitions = len(topic.assignments)
            elif replicas not in (_DEFAULT_COUNT, len(nodes.replicas)):
                text = f"must be {len(nodes.replicas)}, because each broker keeps a copy of every topic, or -1"
                raise KafkaRefused(ErrorCode.invalid_replication_factor, text)
            if partitions == _DEFAULT_COUNT:
                partitions = self._settings.kafka_partitions
            _check_count(partitions)
            if not record.is_topic(topic.name):
                raise KafkaRefused(ErrorCode.invalid_topic_exception, NAMES)
            if self._topics.exists(topic.name):
                raise KafkaRefused(ErrorCode.topic_already_exists, f"topic {topic.name!r}: exists")
            options = options_of({row.name: row.value for row in topic.configs}, self._fixed(nodes))
            if call.body.validate_only:
                return
            made, is_new = await self._topics.create(topic.name, partitions, options, patience_s=patience_s)
            if not is_new:
                raise KafkaRefused(ErrorCode.topic_already_exists, f"topic {topic.name!r}: exists")
            if made.from_seq is None:
                raise KafkaRefused(ErrorCode.request_timed_out, "it is declared, and in force once the router is up")

        return {"topics": await _each(call, call.body.topics, _name_of, create)}

    async def _delete_topics(self, call: Call) -> Fields:
        names = call.body.topic_names
        return {"responses": await _each(call, names, lambda name: {"name": name}, self._topics.delete)}

    async def _delete_records(self, call: Call) -> Fields:
        patience_s = _patience_s(call)

        async def delete(topic: Any) -> Fields:
            rows, starts = [], dict[int, int]()
            for part in topic.partitions:
                row = {"partition_index": part.partition_index, "error_code": ErrorCode.none}
                try:
                    offset = await asyncio.to_thread(self._start_of, topic.name, part.partition_index, part.offset)
                    starts[part.partition_index] = max(offset, starts.get(part.partition_index, 0))
                except RequestRefused as err:
                    row["error_code"] = code_of(err)
                rows.append(row)
            try:
                firsts = await self._topics.delete_before(topic.name, starts, patience_s) if starts else {}
            except (RequestRefused, RetryError) as err:
                # A RetryError: a broker of the shard may be of an older release.
                code = code_of(err) if isinstance(err, RequestRefused) else ErrorCode.unsupported_version
                firsts, rows = {}, [row | {"error_code": row["error_code"] or code} for row in rows]
            for row in rows:
                if not row["error_code"]:
                    first = firsts[row["partition_index"]]
                    is_there = first >= starts[row["partition_index"]]
                    row |= {"low_watermark": first} if is_there else {"error_code": ErrorCode.request_timed_out}
                if row["error_code"]:
                    call.errors.append(row["error_code"])
            return {"partitions": rows}

        return {"topics": await call.each(call.body.topics, _name_of, delete, code_of)}

    def _start_of(self, topic: str, partition: int, offset: int) -> int:
        """Return the offset with which a partition is to begin; -1: its end. Raises RequestRefused if it cannot."""
        _, end = self._partitions.bounds(topic, partition)
        (state,) = self._topics.states([topic])
        if value_of("cleanup.policy", state.options, state.own) == "compact":
            raise KafkaRefused(ErrorCode.policy_violation, f"topic {topic!r}: its rows stay, because it is compacted")
        if not _END <= offset <= end:
            raise KafkaRefused(ErrorCode.offset_out_of_range, f"{topic}/{partition}: ends with offset {end}")
        return end if offset == _END else offset

    async def _create_partitions(self, call: Call) -> Fields:
        nodes = self._nodes(call.connection).replicas

        async def grow(topic: Any) -> None:
            before = await self._topics.describe(topic.name)
            _check_count(topic.count)
            if topic.count <= before.partitions:
                raise KafkaRefused(
                    ErrorCode.invalid_partitions, f"must be more than {before.partitions}, which there are"
                )
            if topic.assignments is not None:
                _check_assignment([row.broker_ids for row in topic.assignments], nodes)
                if len(topic.assignments) != topic.count - before.partitions:
                    raise KafkaRefused(ErrorCode.invalid_replica_assignment, "must be of each new partition")
            if not call.body.validate_only:
                # Kafka's clients choose partitions themselves, so they expect that keys move to other partitions.
                await self._topics.change(topic.name, {}, topic.count, force=True)

        return {"results": await _each(call, call.body.topics, _name_of, grow)}

    # --- settings ----------------------------------------------------------------------------------------------------

    async def _describe_configs(self, call: Call) -> Fields:
        without = {} if call.body.include_synonyms else {"synonyms": ()}
        defaults, nodes = self._topics.defaults(), self._nodes(call.connection)
        fixed = [setting(name, kind, value) for name, (kind, value) in self._fixed(nodes).items()]
        named = {(resource.resource_type, resource.resource_name): resource for resource in call.body.resources}

        async def describe(resource: Any) -> Fields:
            rows, wanted = await self._settings_of(resource, defaults, fixed, nodes), resource.configuration_keys
            return {"configs": [row | without for row in rows if wanted is None or row["name"] in wanted]}

        return {"results": await call.each(named.values(), _resource_of, describe, code_of)}

    async def _settings_of(
        self, resource: Any, defaults: Mapping[str, int | str], fixed: list[dict[str, Any]], nodes: BrokerNodes
    ) -> list[dict[str, Any]]:
        """Return the settings of a topic, or of the broker. Raises RequestRefused."""
        if resource.resource_type == _TOPIC:
            state = await self._topics.describe(resource.resource_name)
            rows = {row["name"]: row for row in fixed} | {
                name: self._option(name, state, defaults) for name in TOPIC_SETTINGS
            }
            rows |= {
                name: stored_setting(name, value, rows.get(name))
                for name, value in stored_settings(state.options).items()
            }
            return [rows[name] for name in sorted(rows)]
        if resource.resource_type != _BROKER:
            raise KafkaRefused(ErrorCode.invalid_request, "there are settings of topics (2) and of brokers (4)")
        if resource.resource_name == "":
            return []  # settings changed at run time for all brokers: there are none
        if resource.resource_name not in map(str, nodes.replicas):
            text = f"there is no broker {resource.resource_name!r}, only {', '.join(map(str, nodes.replicas))}"
            raise KafkaRefused(ErrorCode.invalid_request, text)
        of_broker = [
            setting(option.wide, option.kind, value_of(name, defaults), self._source(option))
            for name, option in TOPIC_SETTINGS.items()
        ]
        return of_broker + [
            setting(name, kind, value) for name, (kind, value) in self._of_broker(nodes, resource.resource_name).items()
        ]

    def _option(self, name: str, state: TopicState, defaults: Mapping[str, int | str]) -> dict[str, Any]:
        """Return a setting of a topic, and its value without one of the topic's own."""
        option = TOPIC_SETTINGS[name]
        wide = {"name": option.wide, "value": value_of(name, defaults), "source": self._source(option)}
        value, synonyms = value_of(name, state.options, state.own), [wide]
        if option.option in state.own:
            synonyms = [{"name": name, "value": value, "source": OF_TOPIC}, wide]
        source = OF_TOPIC if option.option in state.own else int(str(wide["source"]))
        return setting(name, option.kind, value, source, is_fixed=False) | {"synonyms": synonyms}

    def _source(self, option: TopicSetting) -> int:
        # Not `given`: a broker's processes are given all settings.
        limit = ATTRIBUTES[OPTIONS[option.option].limit]
        is_set = limit in STANDARD and getattr(self._settings, limit) != STANDARD[limit]
        return OF_BROKER if is_set else DEFAULT

    def _of_broker(self, nodes: BrokerNodes, number: str) -> dict[str, Row]:
        settings = self._settings
        protocol = ("SASL_" if self._tokens else "") + ("SSL" if nodes.is_tls else "PLAINTEXT")
        address = next((host_port(host, port) for node, host, port in nodes.places if str(node) == number), "")
        return {
            "advertised.listeners": (STRING, f"{protocol}://{address}" if address else ""),
            "auto.create.topics.enable": (BOOLEAN, "true" if settings.auto_create_topics == "on" else "false"),
            "broker.id": (INT, number),
            "compression.type": (STRING, "producer"),
            "default.replication.factor": (INT, str(len(nodes.replicas))),
            "delete.topic.enable": (BOOLEAN, "true"),
            "group.max.session.timeout.ms": (INT, "1800000"),
            "group.min.session.timeout.ms": (INT, "6000"),
            "inter.broker.protocol.version": (STRING, "2.8-IV1"),
            "log.cleaner.enable": (BOOLEAN, "true"),
            "log.dirs": (STRING, settings.data),
            "log.message.format.version": (STRING, "2.8-IV1"),
            "message.max.bytes": (INT, str(longest_message(settings))),
            "num.partitions": (INT, str(settings.kafka_partitions)),
            "offsets.retention.minutes": (INT, str(int(min(settings.group_retention // 60, (1 << 31) - 1)))),
            "socket.request.max.bytes": (INT, str(MAX_FRAME)),
            "unclean.leader.election.enable": (BOOLEAN, "false"),
        }

    async def _alter_configs(self, call: Call) -> Fields:
        """Give topics exactly these settings. A setting that is not named falls back to its default."""

        async def alter(resource: Any) -> None:
            state = await self._to_change(resource)
            changes = dict.fromkeys(name for name, option in TOPIC_SETTINGS.items() if option.option in state.own)
            changes |= dict.fromkeys(stored_settings(state.options))
            await self._change(call, state, changes | {row.name: row.value for row in resource.configs})

        return {"responses": await _each(call, call.body.resources, _resource_of, alter)}

    async def _alter_some_configs(self, call: Call) -> Fields:
        async def alter(resource: Any) -> None:
            state = await self._to_change(resource)
            changes: dict[str, str | None] = {}
            for row in resource.configs:
                if row.name in changes:
                    raise KafkaRefused(ErrorCode.invalid_request, f"{row.name}: is named twice")
                if row.config_operation == _DELETE:
                    changes[row.name] = None
                elif row.value is None:
                    raise KafkaRefused(ErrorCode.invalid_request, f"{row.name}: has no value")
                elif row.config_operation == _SET:
                    changes[row.name] = row.value
                else:
                    changes[row.name] = _listed(row, state)
            await self._change(call, state, changes)

        return {"responses": await _each(call, call.body.resources, _resource_of, alter)}

    async def _to_change(self, resource: Any) -> TopicState:
        if resource.resource_type != _TOPIC:
            text = "only the settings of topics can be changed; those of the broker are KMQ_… in its environment"
            raise KafkaRefused(ErrorCode.invalid_request, text)
        return await self._topics.describe(resource.resource_name)

    async def _change(self, call: Call, state: TopicState, changes: Mapping[str, str | None]) -> None:
        options = options_of(changes, self._fixed(self._nodes(call.connection)), state)
        if options and not call.body.validate_only:
            await self._topics.change(state.name, options)

    # --- sizes and users ---------------------------------------------------------------------------------------------

    async def _describe_log_dirs(self, call: Call) -> Fields:
        """Return what each partition has on disk. KMQ_DATA is the only directory."""
        topic_rows = call.body.topics
        wanted = None if topic_rows is None else {row.topic: frozenset(row.partitions) for row in topic_rows}
        names = [name for name in await self._topics.names(internal=True) if wanted is None or name in wanted]
        data = self._settings.data

        def sizes() -> list[Fields]:
            topics: list[Fields] = []
            for state in self._topics.states(names):
                rows = [
                    {"partition_index": size.partition, "partition_size": size.nbytes, "offset_lag": 0}
                    for size in bounds.measure(data, state.name, state.partitions)
                    if wanted is None or size.partition in wanted[state.name]
                ]
                topics.append({"name": state.name, "partitions": rows})
            return topics

        disk = os.statvfs(data)
        room = {"total_bytes": disk.f_blocks * disk.f_frsize, "usable_bytes": disk.f_bavail * disk.f_frsize}
        return {"results": [{"log_dir": data, "topics": await asyncio.to_thread(sizes)} | room]}

    async def _describe_acls(self, call: Call) -> Fields:
        text = "there are no ACLs, but roles of tokens: kmq token list"
        return {"error_code": ErrorCode.security_disabled, "error_message": text}

    async def _describe_scram_users(self, call: Call) -> Fields:
        scram_names = {} if self._tokens is None else self._tokens.scram_names()
        wanted = [row.name for row in call.body.users or ()] or [*scram_names]
        results = []
        for user in dict.fromkeys(wanted):
            if user in scram_names:
                rows = [{"mechanism": each, "iterations": scram_names[user]} for each in (_SHA_256, _SHA_512)]
                results.append({"user": user, "credential_infos": rows})
            else:
                code, text = ErrorCode.resource_not_found, "has no token of: kmq token new <name> --scram"
                results.append({"user": user, "error_code": code, "error_message": text})
        return {"results": results}

    async def _alter_scram_users(self, call: Call) -> Fields:
        users = dict.fromkeys(row.name for row in (*call.body.deletions, *call.body.upsertions))
        text = "tokens are made with: kmq token new <name> --scram"
        call.errors.append(ErrorCode.unsupported_version)
        refused = {"error_code": ErrorCode.unsupported_version, "error_message": text}
        return {"results": [{"user": user} | refused for user in users]}

    # --- transactions ------------------------------------------------------------------------------------------------

    async def _describe_transactions(self, call: Call) -> Fields:
        ids = dict.fromkeys(call.body.transactional_ids)
        try:
            transactions = self._transactions.by_id()
        except RequestRefused:
            transactions, code = {}, ErrorCode.coordinator_load_in_progress
        else:
            code = ErrorCode.transactional_id_not_found
        call.errors.extend(code for id in ids if id not in transactions)
        unknown = {"error_code": code}
        rows = [
            {"transactional_id": id} | (_described(transactions[id]) if id in transactions else unknown) for id in ids
        ]
        return {"transaction_states": rows}

    async def _list_transactions(self, call: Call) -> Fields:
        wanted, pids = call.body.state_filters, call.body.producer_id_filters
        unknown = [each for each in wanted if each not in _TRANSACTION_STATES]
        try:
            transactions = self._transactions.by_id().values()
        except RequestRefused:
            return {"error_code": ErrorCode.coordinator_load_in_progress, "unknown_state_filters": unknown}
        rows = [
            {"transactional_id": txn.id, "producer_id": txn.pid, "transaction_state": _state_of(txn)}
            for txn in transactions
            if (not wanted or _state_of(txn) in wanted) and (not pids or txn.pid in pids)
        ]
        return {"unknown_state_filters": unknown, "transaction_states": rows}


def _patience_s(call: Call) -> float:
    """Return how long a change waits for the router."""
    return max(_LEAST_PATIENCE_S, min(_MOST_PATIENCE_S, wire.milliseconds(call.body.timeout) / 1000))


def _name_of(topic: Any) -> dict[str, Any]:
    return {"name": topic.name}


def _resource_of(resource: Any) -> dict[str, Any]:
    return {"resource_type": resource.resource_type, "resource_name": resource.resource_name}


async def _each(
    call: Call, items: Iterable[Any], name: Callable[[Any], dict[str, Any]], change: Callable[[Any], Awaitable[None]]
) -> list[Fields]:
    """Change each topic or resource, unless it is named twice, and return what each is answered, in order."""
    times = Counter(tuple(name(each).values()) for each in items)

    async def work(each: Any) -> None:
        if times[tuple(name(each).values())] > 1:
            raise KafkaRefused(ErrorCode.invalid_request, "is named twice")
        await change(each)

    return await call.each(items, name, work, code_of_change)


def _check_count(partitions: int) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise KafkaRefused(ErrorCode.invalid_partitions, f"there must be 1 to {MAX_PARTITIONS} partitions")


def _check_assignment(replicas: Iterable[Sequence[int]], nodes: tuple[int, ...]) -> None:
    if any(tuple(sorted(each)) != nodes for each in replicas):
        text = f"each partition has a replica on each broker: {', '.join(map(str, nodes))}"
        raise KafkaRefused(ErrorCode.invalid_replica_assignment, text)


def _listed(row: Any, state: TopicState) -> str:
    """Return a list with entries added or removed. Raises KafkaRefused for a setting that is not a list."""
    option = TOPIC_SETTINGS.get(row.name)
    if option is None or option.kind != LIST or row.config_operation not in (_APPEND, _SUBTRACT):
        raise KafkaRefused(ErrorCode.invalid_config, f"{row.name}: is no list that can be changed")
    words = dict.fromkeys(value_of(row.name, state.options, state.own).split(","))
    change = dict.fromkeys(word.strip() for word in row.value.split(","))
    if row.config_operation == _APPEND:
        return ",".join(words | change)
    return ",".join(word for word in words if word not in change)


_TRANSACTION_STATES = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort")
_ENDED = {EMPTY: "Empty", COMMIT: "CompleteCommit", ABORT: "CompleteAbort"}


def _described(txn: Transaction) -> dict[str, Any]:
    started = datetime.now(UTC) - timedelta(seconds=time.monotonic() - txn.begun)
    return {
        "transaction_state": _state_of(txn),
        "transaction_timeout": timedelta(milliseconds=txn.last.timeout_ms),
        "transaction_start_time": wire.NO_TIME if txn.first is None else started,
        "producer_id": txn.pid,
        "producer_epoch": txn.epoch,
        "topics": [
            {"topic": topic, "partitions": [number for _, number in each]}
            for topic, each in groupby(sorted(txn.partitions), lambda place: place[0])
        ],
    }


def _state_of(txn: Transaction) -> str:
    if txn.first is not None:
        return "PrepareCommit" if txn.is_ending else "Ongoing"
    return _ENDED[txn.outcome]
