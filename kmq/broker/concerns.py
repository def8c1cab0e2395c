"""Judge what needs an operator although the broker may be ready: one Finding for each concern, from the stats page.

Source      Words that the processes themselves have written, because a reader that comes once has no history: each
            process notes how it is restarted, how long its syncs take, since when it waits (kmq/broker/waits.py).
Invariant   A start, a stop, a restart by an operator and a burst of messages never raise a concern
            (docs/decisions/findings.md has the thresholds and the reason for each).
"""

import time
from collections.abc import Callable, Iterator

from kmq.broker import clock, findings
from kmq.broker.findings import WARNING, Finding
from kmq.broker.stats import AGENT, PROCESSES, RESTARTED_S, StatsPage
from kmq.config.settings import STAGES, Settings
from kmq.config.values import GIB

CONCERNS = (  # in the order of importance: a cause comes before its consequences
    "damage_found",
    "tokens_missing",
    "oom_killed",
    "restarting",
    "unclean_end",
    "clock_suspect",
    "clock_behind",
    "disk_low",
    "inodes_low",
    "quota_low",
    "slow_sync",
    "link_stuck",
    "link_full",
    "group_stalled",
    "agent_ended",
    "consul_lost",
)
RESTARTS = 3  # so many restarts in a row, none after a life of RESTARTED_S
OOM_S = 3600  # an OOM kill is a concern for so long
SLOW_SYNCS, SLOW_S = 4, 60  # so many of the last 16 syncs were slow, the last of them within this time
STUCK_S, FULL_S, PAUSE_S = 10, 60, 2  # a ring without room: at once, on the whole, and what ends "on the whole"
BEHIND_S = 60  # less is a clock that is corrected
_FREE_SHARE, _FREE_BYTES, _FREE_INODES = 5, 2 * GIB, 20_000  # low: less than this part, but never more than this
_QUOTA_PERCENT = 95
_NS = 1_000_000_000
_READERS = {"framer": ("framed", "durability"), "durability": ("durable", "router")}  # writer → ring, its reader

Judge = Callable[[StatsPage, Settings], Iterator[Finding]]


def judge_concerns(page: StatsPage, settings: Settings) -> list[Finding]:
    """Return what needs an operator, the most important first. `page`: a copy, of a broker that runs."""
    found = [finding for judge in _JUDGES for finding in judge(page, settings)]
    return sorted(found, key=lambda finding: CONCERNS.index(finding.code))


def _warning(code: str, about: str, why: str, advice: str, *processes: str) -> Finding:
    return Finding(code, about, why, advice, processes, WARNING)


def _age_s(nanoseconds: int) -> float:
    """Return the seconds since a moment of CLOCK_MONOTONIC."""
    return (time.monotonic_ns() - nanoseconds) / _NS


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _damage(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    found = {name: row.damage for name, row in page.rows.items() if row.damage}
    if found:
        why = f"{sum(found.values())} damaged blocks or files were found: what is in them is not handed out"
        advice = (
            f"kmq verify names them; heal from the other copy {findings.of_repair()}; then look at the disk"
            f" ({findings.of_kernel()})"
        )
        yield _warning("damage_found", settings.data, why, advice, *found)


def _tokens(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    names = [name for name in ("ingress", "gateway") if page.rows[name].tokens_missing]
    if names:
        why = f"KMQ_TOKENS={settings.tokens} cannot be read: the tokens that were read before stay in force"
        advice = (
            "put the file back, or make a new one with: kmq token new <name>; it is taken up within seconds,"
            " but a process that starts without it ends"
        )
        yield _warning("tokens_missing", settings.tokens, why, advice, *names)


def _oom(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["durability"]
    if row.oom_at and time.time() - row.oom_at < OOM_S:
        why = f"the kernel has killed a process of this container for lack of memory ({row.oom_kills} in all)"
        advice = f"raise the memory limit of the container; {findings.of_kernel()} says which process it was"
        yield _warning("oom_killed", "memory", why, advice)


def _restarting(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    for name in PROCESSES:
        row = page.rows[name]
        if row.restart_streak >= RESTARTS and _age_s(row.started) < RESTARTED_S:
            why = f"{name} was restarted {row.restart_streak} times in a row, each time within {RESTARTED_S // 60} min"
            advice = (
                f"look for event=failed and event=stage_ended ({findings.log_of(name, row.supervisor)}): exit code 75"
                " means that input or output failed, -9 or 137 that it was killed, often for lack of memory"
                f" ({findings.of_kernel()})"
            )
            yield _warning("restarting", name, why, advice, name)


def _unclean(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    names = [name for name in PROCESSES if (row := page.rows[name]).unclean and _age_s(row.started) < RESTARTED_S]
    if names:
        why = f"{', '.join(names)}: killed or crashed, and started again; nothing acknowledged is lost, nothing needs repair"
        advice = (
            "find out why: event=stage_ended and event=failed"
            f" ({findings.log_of(names[0], page.rows[names[0]].supervisor)});"
            f" {findings.of_kernel()} shows whether it was the OOM killer"
        )
        yield _warning("unclean_end", names[0] if len(names) == 1 else "broker", why, advice, *names)


def _clock(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    suspects = {name: page.rows[name] for name in STAGES if page.rows[name].clock_suspect}
    if suspects:
        row = max(suspects.values(), key=clock.steady_in_s)
        yield _warning("clock_suspect", "clock", clock.suspicion(row), clock.ADVICE, *suspects)
    behind_s = page.rows["framer"].clock_behind
    if behind_s >= BEHIND_S:
        why = (
            f"the time of day is {behind_s:,} s behind the last record: new records get the time of that record"
            " until the clock has caught up"
        )
        advice = "set the clock of the machine right (timedatectl); if it is right now, this ends by itself"
        yield _warning("clock_behind", "clock", why, advice, "framer")


def _disk(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["ingress"]
    room = "make room on that disk, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE"
    when = "messages are refused" if row.admission_name == "disk_full" else "messages will be refused soon"
    if row.disk_size and row.disk_free < min(row.disk_size // _FREE_SHARE, _FREE_BYTES):
        why = f"{row.disk_free >> 20:,} MiB of {row.disk_size >> 20:,} MiB are free: {when}"
        yield _warning("disk_low", settings.data, why, f"{room}; kmq log stat shows what takes it", "ingress")
    if row.inodes_total and row.inodes_free < min(row.inodes_total // _FREE_SHARE, _FREE_INODES):
        why = f"{row.inodes_free:,} of {row.inodes_total:,} inodes are free: {when}"
        advice = "delete files there, or topics with: kmq topics delete <topic>; df -i shows the inodes"
        yield _warning("inodes_low", settings.data, why, advice, "ingress")
    if row.quota_limit and row.quota_used * 100 >= row.quota_limit * _QUOTA_PERCENT:
        why = f"{row.quota_used >> 20:,} MiB of {row.quota_limit >> 20:,} MiB of KMQ_DATA_QUOTA are used"
        advice = "raise KMQ_DATA_QUOTA, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE"
        yield _warning("quota_low", settings.data, why, f"{advice}; kmq log stat shows what takes it", "ingress")


def _syncs(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["durability"]
    if row.slow_syncs >= SLOW_SYNCS and _age_s(row.slow_sync_at) < SLOW_S:
        why = f"{row.slow_syncs} of the last 16 syncs to disk took longer than a second: every reply waits for one"
        advice = (
            "look at the disk of KMQ_DATA and at who else uses it (iostat -x 1, dmesg on its machine); in a pod, at the"
            " class of the volume. Nothing is lost"
        )
        yield _warning("slow_sync", settings.data, why, advice, "durability")


def _links(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    for writer, (ring, reader) in _READERS.items():
        row = page.rows[writer]
        if row.silence():
            continue
        waits_s = _age_s(row.waits_since) if row.waits_since else 0.0
        if waits_s >= STUCK_S:
            why = (
                f"{writer} has waited {_duration(waits_s)} for room in the ring {ring}: {reader} takes nothing from it"
            )
            advice = f"look at {reader}: kmq status shows its state, its log line says what it waits for"
            yield _warning("link_stuck", ring, why, advice, writer, reader)
        elif row.full_since and _age_s(row.full_since) >= FULL_S and (waits_s or _age_s(row.waited_at) < PAUSE_S):
            full_s = _age_s(row.full_since)
            why = f"the ring {ring} has been full for {_duration(full_s)}: {reader} is slower than producers send"
            advice = "producers wait, nothing is lost; send less, or look at the disk of KMQ_DATA (iostat -x 1)"
            yield _warning("link_full", ring, why, advice, writer, reader)


def _groups(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["gateway"]
    if row.groups_stalled and not row.silence():
        why = (
            f"{row.groups_stalled} of {row.groups} consumer groups commit nothing although messages wait for them:"
            f" {row.group_stalled_lag:,} messages"
        )
        advice = (
            "kmq groups list names them; look at their consumers; forget a group that nobody uses with:"
            " kmq groups delete <group>"
        )
        yield _warning("group_stalled", "groups", why, advice, "gateway")


def _fleet(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows[AGENT]
    effect = "what the fleet says is not done here; messages are accepted and delivered"
    if row.state_name == "stopped" and row.exit_code:
        why = f"the agent has ended with exit code {row.exit_code}: {effect}"
        advice = f"correct what its last event=failed says ({findings.log_of(AGENT, row.supervisor)})"
        yield _warning("agent_ended", AGENT, why, f"{advice}; then start it again", AGENT)
    elif row.waits_since and not row.silence() and (lost_s := _age_s(row.waits_since)) >= STUCK_S:
        why = f"the agent has had no place in Consul for {_duration(lost_s)}: {effect}"
        advice = (
            "look at Consul (KMQ_CONSUL, KMQ_CONSUL_TOKEN); the reason is in event=consul_lost"
            f" ({findings.log_of(AGENT, row.supervisor)})"
        )
        yield _warning("consul_lost", AGENT, why, advice, AGENT)


_JUDGES: tuple[Judge, ...] = (
    _damage,
    _tokens,
    _oom,
    _restarting,
    _unclean,
    _clock,
    _disk,
    _syncs,
    _links,
    _groups,
    _fleet,
)
