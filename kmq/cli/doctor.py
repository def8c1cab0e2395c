"""`kmq doctor`: what is wrong with the broker and with its machine, and what to do."""

import errno
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, NamedTuple

import typer

from kmq import __version__, gateway
from kmq.broker import concerns, status, supervisor
from kmq.broker.concerns import Finding
from kmq.broker.health import LIFELESS, Verdict, state_of
from kmq.broker.stats import StatsPage, peek
from kmq.cli import machine
from kmq.cli.machine import ERROR, NOTE, OK, WARNING, Check
from kmq.cli.output import counting, examples
from kmq.config import terminal
from kmq.config.settings import STAGES, Settings, load
from kmq.errors import EXIT_FAILED, EXIT_OK, ConfigError, CorruptError, KmqError, pip_install
from kmq.log import identity

_COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "red"}


class Diagnosis(NamedTuple):
    """The results of all checks at one moment."""

    as_of: float
    checks: list[Check]
    findings: list[dict[str, str]]  # of the broker, as in kmq status

    @property
    def is_good(self) -> bool:
        return not any(check.level == ERROR for check in self.checks)

    def as_json(self) -> dict[str, object]:
        """Return the document of --json."""
        rows = [
            {"check": each.name, "level": each.level, "text": each.text, "advice": each.advice} for each in self.checks
        ]
        return {
            "as_of": self.as_of,
            "version": __version__,
            "ok": self.is_good,
            "checks": rows,
            "findings": self.findings,
        }


def diagnose(settings: Settings) -> Diagnosis:
    """Run all checks. Works whether or not the broker is up; creates nothing, and removes only unused doorbells."""
    page, found, verdict = _look(settings)
    is_up = page is not None and any(state_of(name, page.rows[name]) not in LIFELESS for name in STAGES)
    newest_s, unread = _newest_s(settings)
    own = [*_of_broker(settings, verdict), *found, *unread]
    pid = page.rows["ingress"].pid if page and is_up else 0
    steps: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("python", lambda: [machine.python(), _extra()]),
        ("open files", lambda: [machine.open_files(settings, pid)]),
        ("shared memory", lambda: [machine.shared_memory(settings, is_up), machine.leftovers(settings)]),
        ("doorbells", lambda: [machine.doorbells(settings, is_up)]),
        ("memory", lambda: [machine.memory(settings)]),
        ("the clock", lambda: [machine.clock(newest_s)]),
        ("permissions", lambda: machine.permissions(settings)),
        ("the disk", lambda: [machine.kind(settings), machine.space(settings)]),
        ("the speed of the disk", lambda: [machine.speed(settings)]),
        ("ports", lambda: machine.ports(settings, page, gateway.is_installed())),
        ("the advertised address", lambda: machine.advertised(settings, is_up)),
        ("Java", lambda: [_java()]),
        *([("KMQ_TIER", lambda: [_tier(settings)])] if settings.tier else []),
    ]
    for title, step in steps:
        with counting(f"looking at {title}"):
            own += _guarded(title, step)
    return Diagnosis(time.time(), own, [finding.fields() for finding in verdict.findings])


def _guarded(title: str, step: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return the checks of a step. If the step itself fails, return a warning: the other steps still run."""
    try:
        return list(step())
    except (OSError, KmqError) as error:
        return [Check(title, WARNING, f"could not be looked at: {error}", _advice(error))]


def _advice(error: OSError | KmqError) -> str:
    """Return what to do about an error of a check, by its cause."""
    if isinstance(error, PermissionError):
        return "run as the broker's user"
    if isinstance(error, CorruptError):
        return "see all that is damaged with kmq verify; then stop the broker, and mend it with kmq verify --repair"
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS):
        return f"look at the disk: {concerns.of_kernel()}"
    if isinstance(error, OSError):
        return f"see what is at {error.filename}" if error.filename else "try again; report it if it repeats"
    return "do what the message says"


# --- the broker ------------------------------------------------------------------------------------------------------


def _look(settings: Settings) -> tuple[StatsPage | None, list[Check], Verdict]:
    """Return the stats page of this broker, why it cannot be read, and the verdict on the broker."""
    try:
        page = peek(settings.instance)
        verdict = status.collect(settings).verdict
        return (page if page is not None and page.serves(settings.data) else None), [], verdict
    except (OSError, KmqError) as error:
        check = Check("broker", ERROR, f"its stats page cannot be read: {error}", _advice(error))
        return None, [check], Verdict([], [], [])


def _of_broker(settings: Settings, verdict: Verdict) -> Iterator[Check]:
    if [reason.about for reason in verdict.reasons] == ["broker"]:
        yield _down(settings, verdict.reasons[0])
    else:
        for finding in verdict.reasons:
            yield _of_finding(finding, ERROR)
    for finding in verdict.warnings:
        yield _of_finding(finding, WARNING)
    if not verdict.reasons:
        yield Check("broker", OK, "ready: a message that is sent now would be stored")


def _of_finding(finding: Finding, level: str) -> Check:
    return Check(f"broker: {finding.code}", level, finding.why, f"{finding.advice}; more in {finding.section}")


def _down(settings: Settings, finding: Finding) -> Check:
    """Return a note: a broker that was never started, or was stopped in order, is no error before a start."""
    if supervisor.taken(settings):
        return Check("broker", WARNING, finding.why, finding.advice)
    return Check("broker", NOTE, "it does not run", finding.advice)


def _newest_s(settings: Settings) -> tuple[float | None, list[Check]]:
    """Return the age of the newest record, None without records; and why it cannot be read."""
    if not supervisor.is_data(settings.data):
        return None, []
    from kmq.log import show

    try:
        rows = list(show.stat(settings.data, "append"))
    except (OSError, KmqError) as error:
        return None, [Check("log", ERROR, f"the newest record cannot be read: {error}", _advice(error))]
    return (rows[0].newest_s if rows and rows[0].end > rows[0].first else None), []


# --- what is installed -----------------------------------------------------------------------------------------------


def _extra() -> Check:
    if gateway.is_installed():
        return Check("gateway", OK, "gRPC, HTTP and consumers: installed")
    return Check("gateway", NOTE, "not installed: no gRPC, no HTTP, no consumers", pip_install("gateway"))


def _java() -> Check:
    from kmq.spark.sessions import find_java

    try:
        return Check("java", OK, f"{find_java()}")
    except ConfigError as error:
        return Check("java", NOTE, f"only pipelines and kmq sql on Spark need it: {error}")


# --- the copy off the machine ----------------------------------------------------------------------------------------

_STORE_S = 20.0  # longest wait for the store; its own deadlines are for large objects
_SKEW_S = 60.0


def _tier(settings: Settings) -> Check:
    """Try the store by a key, which is deleted again: does it keep create-if-absent, and what time has it?"""
    found: list[Check] = []
    thread = threading.Thread(target=lambda: found.append(_try_store(settings)), daemon=True)
    thread.start()
    thread.join(_STORE_S)
    if found:
        return found[0]
    text = f"KMQ_TIER={settings.tier}: has not answered within {_STORE_S:g} s"
    return Check("tier", WARNING, text, "look at the network to the store; nothing but the copy waits for it")


def _try_store(settings: Settings) -> Check:
    from kmq.tier.store import RefusedError, StoreError, clock_offset, open_store, probe

    where = f"KMQ_TIER={settings.tier}"
    try:
        store = open_store(settings.tier)
        prefix = identity.lineage(settings.data) if supervisor.is_data(settings.data) else "doctor"
        probe(store, prefix)
        offset = clock_offset(store, prefix)
    except ConfigError as error:
        return Check("tier", ERROR, str(error), "correct KMQ_TIER, or install what it names")
    except RefusedError as error:
        return Check("tier", ERROR, f"{where}: {error}", "nothing is copied there; name another store")
    except StoreError as error:
        advice = (
            "see its words: network, credentials, or the rights to get, put and list; nothing but the copy waits for it"
        )
        return Check("tier", WARNING, f"{where}: {error}", advice)
    except (OSError, KmqError) as error:
        return Check("tier", WARNING, f"{where}: could not be looked at: {error}", _advice(error))
    if abs(offset) > _SKEW_S:
        text = f"{where}: its clock is {abs(offset):,.0f} s {'ahead' if offset > 0 else 'behind'}"
        return Check("tier", WARNING, text, "set the clock of this machine; S3 refuses requests from 15 minutes on")
    return Check("tier", OK, f"{where}: keeps create-if-absent, and has the same time")


# --- the command -----------------------------------------------------------------------------------------------------


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see above.")] = False,
) -> None:
    """Find what is wrong with the broker and its machine, and say what to do. Nothing is changed or made here.

    Checked: the broker's findings (kmq status), limits, shared memory, memory,
    clock, permissions, disk and its speed, ports, KMQ_KAFKA_ADVERTISE, Java, and the store of KMQ_TIER, in which a
    key is made and deleted. Exit code 1 if a check is an error. Works with the broker up or down.

    --json: {"as_of", "version", "ok", "checks": [{"check", "level", "text",
    "advice"}, …], "findings"}. level: ok, note, warning or error.
    """
    found = diagnose(load())
    print(json.dumps(found.as_json())) if as_json else _print(found)
    raise typer.Exit(EXIT_OK if found.is_good else EXIT_FAILED)


def _print(found: Diagnosis) -> None:
    console = terminal.console()
    for check in found.checks:
        console.print(f"[{_COLOURS[check.level]}]{check.level:8}[/]", end="", highlight=False)
        console.print(f"{check.name}: {check.text}", highlight=False, markup=False, soft_wrap=True)
        if check.advice and check.level != OK:
            console.print(f"        do: {check.advice}", highlight=False, markup=False, soft_wrap=True)
    counts = {level: sum(check.level == level for check in found.checks) for level in machine.LEVELS}
    shown = (f"{count} {level}{'s' if count != 1 and level != OK else ''}" for level, count in counts.items())
    console.print(", ".join(shown), highlight=False)


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(epilog=examples("kmq doctor", "kmq doctor --json"))(doctor)
