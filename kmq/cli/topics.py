"""`kmq topics …`: declare topics, list them, change their limits, delete them or their first messages."""

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kmq.broker import status
from kmq.broker.data_directory import known_id
from kmq.cli.elsewhere import ask, elsewhere, need_files
from kmq.cli.output import confirm, examples, existing_data, print_table
from kmq.config.settings import SETTINGS, Settings, load
from kmq.config.states import InForce
from kmq.config.values import FOREVER
from kmq.errors import BusyError, ConfigError, KmqError
from kmq.log import gaps, reader, topic_changes, topics
from kmq.log.bounds import PartitionSize, measure, tiered_size
from kmq.log.identity import open_data
from kmq.log.partition import directory_of, end_offset
from kmq.log.segment import COMPACT, LIMITS, Limits
from kmq.log.topic_changes import TopicRequest
from kmq.logfmt import pairs

topics_app = typer.Typer(
    no_args_is_help=True,
    help="Declare topics, list them, change their limits and partitions.",
    epilog=examples("kmq topics create orders --partitions 4", "kmq topics list"),
)

_ADOPT_S = 5.0  # longest wait for the router to adopt a declaration or to carry out a request
_POLL_S = 0.02
_ENV = {row.attribute: row.env for row in SETTINGS if row.attribute != "tier"} | {"tier": "KMQ_TIER_TOPICS"}
_BYTES = ((" GiB", 1 << 30), (" MiB", 1 << 20), (" KiB", 1 << 10), (" B", 1))
_AGES = (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001))
_NAME = typer.Argument(help="A topic; see kmq topics list.")
_TIERED = {  # what KMQ_TIER has of a partition: the names that JSON has here, and those that a gateway has
    "local_start": "localStartOffset",
    "tier_end": "tierEndOffset",
    "tier_objects": "tierObjects",
    "tier_bytes": "tierBytes",
}
_WAL_HINT = "The WAL keeps the messages until its retention deletes them"


def _require(settings: Settings, name: str) -> None:
    """Raise ConfigError, with the nearest existing name, if there is no such topic."""
    names = topics.names(settings.data) if os.path.isdir(f"{settings.data}/topics") else []
    if name not in names:
        raise topics.unknown(name, names)


def _require_leader(settings: Settings) -> None:
    """Raise BusyError if this broker does not lead its shard: it would refuse the request, and only its log would
    say so.
    """
    if not settings.shard:
        return
    from kmq.links.role import LEADING, STARTING, RolePage

    page = RolePage.find(settings.instance, known_id(settings))
    if page is None or page.read().role not in (STARTING, LEADING):
        leader = (page.leader or {}).get("broker") if page is not None else None
        advice = f"run it at broker {leader}, which does" if leader else "kmq cluster status says who does"
        raise BusyError(
            f"this broker does not lead the shard {settings.shard}, and only who leads changes topics; {advice}"
        )


def _wait(is_done: Callable[[], bool], can_be_done: Callable[[], bool] = lambda: True) -> bool:
    """Return True once the router has done it; False if that takes too long, or the broker is not ready."""
    deadline = time.monotonic() + _ADOPT_S
    while not is_done():
        if not can_be_done() or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_carried_out(settings: Settings, request: TopicRequest) -> bool:
    return _wait(lambda: not request.is_waiting, lambda: status.collect(settings).ready)


# --- create ----------------------------------------------------------------------------------------------------------


@topics_app.command(
    "create",
    epilog=examples(
        "kmq topics create orders --partitions 4",
        "kmq topics create jobs.eu",
        "kmq topics create audit --set retention_age=30d",
        "kmq topics create legacy --partitions 4 --partitioner crc32",
    ),
)
def create(
    name: Annotated[str, typer.Argument(help="[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")],
    partitions: Annotated[
        int, typer.Option("--partitions", "-p", help="1 to 1024; there can be more later, never fewer.")
    ] = 1,
    partitioner: Annotated[
        str, typer.Option(help="murmur2, as Kafka's clients, or crc32; cannot be changed later.")
    ] = topics.DEFAULT_PARTITIONER,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help=f"<limit>=<value>, replaces the setting for this topic. Limits: {', '.join(LIMITS)}."
        ),
    ] = None,
) -> None:
    """Declare a topic. It is in force from the next routed message on."""
    settings = load()
    limits = {limit: text for limit, _, text in (pair.partition("=") for pair in own or ())}
    if elsewhere() is not None:
        declared = {"name": name, "partitions": partitions, "partitioner": partitioner, **_as_options(limits)}
        made = ask("POST", "/api/admin/topics", declared)
        _print_created(name, len(made["partitions"]), made["fromSeq"])
        return
    open_data(settings.data, known_id(settings), settings.shard)
    _require_leader(settings)
    topics.check_tier(settings.data, name, limits, limits, bool(settings.shard))
    topics.declare(settings.data, name, partitions, limits, partitioner=partitioner)
    if not _wait(lambda: topics.read(settings.data, name).from_seq is not None, lambda: status.collect(settings).ready):
        _print_created(name, partitions, None, f"declared in {os.path.abspath(settings.data)}, ")
        return
    found = topics.read(settings.data, name)
    if (found.partitions, found.partitioner, found.limits) != (partitions, partitioner, limits):
        text = "a message or another command was first, so it is not as you declared it; see kmq topics show"
        raise KmqError(f"topic {name}: exists with {found.partitions} partition(s): {text} {name}")
    _print_created(name, partitions, found.from_seq)


def _print_created(name: str, partitions: int, from_seq: int | None, where: str = "") -> None:
    since = "when the router has adopted it" if from_seq is None else f"from seq {from_seq}"
    print(f"topic {name}: {partitions} partition(s), {where}in force {since}")


# --- list ------------------------------------------------------------------------------------------------------------


@topics_app.command("list", epilog=examples("kmq topics list", "kmq topics list --logfmt", "kmq topics list --json"))
def list_topics(
    with_own: Annotated[bool, typer.Option("--all", help="Also topics of KMQ itself (__…).")] = False,
    as_logfmt: Annotated[bool, typer.Option("--logfmt", help="One line per partition.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see above.")] = False,
) -> None:
    """List topics with their partitions, messages and bytes.

    --json: {"topics": [{"topic", "partition", "messages", "bytes",
    "from_seq", "tier_bytes"}, …]}, one object per partition. from_seq is null
    until the router has adopted the declaration; bytes are on the disk,
    tier_bytes in KMQ_TIER.
    """
    rows: list[dict[str, Any]] = [
        {
            "topic": name,
            "partition": number,
            "messages": messages,
            "bytes": nbytes,
            "from_seq": from_seq,
            "tier_bytes": tier_bytes,
        }
        for name, from_seq, sizes in _sizes(with_own)
        for number, (messages, nbytes, tier_bytes) in enumerate(sizes)
    ]
    if as_json:
        print(json.dumps({"topics": rows}))
    elif as_logfmt:
        for row in rows:
            print(pairs(**row | {"from_seq": row["from_seq"] or 0}))
    else:
        columns = ["topic", ">partition", ">messages", ">bytes", ">in force from seq", ">in KMQ_TIER"]
        if not any(row["tier_bytes"] for row in rows):
            columns.pop()
        for row in rows:
            row["from_seq"] = "pending" if row["from_seq"] is None else str(row["from_seq"])
        print_table(columns, ([*row.values()][: len(columns)] for row in rows))


def _sizes(with_own: bool) -> Iterator[tuple[str, int | None, list[tuple[int, int, int]]]]:
    """Yield each topic: its name, since when it is in force, and (messages, bytes, bytes in KMQ_TIER) of each partition.

    A gateway is asked for each topic: only such a request returns sizes.
    """
    if elsewhere() is None:
        data = existing_data()
        for name, partitions, from_seq in topics.listing(data):
            if with_own or not name.startswith("__"):
                yield name, from_seq, [_written(data, name, number) for number in range(partitions)]
        return
    for row in ask("GET", f"/api/topics?internal={str(with_own).lower()}"):
        topic = _ask_topic("GET", row["name"])
        sizes = [(_counted(log, 0), log["bytes"], log.get("tierBytes", 0)) for log in topic["partitions"]]
        yield topic["name"], topic["fromSeq"], sizes


def _written(data: str, name: str, partition: int) -> tuple[int, int, int]:
    """Return (messages that a partition ever got, bytes that it has, and bytes in KMQ_TIER)."""
    end, size = end_offset(data, name, partition)
    directory = directory_of(data, name, partition)
    tier = tiered_size(directory, 0)
    return end - gaps.count(gaps.read(directory), 0, end), size, tier.nbytes if tier else 0


def _counted(log: dict[str, Any], first: int) -> int:
    """Return how many messages a gateway's row of a partition says were stored from offset `first` on."""
    found = tuple(gaps.Gap(*each) for each in log.get("gaps", ()))
    return int(log["endOffset"]) - first - gaps.count(found, first, log["endOffset"])


def _ask_topic(method: str, name: str, body: object = None) -> Any:
    return ask(method, f"/api/admin/topics/{quote(name)}", body, topic=name)


# --- set -------------------------------------------------------------------------------------------------------------


@topics_app.command(
    "set",
    epilog=examples(
        "kmq topics set orders retention_bytes=10GiB retention_age=30d",
        "kmq topics set orders --unset retention_age",
        "kmq topics set orders cleanup=compact",
        "kmq topics set orders --partitions 8",
    ),
)
def set_limits(
    name: Annotated[str, _NAME],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help=f"<limit>=<value>; <limit>= restores the setting. Limits: {', '.join(LIMITS)}."),
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", help="A limit whose setting applies again; the same as <limit>=.")
    ] = None,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", help="More partitions, for new records.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Add partitions though records have keys.")] = False,
) -> None:
    """Change a topic's own limits, which replace the settings, or add partitions. A running broker adopts it at once.

    A lower retention limit deletes whole sealed segments, oldest first, within seconds. Stored records stay in their
    partitions; new records of a key may go to another one.
    """
    settings, pairs = load(), [*(changes or []), *(f"{limit}=" for limit in unset or [])]
    is_here = elsewhere() is None
    if is_here:
        _require(settings, name)
        _require_leader(settings)
        if partitions is not None:
            _check_growth(settings, name, partitions, force)
    wanted = _parse_changes(name, pairs) if pairs or partitions is None else {}
    limits = [f"{limit}={value}" if value else f"{limit} unset" for limit, value in wanted.items()]
    growth = [] if partitions is None else [f"{partitions} partition(s)"]
    if not is_here:
        body = _as_options(wanted) | ({} if partitions is None else {"partitions": partitions, "force": force})
        _ask_topic("PATCH", name, body)
        print(f"topic {name}: {' '.join(limits + growth)}, in force")
        return
    if wanted:
        since = "in force" if _set(settings, name, wanted) else "in force when the router has adopted it"
        print(f"topic {name}: {' '.join(limits)}, {since}")
        if wanted.get("tier") == "on":
            _say_what_stays(settings, name)
    if partitions is not None:
        since = ", in force" if _grow(settings, name, partitions) else " when the router has adopted it"
        print(f"topic {name}: {growth[0]}{since}")


def _say_what_stays(settings: Settings, name: str) -> None:
    """Say which limits are in force for a topic whose old records go to KMQ_TIER, and where each comes from."""
    found = describe(settings, name)["limits"]
    for what, limits in (("deleted for good", "retention"), ("deleted from the disk", "local_retention")):
        rows = [(limit, found[limit]) for limit in (f"{limits}_age", f"{limits}_bytes")]
        said = ", ".join(f"{limit} {_text(limit, row['value'])} ({row['from']})" for limit, row in rows)
        print(f"{what} by: {said}")
    if not settings.tier:
        print("KMQ_TIER is not set: nothing is copied, and so nothing leaves the disk, until it is")


def _check_growth(settings: Settings, name: str, partitions: int, force: bool) -> None:
    now = topics.load(settings.data, name)[0]
    topics.check_growth(settings.data, name, now, partitions)
    if partitions > now and not force and topics.has_keys(settings.data, name, now):
        raise ConfigError(f"topic {name}: {topics.KEYED}; give --force to do it nevertheless")


def _grow(settings: Settings, name: str, partitions: int) -> bool:
    """Add partitions. Return False if the router has not adopted them yet."""
    request = topic_changes.submit(settings.data, topic_changes.GROW, name, {"partitions": str(partitions)})
    if not _is_carried_out(settings, request):
        return False
    if name not in topics.names(settings.data) or topics.load(settings.data, name)[0] < partitions:
        raise KmqError(f"topic {name}: has not grown; the log of the broker says why (event request_refused)")
    return True


def _set(settings: Settings, name: str, changes: dict[str, str]) -> bool:
    """Change limits as asked. Return False if the router has not adopted them yet."""
    own = topic_changes.limits_to_be(settings.data, name, topics.read(settings.data, name).limits)
    topic_changes.apply(own, changes)
    Limits().with_changes(own)
    topics.check_letters(name, changes)
    topics.check_tier(settings.data, name, changes, own, bool(settings.shard))
    request = topic_changes.submit(settings.data, topic_changes.SET, name, changes)
    if not _is_carried_out(settings, request):
        return False
    now = topics.read(settings.data, name).limits if name in topics.names(settings.data) else {}
    if any(now.get(limit, "") != value for limit, value in changes.items()):
        raise KmqError(
            f"topic {name}: was not changed as asked; the log of the broker says why (event request_refused)"
        )
    return True


def _as_options(limits: dict[str, str]) -> dict[str, int | str | None]:
    """Return limits with the names and units of the HTTP API. Raises ConfigError."""
    from kmq.gateway.core.topics import OPTIONS

    names = {option.limit: name for name, option in OPTIONS.items()}
    Limits().with_changes({limit: text for limit, text in limits.items() if text})
    return {
        names[limit]: OPTIONS[names[limit]].value(getattr(Limits().with_changes({limit: text}), limit))
        if text
        else None
        for limit, text in limits.items()
    }


def _parse_changes(name: str, pairs: list[str]) -> dict[str, str]:
    """Return limit → text; "" for a return to the setting. Raises ConfigError without a pair, or for an unknown
    limit.
    """
    changes = {}
    for pair in pairs:
        limit, equals, value = (part.strip() for part in pair.partition("="))
        if limit == "partitions":
            raise ConfigError(f"topic {name}: partitions is no limit; write --partitions {value or 'n'}")
        if not equals:
            raise ConfigError(f"{pair!r}: expected <limit>=<value>, with one of {', '.join(LIMITS)}")
        if limit not in LIMITS:
            raise ConfigError(f"{limit}: unknown limit; expected one of {', '.join(LIMITS)}")
        changes[limit] = value
    if not changes:
        raise ConfigError(f"topic {name}: nothing to change; give <limit>=<value>, with one of {', '.join(LIMITS)}")
    return changes


# --- show ------------------------------------------------------------------------------------------------------------


@topics_app.command("describe", epilog=examples("kmq topics describe orders"), help="The same as show.")
@topics_app.command("show", epilog=examples("kmq topics show orders", "kmq topics show orders --json"))
def show(
    name: Annotated[str, _NAME],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
) -> None:
    """Show a topic: its limits and where each comes from, and the size of each partition."""
    settings = load()
    if elsewhere() is None:
        _require(settings, name)
        found = describe(settings, name)
        from_seq, columns, last = found["from_seq"], ["limit", "value", "from"], ">last offset"
        limits = [[limit, _text(limit, row["value"]), row["from"]] for limit, row in found["limits"].items()]
        logs = [(row["messages"], row["bytes"], row["first_offset"], row["last_offset"]) for row in found["logs"]]
        tiered = [[row[name] for name in _TIERED] for row in found["logs"]]
    else:  # a gateway returns every limit in force, but not where it comes from
        found = _ask_topic("GET", name)
        from_seq, columns, last = found["fromSeq"], ["limit", "value"], ">end offset"
        limits = [
            [option, "none" if value in (None, -1) else str(value)]
            for option, value in found.items()
            if option not in ("name", "partitions", "fromSeq")
        ]
        logs = [
            (_counted(row, row["startOffset"]), row["bytes"], row["startOffset"], row["endOffset"])
            for row in found["partitions"]
        ]
        tiered = [[row.get(name) for name in _TIERED.values()] for row in found["partitions"]]
    if as_json:
        print(json.dumps(found))
        return
    since = "pending" if from_seq is None else f"in force from seq {from_seq}"
    print(f"topic {name}: {len(logs)} partition(s), {since}")
    print_table(columns, limits)
    print_table(("partition", ">messages", ">bytes", ">first offset", last), ((n, *row) for n, row in enumerate(logs)))
    if rows := [(number, *row) for number, row in enumerate(tiered) if row[0] is not None]:
        columns = ["partition", ">first on disk", ">end in KMQ_TIER", ">objects there", ">bytes there"]
        print_table(columns, rows)


def describe(settings: Settings, name: str) -> dict[str, Any]:
    """Return a topic as a value for JSON; None means no limit, or no message."""
    declared = topics.read(settings.data, name)
    pending = topic_changes.limits_to_be(settings.data, name, dict(declared.limits))
    in_force = InForce(settings).settings
    limits = Limits.of(in_force).with_changes(pending)
    rows = {}
    for limit in LIMITS:
        value = getattr(limits, limit)
        source = _source(limit, pending, limits)
        if source == _ENV.get(limit) and getattr(in_force, limit) != getattr(settings, limit):
            source = f"the fleet (settings/{limit})"
        if pending.get(limit) != declared.limits.get(limit):
            source += ", when the router has adopted it"
        is_none = value == FOREVER or (value == 0 and limit != "delete_retention")
        rows[limit] = {"value": None if is_none else value, "from": source}
    logs = [
        {
            "messages": size.messages,
            "bytes": size.nbytes,
            "first_offset": size.first_offset,
            "last_offset": gaps.before(size.gaps, size.end_offset) - 1 if size.messages else None,
            **dict(zip(_TIERED, size.tier or (None, None, 0, 0), strict=True)),
        }
        for size in measure(settings.data, name, declared.partitions)
    ]
    return {
        "name": name,
        "partitions": declared.partitions,
        "partitioner": declared.partitioner,
        "from_seq": declared.from_seq,
        "limits": rows,
        "messages": sum(log["messages"] or 0 for log in logs),
        "bytes": sum(log["bytes"] or 0 for log in logs),
        "logs": logs,
    }


def _source(limit: str, own: dict[str, str], limits: Limits) -> str:
    if limit in own:
        return "topic.toml"
    if limit.startswith("local_"):
        return f"as {limit.removeprefix('local_')}"
    if limit not in _ENV:
        return "default"
    is_table = limits.cleanup == "compact" and limit.startswith("retention")
    return "cleanup=compact: settings do not apply" if is_table else _ENV[limit]


def _text(limit: str, value: str | float | None) -> str:
    """Return a limit as text, in the largest unit that fits without a rest."""
    if value is None:
        return "none" if limit.endswith("retention_bytes") or limit == "max_deliveries" else "never"
    if isinstance(value, str) or limit == "max_deliveries":
        return str(value)
    units = _BYTES if limit.endswith("bytes") else _AGES
    unit, size = next((unit, size) for unit, size in units if value % size == 0 or size < 1)
    return f"{value / size:,.0f}{unit}"


# --- truncate --------------------------------------------------------------------------------------------------------

_END = "end"


@topics_app.command(
    "truncate",
    epilog=examples(
        "kmq topics truncate orders --before end --dry-run",
        "kmq topics truncate orders --partition 2 --before end --yes",
    ),
)
def truncate(
    name: Annotated[str, _NAME],
    before: Annotated[str, typer.Option("--before", help="The first offset that stays, or end: nothing stays.")],
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", help="One partition; with --before end all without it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many messages would go, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete the first messages of a topic's partitions, for good: those before an offset. The others keep their offsets.

    The WAL keeps the messages until its own retention deletes them, but no rebuild brings them back.
    """
    settings = load()
    need_files("topics truncate")
    _refuse_own(name, "truncated")
    _require(settings, name)
    _require_leader(settings)
    declared = topics.read(settings.data, name)
    limits = Limits.of(settings).with_changes(declared.limits)
    if limits.cleanup == COMPACT and limits.retention_age == FOREVER and not limits.retention_bytes:
        raise ConfigError(f"topic {name}: its rows stay, because it is compacted; a tombstone deletes a row")
    sizes = measure(settings.data, name, declared.partitions)
    starts = _starts(name, sizes, before, partition)
    count = sum(max(0, offset - sizes[number].first_offset) for number, offset in starts.items())
    what = f"topic {name}: {count:,} messages before {before} in {len(starts)} partition(s)"
    if dry_run or not count:
        print(f"{what} {'would be deleted' if count else 'are there; nothing is deleted'}")
        return
    if not yes:
        confirm(what, "delete them", "Delete them for good?")
    request = topic_changes.begin_at(settings.data, name, topics.from_seq_of(settings.data, name), starts)
    if not _is_carried_out(settings, request):
        print(f"{what}; deleted when the router has adopted it: at the next kmq up, if the broker is down")
        return
    if not _wait(
        lambda: all(reader.partition(settings.data, name, n).first_offset >= offset for n, offset in starts.items())
    ):
        raise KmqError(
            f"{what}: not all are deleted yet; the broker goes on, and its log may say why (start_postponed)"
        )
    print(f"{what}: deleted. The WAL keeps them until its retention deletes them")


def _refuse_own(name: str, what: str) -> None:
    if name.startswith("__"):
        raise ConfigError(f"topic {name}: belongs to KMQ itself and cannot be {what}")


def _starts(name: str, sizes: list[PartitionSize], before: str, partition: int | None) -> dict[int, int]:
    """Return the offset at which each partition is to begin. Raises ConfigError."""
    if before != _END and not before.isdecimal():
        raise ConfigError(f"--before {before}: must be an offset, or {_END}")
    if partition is None and before != _END and len(sizes) > 1:
        raise ConfigError(f"topic {name}: has {len(sizes)} partitions, each with offsets of its own; give --partition")
    if partition is not None and not 0 <= partition < len(sizes):
        raise ConfigError(f"topic {name}: has {len(sizes)} partition(s), so there is no {partition}")
    chosen = sizes if partition is None else sizes[partition : partition + 1]
    starts = {size.partition: size.end_offset if before == _END else int(before) for size in chosen}
    for size in chosen:
        if starts[size.partition] > size.end_offset:
            raise ConfigError(f"topic {name}/{size.partition}: ends with offset {size.end_offset}, before {before}")
    return starts


# --- delete ----------------------------------------------------------------------------------------------------------


@topics_app.command("delete", epilog=examples("kmq topics delete audit --yes"))
def delete(
    name: Annotated[str, _NAME],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a topic with its records, for good. Its queue files are deleted at once, which frees their space.

    The WAL is never rewritten: it keeps the records until its own retention deletes them, but no rebuild brings them
    back. A later message creates the topic again; its offsets continue after those of the deleted records.
    """
    settings = load()
    _refuse_own(name, "deleted")
    if (there := elsewhere()) is not None:
        if not yes:
            raise ConfigError(f"topic {name}: give --yes to delete it with its messages at {there.url}")
        _ask_topic("DELETE", name)
        print(f"topic {name}: deleted, and its space is free. {_WAL_HINT}")
        return
    _require(settings, name)
    _require_leader(settings)
    found = describe(settings, name)
    from_seq = topics.from_seq_of(settings.data, name)
    what = f"topic {name}: {found['messages']:,} messages, {found['bytes']:,} bytes, {found['partitions']} partition(s)"
    if not yes:
        confirm(what, "delete it", "Delete it for good?")
    request = topic_changes.delete(settings.data, name, from_seq)
    if not _is_carried_out(settings, request):
        print(f"{what}; deleted when the router has adopted it: at the next kmq up, if the broker is down")
        return
    if name in topics.names(settings.data):
        if topics.load(settings.data, name)[1] == found["from_seq"]:
            raise KmqError(f"topic {name}: was not deleted; the log of the broker says why (event request_refused)")
        what += "; a message has created it again"
    print(f"{what}: deleted, and their space is free. {_WAL_HINT}")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(topics_app, name="topics")
