"""`kmq cluster …`: begin a shard, see who leads it, hand the lead over, and bring back what was lost."""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kmq.cli.output import examples, open_queue, table
from kmq.config import terminal
from kmq.config.settings import load
from kmq.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from kmq.cluster.consul import Steps
    from kmq.replica.shard import RecoveryPlan, ShardKeys, ShardView

cluster_app = typer.Typer(
    no_args_is_help=True,
    help="A shard: three or five brokers that elect one leader. Nothing is replicated yet: docs/replication.md.",
    epilog=examples(
        "kmq cluster init --shard s --brokers a,b,c", "kmq cluster status --shard s", "kmq cluster resign --shard s"
    ),
)

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
    shard: Annotated[str, _SHARD] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and change nothing.")] = False,
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

        return init(keys, names, min_insync, dry_run)

    register, first = _run(shard, begin)
    would = "would be begun" if dry_run else "is begun"
    print(f"the shard {would}: {', '.join(register.brokers)}; min_insync={register.min_insync}; {first} leads first")
    print("this release elects a leader; it copies no records: each broker keeps only what it was sent itself")


@cluster_app.command(epilog=examples("kmq cluster status --shard s", "kmq cluster status --shard s --json"))
def status(
    shard: Annotated[str, _SHARD] = "",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help='{"shard", "broker", "role", "leader", "isr", "epoch", "version", "min_insync", "lineage", "problem",'
            ' "brokers": {<broker>: {"replica", "alive", "role", "version", "end", "problem"}}}',
        ),
    ] = False,
) -> None:
    """Show who leads, the ISR, and each broker's replica. Exit code 1 if the shard has no living leader."""

    def read(keys: "ShardKeys", broker: str) -> "Steps[dict[str, Any]]":
        from kmq.replica.shard import document, read_shard

        view = yield from read_shard(keys)
        return document(keys.shard, broker, view)

    found = _run(shard, read)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    if found["problem"]:
        raise typer.Exit(EXIT_FAILED)


def _show(found: dict[str, Any]) -> None:
    console = terminal.console()
    leader = f"led by {found['leader']} since epoch {found['epoch']}" if found["leader"] else "has no leader"
    console.print(
        f"shard {found['shard']} {leader}; ISR {','.join(found['isr']) or '-'} (at least {found['min_insync']});"
        f" version {found['version']}",
        markup=False,
    )
    rows = table("broker", "replica", "role", ">version", ">end", "problem")
    for name, each in sorted(found["brokers"].items()):
        if each is None:
            rows.add_row(escape(name), "-", "never seen", "", "", "")
            continue
        version = "" if each["version"] is None else str(each["version"])
        role = each["role"] if each["alive"] else "away"
        rows.add_row(escape(name), escape(each["replica"]), role, version, str(each["end"]), each["problem"])
    console.print(rows)
    if found["problem"]:
        console.print(f"problem: {found['problem']}", markup=False)


@cluster_app.command(epilog=examples("kmq cluster resign", "kmq cluster resign --shard s"))
def resign(shard: Annotated[str, _SHARD] = "") -> None:
    """If this broker (KMQ_BROKER) leads, let another member of the ISR lead. Else change nothing.

    Exit code 75 if no other member of the ISR is alive.
    """

    def hand_over(keys: "ShardKeys", broker: str) -> "Steps[tuple[str, str | None]]":
        from kmq.replica.shard import resign

        successor = yield from resign(keys, broker)
        return broker, successor

    broker, successor = _run(shard, hand_over)
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

    Exit code 1, with what each replica has, if too few of them are there or
    if their promises fork. A run that was interrupted goes on when it is
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
    if not _is_wanted(what, dry_run, yes):
        return

    def carry_out(keys: "ShardKeys", _: str) -> "Steps[str]":
        from kmq.replica.shard import recover

        return recover(keys, view, made)

    print(f"recovered: {_run(shard, carry_out)} leads")


def _is_wanted(what: str, dry_run: bool, yes: bool) -> bool:
    """Return True if it is to be done: `yes` was given, or the person at the terminal says so."""
    if dry_run:
        print(f"{what}; nothing was changed")
        return False
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{what}: there is no terminal to ask on; give --yes to do it")
        typer.confirm(f"{what}. Go on?", abort=True)
    return True


def add_to(app: typer.Typer) -> None:
    app.add_typer(cluster_app, name="cluster")
