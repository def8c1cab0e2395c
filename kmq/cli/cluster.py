"""`kmq cluster …`: begin a shard, see who leads it, hand the lead over, and bring back what was lost."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kmq.broker.data_directory import broker_is_down
from kmq.broker.door import known_shard
from kmq.broker.supervisor import is_data
from kmq.cli.output import counting, examples, is_wanted, open_queue, print_table, seconds
from kmq.config import terminal
from kmq.config.settings import load
from kmq.errors import EXIT_CORRUPT, EXIT_FAILED, EXIT_OK, EXIT_RETRY, ConfigError, CorruptError, RetryError

if TYPE_CHECKING:
    from kmq.cluster.consul import Steps
    from kmq.replica.compare import Ask
    from kmq.replica.disks import DirectoryState
    from kmq.replica.shard import RecoveryPlan, ShardKeys, ShardView

cluster_app = typer.Typer(
    no_args_is_help=True,
    help="A replicated cluster (a shard): three or five brokers that elect one leader. See docs/replicated-cluster.md.",
    epilog=examples(
        "kmq cluster init --shard s --brokers a,b,c", "kmq cluster status --shard s", "kmq cluster resign --shard s"
    ),
)

_CONSUL_S = 3.0  # longest wait before status continues without Consul
_SHARD = typer.Option("--shard", metavar="NAME", help="The shard; default: KMQ_SHARD.")
_DRY_RUN = typer.Option("--dry-run", help="Check everything, say what would be done and lost, and change nothing.")
_YES = typer.Option("--yes", help="Do not ask.")


def _run(shard: str, steps: "Callable[[ShardKeys, str], Steps[Any]]") -> Any:
    """Carry out steps on the keys of the shard; they get the keys and the name of this broker."""
    name = shard or load().shard
    if not name:
        raise ConfigError("--shard: name the shard, or set KMQ_SHARD")
    with open_queue() as queue:
        from kmq.replica.shard import ShardKeys

        return queue.run(steps(ShardKeys(queue.keys, name), queue.place.broker))


@cluster_app.command(
    epilog=examples(
        "kmq cluster init --shard s --brokers a,b,c --dry-run", "kmq cluster init --shard s --brokers a,b,c"
    )
)
def init(
    brokers: Annotated[
        str,
        typer.Option("--brokers", metavar="NAMES", help="Their KMQ_BROKER, with commas; 1, 3 or 5 of them, for good."),
    ],
    min_insync: Annotated[
        int | None,
        typer.Option("--min-insync", help="Replicas that must have a message; default: a majority of the brokers."),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="BROKER", help="Whose records the shard begins with; default: who has any."),
    ] = None,
    shard: Annotated[str, _SHARD] = "",
    dry_run: Annotated[bool, _DRY_RUN] = False,
) -> None:
    """Begin a shard, once all of its brokers are up and wait for it.

    Exit code 75 while a broker is not there, 65 if more than one of them has
    records, 78 if the shard was begun before.
    """
    from kmq.cluster.register import check_size

    names = [name.strip() for name in brokers.split(",")]
    try:
        check_size(names, min_insync)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None

    def begin(keys: "ShardKeys", _: str) -> "Steps[Any]":
        from kmq.replica.shard import init

        return init(keys, names, min_insync, dry_run, origin)

    register, first = _run(shard, begin)
    would = "would be begun" if dry_run else "is begun"
    print(f"the shard {would}: {', '.join(register.brokers)}; min_insync={register.min_insync}; {first} leads first")


@cluster_app.command(epilog=examples("kmq cluster status --shard s", "kmq cluster status --shard s --json"))
def status(
    shard: Annotated[str, _SHARD] = "",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help='{"shard", "broker", "role", "leader", "isr", "epoch", "version", "min_insync", "lineage", "problem",'
            ' "as_of", "brokers": {<broker>: {"replica", "alive", "host", "role", "version", "end", "as_of",'
            ' "problem"}}}',
        ),
    ] = False,
) -> None:
    """Show who leads, the ISR, and each broker's replica, with the age of what it says.

    Exit code 1 if the shard has a problem: no living leader, nothing is
    committed, a broker that is away or out of the ISR. If Consul does not
    answer within 3 s: what this broker knew last, and since when.
    """
    found = _read_status(shard)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    if found["problem"]:
        raise typer.Exit(EXIT_FAILED)


def _read_status(shard: str) -> dict[str, Any]:
    """Return the shard's status from Consul, or this broker's own view of it, with `as_of`. Raises RetryError."""
    settings = load()
    name = shard or settings.shard
    if not name:
        raise ConfigError("--shard: name the shard, or set KMQ_SHARD")
    with open_queue() as queue:
        place = queue.place
    from kmq.cluster.consul import ConsulError, Transport
    from kmq.cluster.presence import Keys
    from kmq.replica.shard import ShardKeys, document, read_shard, shortage

    async def read() -> "ShardView":
        transport = Transport(place.address)
        try:
            async with asyncio.timeout(_CONSUL_S):
                return await transport.run(read_shard(ShardKeys(Keys(place.cluster), name)))
        finally:
            await transport.close()

    try:
        view = asyncio.run(read())
    except (ConsulError, TimeoutError) as error:
        why = str(error) or f"no answer within {_CONSUL_S:g} s"
        shard_row = known_shard(settings.pipes)
        if shard_row.get("shard") != name:
            raise RetryError(f"Consul: {why}; this broker knows nothing of the shard {name} either") from error
        return shard_row | {"problem": f"consul_unreachable: {why}; this is what broker {place.broker} knew last"}
    found = document(name, place.broker, view) | {"as_of": round(time.time(), 3)}
    return found | {"problem": found["problem"] or shortage(view)}


def _show(found: dict[str, Any]) -> None:
    from kmq.cli.top.screen import duration

    console = terminal.console()
    age_s = time.time() - found["as_of"]
    if age_s > _CONSUL_S:
        console.print(f"as of {age_s:.0f} s ago", markup=False)
    leader = f"led by {found['leader']} since epoch {found['epoch']}" if found["leader"] else "has no leader"
    console.print(
        f"shard {found['shard']} {leader}; ISR {','.join(found['isr']) or '-'} (at least {found['min_insync']});"
        f" version {found['version']}",
        markup=False,
    )
    rows = list[tuple[str, ...]]()
    for name, each in sorted(found["brokers"].items()):
        if each is None:
            rows.append((escape(name), "-", "never seen"))
            continue
        version = "" if each["version"] is None else str(each["version"])
        role = each["role"] if each["alive"] else "away"
        at = each.get("as_of")  # None: of an older release
        age = f"{duration(max(1, math.ceil(time.time() - at)))} ago" if at is not None else ""
        rows.append((escape(name), escape(each["replica"]), role, version, str(each["end"]), age, each["problem"]))
    print_table(("broker", "replica", "role", ">version", ">end", ">as of", "problem"), rows, markup=True)
    if found["problem"]:
        console.print(f"problem: {found['problem']}", markup=False)
    if found["problem"] == "isr_replaced":
        print("each broker of the ISR runs with another directory; kmq cluster recover says what to do")


@cluster_app.command(epilog=examples("kmq cluster resign", "kmq cluster resign --wait --timeout 8s"))
def resign(
    shard: Annotated[str, _SHARD] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return once the doors of the next leader are open.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="With --wait: give up after this time.")
    ] = "10s",
) -> None:
    """If this broker (KMQ_BROKER) leads, let another member of the ISR lead. Else change nothing.

    Exit code 75 if no other member of the ISR is alive, or if --wait took too long.
    """
    patience_s = seconds("--timeout", timeout)

    def transfer_leadership(keys: "ShardKeys", broker: str) -> "Steps[tuple[str, str | None]]":
        from kmq.replica.shard import await_open, resign

        successor = yield from resign(keys, broker)
        if wait and successor is not None:
            successor = yield from await_open(keys, broker, patience_s)
        return broker, successor

    broker, successor = _run(shard, transfer_leadership)
    print(f"{successor} leads now" if successor is not None else f"{broker} does not lead; nothing was changed")


@cluster_app.command(epilog=examples("kmq cluster recover --shard s --dry-run", "kmq cluster recover --shard s --yes"))
def recover(
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="BROKER", help="Where promises fork: the broker whose records count."),
    ] = None,
    shard: Annotated[str, _SHARD] = "",
    dry_run: Annotated[bool, _DRY_RUN] = False,
    yes: Annotated[bool, _YES] = False,
) -> None:
    """Bring back a register that Consul has lost, or has an old state of, from what the replicas have promised.

    Exit code 1, with what each replica has and what to type, if too few of
    them are there, if none of the ISR is, or if their promises fork. A run that was interrupted goes on when it is
    repeated.
    """

    def plan(keys: "ShardKeys", _: str) -> "Steps[tuple[ShardView, RecoveryPlan | None]]":
        from kmq.replica.shard import plan_recovery, read_shard

        view = yield from read_shard(keys)
        return view, plan_recovery(keys, view, origin)

    view, made = _run(shard, plan)
    if made is None:
        print("the register is the newest that any living replica has promised; nothing was changed")
        return
    base, brokers = made.base, ", ".join(made.brokers)
    away = ", ".join(sorted({*base.brokers} - {*map(view.broker, filter(view.is_alive, view.members))}))
    print(f"{brokers} can go on from version {base.version.number}, epoch {base.epoch}, which is the newest promise")
    if away:
        print(f"not here: {away}; what only they have would be cut when they come back")
    what = f"one of {brokers} leads next, alone in the ISR until others have caught up"
    if not is_wanted(what, dry_run, yes):
        return

    def carry_out(keys: "ShardKeys", _: str) -> "Steps[str]":
        from kmq.replica.shard import recover

        return recover(keys, view, made)

    print(f"recovered: {_run(shard, carry_out)} leads")


@cluster_app.command(epilog=examples("kmq cluster reset --dry-run", "kmq cluster reset --yes"))
def reset(
    shard: Annotated[str, _SHARD] = "",
    dry_run: Annotated[bool, _DRY_RUN] = False,
    yes: Annotated[bool, _YES] = False,
) -> None:
    """Make this broker (KMQ_DATA) a new, empty replica, which gets all records from the leader. The broker is down.

    Nothing is deleted: what the directory has is moved into a directory
    reset-<time> in it, which you delete when you need its space.
    """
    from kmq.replica import disks

    data, pipes, state = _directory(shard)
    with broker_is_down(data, pipes):
        print(f"{data}: {state.text}")
        what = "all of it is moved aside, and the next start makes a new replica; only others have its records then"
        if is_wanted(what, dry_run, yes):
            print(f"{data}: is empty; what it had is in {disks.reset(data, state)}")


@cluster_app.command(epilog=examples("kmq cluster detach --dry-run", "kmq cluster detach --yes"))
def detach(
    shard: Annotated[str, _SHARD] = "",
    dry_run: Annotated[bool, _DRY_RUN] = False,
    yes: Annotated[bool, _YES] = False,
) -> None:
    """Make a directory (KMQ_DATA) that survived its shard a broker of its own. The broker is down.

    It keeps its records and offsets, under a new id and lineage: to readers
    and Spark it is another broker, and no replica of the shard follows it.
    """
    from kmq.replica import disks

    data, pipes, state = _directory(shard)
    with broker_is_down(data, pipes):
        print(f"{data}: {state.text}")
        what = "it leaves its shard for good; what only the other replicas have is lost to it"
        if is_wanted(what, dry_run, yes):
            lineage = disks.detach(data, state)
            print(f"{data}: is a broker of its own, of the lineage {lineage}; start it without KMQ_SHARD")


def _directory(shard: str) -> "tuple[str, str, DirectoryState]":
    """Return KMQ_DATA, KMQ_PIPES and the shard's state in the directory."""
    from kmq.replica.disks import look

    settings = load()
    name = shard or settings.shard
    if not name:
        raise ConfigError("--shard: name the shard of this directory, or set KMQ_SHARD")
    return settings.data, settings.pipes, look(settings.data, name)


@cluster_app.command(epilog=examples("kmq cluster verify", "kmq cluster verify /backup/a/data /backup/b/data"))
def verify(
    directories: Annotated[
        list[str] | None,
        typer.Argument(help="Two or more data directories of one shard; default: the brokers of the shard."),
    ] = None,
    shard: Annotated[str, _SHARD] = "",
) -> None:
    """Compare the records of the brokers of a shard while they run, or of its data directories, as far as all have them.

    Looks at the committed WAL by seq and at the queues by offset. Exit code
    0: nothing differs; 1: something does; 65: damage; 75: a broker is away.
    """
    if not directories:
        raise typer.Exit(_verify_brokers(shard))
    if len({*directories}) < 2:
        raise typer.BadParameter("give two or more directories")
    wrong = next((each for each in directories if not is_data(each)), None)
    if wrong is not None:
        raise ConfigError(f"{wrong}: is no data directory")
    from kmq.replica import compare

    raise typer.Exit(asyncio.run(_compare(compare.directories(directories), {})))


def _verify_brokers(shard: str) -> int:
    def read(keys: "ShardKeys", broker: str) -> "Steps[tuple[ShardView, str, str]]":
        from kmq.replica.shard import read_shard

        return (yield from read_shard(keys)), keys.shard, broker

    view, name, broker = _run(shard, read)

    async def compare_all() -> int:
        from kmq.replica import compare

        async with compare.brokers(view, name, broker, load()) as (sides, away):
            return await _compare(sides, away)

    return asyncio.run(compare_all())


async def _compare(sides: "Mapping[str, Ask]", away: dict[str, Exception]) -> int:
    """Compare, print the differences, and return the exit code. `away`: missing brokers, with the reasons."""
    from kmq.replica.compare import ReplicaComparison

    differ = 0
    with counting("compared {task.completed:,.0f} records") as advance:
        comparison = ReplicaComparison(sides, advance)
        async for found in comparison.logs():
            differ += bool(found.difference)
            if found.difference:
                print(found.difference)
            elif found.last < found.first:
                print(f"{found.log}: no record that all have")
            else:
                print(f"{found.log}: {found.first} to {found.last} equal")
    lost = away | comparison.lost
    for name, error in lost.items():
        print(f"kmq: {name}: {error}; it was not compared, or not to the end", file=sys.stderr)
    if differ:
        return EXIT_FAILED
    if any(isinstance(error, CorruptError) for error in lost.values()):
        return EXIT_CORRUPT
    return EXIT_RETRY if lost else EXIT_OK


def add_to(app: typer.Typer) -> None:
    app.add_typer(cluster_app, name="cluster")
