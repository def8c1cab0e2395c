"""Decide if a broker is ready, and if not, why: one verdict for `kmq status`, /readyz, gRPC health, metrics, probes.

Ready       A message sent now is accepted, and on disk in a moment: every stage is in its loop and no stage waits for
            space. The gateway counts if this broker has one, unless it has ended in order: with exit code 0.
            In a shard the replica counts, too. A follower is ready while its replica is in the ISR: what is sent to it
            is stored by its leader. A leader whose doors are open is ready, also while too few replicas answer for new
            messages: no other broker of the shard could take them, and readers go on. Without Consul it is not: another
            one may lead by now, and it would not know.
Source      The stats page alone, so that all readers of one moment get the same verdict. Each process writes there what
            it knows: why ingress refuses messages, what a stage waits for, how long the certificates in use are valid.
            A reader that comes once has no history, so each process also notes how it is restarted, how long its syncs
            take, and since when it waits (stage.py).
Warning     An operator must act, but messages are accepted and delivered meanwhile (docs/decisions/readiness.md says
            why an expired certificate is only a warning).
Invariant   Every code has a section of its name in the runbook, docs/operations.md, so `section` never leads nowhere.
            A start, a stop, a restart by an operator and a burst of messages never raise a concern
            (docs/decisions/findings.md has the thresholds and the reason for each).
Not covered If containers do not share process ids, a process that is only `silent` may be reported as `dead`.
"""

import os
import time
from collections.abc import Callable, Iterator

from kmq.access import certificate
from kmq.access.certificate import Validity
from kmq.broker import clock
from kmq.broker.stats import ADMISSIONS, AGENT, FRESH_S, PROCESSES, REPLICA, RESTARTED_S, Row, StatsPage
from kmq.config.settings import STAGES, Settings
from kmq.config.values import GIB
from kmq.errors import EXIT_NAMES, NO_RESTART

# --- findings --------------------------------------------------------------------------------------------------------

RUNBOOK = "docs/operations.md"
ERROR, WARNING = "error", "warning"  # not ready; ready, but an operator must act


class Finding:
    """One thing that is wrong with a broker.

    `about`: the process or file; `why`: what is seen, a sentence; `advice`: what to do; `processes`: whose it is.
    """

    __slots__ = ("about", "advice", "code", "processes", "severity", "why")

    def __init__(
        self, code: str, about: str, why: str, advice: str, processes: tuple[str, ...], severity: str = ERROR
    ) -> None:
        self.code, self.about, self.why, self.advice, self.processes = code, about, why, advice, processes
        self.severity = severity

    def __str__(self) -> str:
        return f"{self.code}: {self.why}"

    @property
    def section(self) -> str:
        """Return where the documents explain this code."""
        return f"{RUNBOOK}#{self.code}"

    def fields(self) -> dict[str, str]:
        """Return what JSON shows."""
        texts = {"about": self.about, "why": self.why, "advice": self.advice}
        return {"code": self.code, "severity": self.severity, **texts, "section": self.section}


def is_in_pod() -> bool:
    """Return True if this process runs in a pod of Kubernetes, which sets this name in every container."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def log_of(process: str, supervisor: int = 0) -> str:
    """Return where the log of a process is. `supervisor`: who has started it; `kmq up` writes a file also in a pod."""
    if supervisor or not is_in_pod():
        return "KMQ_PIPES/kmq.log"
    return f"kubectl logs {os.uname().nodename} -c {process} --previous"


def of_repair() -> str:
    """Return how damaged files are healed."""
    if is_in_pod():
        return "by the Job of docs/kubernetes.md#repair-backup-restore"
    return "with: kmq down && kmq verify --repair && kmq up"


def of_kernel() -> str:
    """Return what shows the kernel's messages about this machine: who was killed for lack of memory, broken disks."""
    return f"kubectl describe pod {os.uname().nodename}" if is_in_pod() else "dmesg"


# --- concerns --------------------------------------------------------------------------------------------------------
# What needs an operator although the broker may be ready: one function for each kind of concern.

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
    "kafka_misdirected",
    "agent_ended",
    "consul_lost",
    "not_enough_replicas",
    "hw_stands",
    "isr_small",
)
RESTARTS = 3  # so many restarts in a row, none after a life of RESTARTED_S
OOM_S = 3600  # an OOM kill is a concern for so long
SLOW_SYNCS, SLOW_S = 4, 60  # so many of the last 16 syncs were slow, the last of them within this time
STUCK_S, FULL_S, PAUSE_S = 10, 60, 2  # a ring without room: at once, on the whole, and what ends "on the whole"
SMALL_S = 60  # an ISR without a broker of the shard: a restart takes less
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
        count = sum(found.values())
        what = "1 damaged block or file was found" if count == 1 else f"{count} damaged blocks or files were found"
        why = f"{what}: what is damaged is not handed out"
        advice = f"kmq verify names them; heal from the other copy {of_repair()}; then look at the disk ({of_kernel()})"
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
        advice = f"raise the memory limit of the container; {of_kernel()} says which process it was"
        yield _warning("oom_killed", "memory", why, advice)


def _restarting(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    for name in PROCESSES:
        row = page.rows[name]
        if row.restart_streak >= RESTARTS and _age_s(row.started) < RESTARTED_S:
            why = f"{name} was restarted {row.restart_streak} times in a row, each time within {RESTARTED_S // 60} min"
            advice = (
                f"look for event=failed and event=stage_ended ({log_of(name, row.supervisor)}): exit code 75"
                " means that input or output failed, -9 or 137 that it was killed, often for lack of memory"
                f" ({of_kernel()})"
            )
            yield _warning("restarting", name, why, advice, name)


def _unclean(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    names = [name for name in PROCESSES if (row := page.rows[name]).unclean and _age_s(row.started) < RESTARTED_S]
    if names:
        why = f"{', '.join(names)}: killed or crashed, and started again; nothing acknowledged is lost, nothing needs repair"
        advice = (
            "find out why: event=stage_ended and event=failed"
            f" ({log_of(names[0], page.rows[names[0]].supervisor)});"
            f" {of_kernel()} shows whether it was the OOM killer"
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


# The commands that free room now; settings need a restart.
_FREE_NOW = "kmq log stat shows what takes room; kmq topics set <topic> retention_bytes=<n> and kmq topics delete <topic> free it"


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
        yield _warning("quota_low", settings.data, why, f"{advice}; {_FREE_NOW}", "ingress")


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


def _kafka(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["gateway"]
    if row.kafka_misdirected and not row.silence():
        count = row.kafka_misdirected
        who = (
            "1 client of Kafka asks where the broker is and never comes"
            if count == 1
            else (f"{count} clients of Kafka ask where the broker is and never come")
        )
        told = [f"{host}:{port}" for host, port in (settings.kafka_advertise or {}).values()]
        where = (
            f"KMQ_KAFKA_ADVERTISE={', '.join(told)}" if told else "by default where their first connection has arrived"
        )
        why = f"{who} to the address that they are told, {where}"
        advice = (
            "set KMQ_KAFKA_ADVERTISE=<host>:<port> to where clients reach this broker, and start it again;"
            " event=kafka_misdirected in the gateway's log names one of them"
        )
        yield _warning("kafka_misdirected", "kafka", why, advice, "gateway")


def _fleet(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows[AGENT]
    effect = "what the fleet says is not done here; messages are accepted and delivered"
    if row.state_name == "stopped" and row.exit_code:
        why = f"the agent has ended with exit code {row.exit_code}: {effect}"
        advice = f"correct what its last event=failed says ({log_of(AGENT, row.supervisor)})"
        yield _warning("agent_ended", AGENT, why, f"{advice}; then start it again", AGENT)
    elif row.waits_since and not row.silence() and (lost_s := _age_s(row.waits_since)) >= STUCK_S:
        why = f"the agent has had no place in Consul for {_duration(lost_s)}: {effect}"
        advice = (
            "look at Consul (KMQ_CONSUL, KMQ_CONSUL_TOKEN); the reason is in event=consul_lost"
            f" ({log_of(AGENT, row.supervisor)})"
        )
        yield _warning("consul_lost", AGENT, why, advice, AGENT)


def _shard(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    if page.rows["ingress"].admission_name == "not_enough_replicas":
        why = (
            "fewer replicas of the shard answer than must have a message: acknowledged producers are refused, others"
            " wait; stored messages are read"
        )
        advice = "start the brokers of the shard that are away (kmq cluster status); it resumes by itself"
        yield _warning("not_enough_replicas", REPLICA, why, advice, "ingress")
    row = page.rows[REPLICA]
    if row.silence() or row.state_name == "stopped":
        return
    log = log_of(REPLICA, row.supervisor)
    if row.waits_since and (lost_s := _age_s(row.waits_since)) >= STUCK_S:
        why = f"the replica has had no place in Consul for {_duration(lost_s)}: it takes no part in elections"
        advice = f"look at Consul (KMQ_CONSUL, KMQ_CONSUL_TOKEN); the reason is in event=replica_consul_lost ({log})"
        yield _warning("consul_lost", REPLICA, why, f"{advice}; what was promised holds meanwhile", REPLICA)
    if row.role_name != "leading":
        return
    if row.behind_since and (stands_s := _age_s(row.behind_since)) >= STUCK_S:
        why = f"nothing was committed for {_duration(stands_s)}, although {row.last - row.hw:,} records wait for it"
        advice = "kmq cluster status shows which replica of the ISR is behind, or away: look at that broker"
        yield _warning("hw_stands", REPLICA, why, advice, REPLICA)
    if row.small_since and (small_s := _age_s(row.small_since)) >= SMALL_S:
        why = (
            f"{row.isr} of {row.brokers} replicas have been in the ISR for {_duration(small_s)}; with fewer than"
            f" {row.min_insync} nothing is committed"
        )
        advice = "kmq cluster status shows which one is away: start that broker, or look at its disk and network"
        yield _warning("isr_small", REPLICA, why, f"{advice}; it catches up by itself", REPLICA)


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
    _kafka,
    _fleet,
    _shard,
)


# --- readiness -------------------------------------------------------------------------------------------------------

LASTING = ("disk_full", "quota", "offsets_unreadable")  # no start that waits longer gets ready
LIFELESS = ("down", "stopped", "dead", "silent")  # a process in such a state does nothing at all
_AGAIN = "it is started again within seconds; if not, its log says why ({log})"
_ADVICE = {  # in the order of importance: a cause comes before its consequences
    "data_missing": "put it back there (move it, mount it, make it readable): the broker resumes by itself, and nothing"
    " acknowledged is lost",
    "disk_full": "make room on that disk, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE"
    " (kmq log stat shows it); the broker resumes by itself",
    "quota": f"raise KMQ_DATA_QUOTA, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE; {_FREE_NOW};"
    " the broker resumes by itself",
    "down": _AGAIN,
    "stopped": _AGAIN,
    "dead": _AGAIN,
    "silent": "if it was stopped: kill -CONT {pid}; else look at its disk; kill -9 {pid} loses nothing,"
    " it is started again",
    "register_went_back": "bring Consul's data back, or rebuild the register with: kmq cluster recover; nothing"
    " acknowledged is lost",
    "register_unreadable": "if a later release wrote it, install that here; else put the register back"
    " (docs/replication.md); nothing acknowledged is lost",
    "no_leader": "wait: another one is elected within seconds while a member of the ISR lives; kmq cluster status shows"
    " who is away",
    "replica_behind": "wait: it catches up by itself; if not, look at this broker's disk and its network to the leader"
    " (kmq cluster status)",
    "message_not_processed": "its log says why (event message_not_processed or states_ignored); it is tried again until"
    " it succeeds",
    "offsets_unreadable": "heal them from the WAL {heal}; until then no group is served, because to begin again would"
    " repeat or skip messages",
    "draining": "wait until it has ended; then {start}",
    "recovering": "wait: its log says how far it is",
    "waiting": "wait: its log says for whom",
    "starting": "wait; if it lasts, its log says why",
}
# No reasons of their own: a lack of space or the data directory is one reason for all processes together.
_SHARED = ("following", "unled")  # only in a shard; unled: no leader is one reason for all processes, too
_FINE = ("ready", "data_missing", *_SHARED, *ADMISSIONS[1:])
_LACKS = {
    "disk_full": "the disk has no room, or no inodes, for more messages",
    "quota": "KMQ_DATA_QUOTA is reached",
}
_RESTART = "start it with: kmq down && kmq up"
_MODULES = {"gateway": "kmq.gateway", AGENT: "kmq.cluster.agent", REPLICA: "kmq.replica"}
_RENEW = "replace the file{key}; the broker takes it up within seconds, without a restart"
_PROBLEMS = {
    "register_went_back": "is older than this broker's promise, or of another history",
    "register_unreadable": "cannot be read",
}
REASONS = tuple(_ADVICE)
OF_SHARD = (  # reasons outside of this broker
    *("register_went_back", "register_unreadable", "no_leader", "replica_behind"),
)
WARNINGS = ("certificate_expired", "certificate_not_yet_valid", "certificate_expires")
ALL_WARNINGS = (*CONCERNS[:2], *WARNINGS, *CONCERNS[2:])  # in the order of importance


class Presented:
    """A certificate file as one process uses it."""

    __slots__ = ("path", "process", "setting", "validity")

    def __init__(self, process: str, setting: str, path: str, validity: Validity) -> None:
        self.process, self.setting, self.path, self.validity = process, setting, path, validity


class Verdict:
    """Why a broker is not ready at one moment; the first reason is the most important one."""

    __slots__ = ("certificates", "reasons", "warnings")

    def __init__(self, reasons: list[Finding], warnings: list[Finding], certificates: list[Presented]) -> None:
        self.reasons, self.warnings, self.certificates = reasons, warnings, certificates

    @property
    def findings(self) -> list[Finding]:
        """Return everything that is wrong, the most important first: what keeps it from being ready, then warnings."""
        return [*self.reasons, *self.warnings]

    @property
    def ready(self) -> bool:
        return not self.reasons

    @property
    def first(self) -> Finding | None:
        """Return the most important reason, or None."""
        return next(iter(self.reasons), None)

    @property
    def lifeless(self) -> Finding | None:
        """Return the reason for /healthz: a stage that does nothing at all; None if every stage is alive."""
        lifeless = (reason for reason in self.reasons if reason.code in LIFELESS)
        return next((reason for reason in lifeless if not {*STAGES}.isdisjoint(reason.processes)), None)

    def against(self, process: str) -> Finding | None:
        """Return the most important reason that concerns this process, or None."""
        return next((reason for reason in self.reasons if process in reason.processes), None)


def judge(page: StatsPage | None, settings: Settings) -> Verdict:
    """Return the verdict on the broker of these settings. `page`: None if it has none, or if it is another broker's."""
    if page is None:
        return Verdict([_down(settings)], [], [])
    states = {name: state_of(name, page.rows[name]) for name in PROCESSES}
    if all(states[name] in ("down", "stopped") for name in STAGES):
        return Verdict([_down(settings)], [], [])
    if states["gateway"] in ("down", "stopped") and not page.rows["gateway"].exit_code:
        del states["gateway"]  # messages are accepted and routed without it
    agent = page.rows[AGENT] if states.pop(AGENT) not in LIFELESS else None  # messages are accepted without it, too
    reasons = _of_replica(states, page.rows[REPLICA], settings)
    lacking = {code: tuple(name for name in states if states[name] == code) for code in _LACKS}
    reasons += [_refusing(code, names, settings) for code, names in lacking.items() if names]
    if waiting := tuple(name for name in states if states[name] == "data_missing"):
        reasons.append(_data_missing(waiting, settings))
    if states.get("gateway") == "recovering" and page.rows["gateway"].failing:
        states["gateway"] = "ready"  # it serves everything but groups
        reasons.append(_offsets_unreadable(settings))
    reasons += [_of_process(name, state, page.rows[name]) for name, state in states.items() if state not in _FINE]
    if agent is not None and agent.failing:
        reasons.append(_not_processed(agent))
    certificates = [
        used
        for name in ("ingress", "gateway")
        if states.get(name) not in (None, *LIFELESS)
        for used in presented(name, page.rows[name], settings)
    ]
    reasons.sort(key=lambda reason: REASONS.index(reason.code))
    warnings = _warnings(certificates) + judge_concerns(page, settings)
    return Verdict(reasons, sorted(warnings, key=lambda warning: ALL_WARNINGS.index(warning.code)), certificates)


def state_of(name: str, row: Row) -> str:
    """Return the state of a process in one word: one of REASONS, ready, following or unled."""
    if not row.pid:
        return "down"
    if row.state_name == "stopped":
        return "stopped"
    if row.age_s > FRESH_S:
        return "silent" if is_process(row.pid, name) else "dead"
    if row.state_name in ("ready", "disk_full"):
        return row.admission_name or row.state_name
    return row.state_name if row.state_name in (*_ADVICE, *_SHARED) else "starting"


def is_process(pid: int, name: str) -> bool:
    """Return True if the process `pid` is still that stage, gateway, agent or replica: the system reuses pids."""
    module = _MODULES.get(name, f"stages.{name}")
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return module.encode() in file.read().split(b"\0")
    except OSError:
        return False


def _down(settings: Settings) -> Finding:
    why = f"the broker of KMQ_DATA={settings.data} does not run (KMQ_INSTANCE={settings.instance})"
    advice = f"{_start()}; if it ended by itself, the last event=failed says why ({log_of('<stage>')})"
    return Finding("down", "broker", why, advice, (*STAGES, "gateway"))


def _start() -> str:
    return "the kubelet starts it" if is_in_pod() else "start it with: kmq up"


def _refusing(code: str, names: tuple[str, ...], settings: Settings) -> Finding:
    why = f"{_LACKS[code]}: acknowledged producers are refused, others wait (said by {', '.join(names)})"
    return Finding(code, settings.data, why, _ADVICE[code], names)


def _data_missing(names: tuple[str, ...], settings: Settings) -> Finding:
    code = "data_missing"
    why = (
        f"KMQ_DATA={settings.data} is not the data directory with which this broker runs: it was moved, is not mounted, or"
        f" cannot be read and written (waiting for it: {', '.join(names)})"
    )
    return Finding(code, settings.data, why, _ADVICE[code], names)


def _of_replica(states: dict[str, str], row: Row, settings: Settings) -> list[Finding]:
    """Return why a broker of a shard is not ready. Leaves the replica's state in `states` only if it is a reason."""
    unled = tuple(name for name, state in states.items() if state == "unled")
    state, code, why, advice = states.pop(REPLICA), "", "", ""
    if settings.shard and state in (*LIFELESS, "disk_full"):
        states[REPLICA] = state
    elif settings.shard and state != "waiting" and "starting" in (state, row.role_name):  # waiting: for Consul
        states[REPLICA] = "starting"
    if row.problem and state not in LIFELESS:
        code = row.problem_name
        why = f"the register of the shard {settings.shard} {_PROBLEMS[code]}: nobody is elected from here"
    elif unled and state in LIFELESS:
        code, why = "no_leader", "nobody says here who leads the shard, because the replica does not run"
    elif unled and not row.version:
        code, why = "no_leader", f"the shard {settings.shard} is not begun, as far as this broker knows"
        advice = "once all of its brokers are up: kmq cluster init (docs/replication.md)"
    elif unled:
        code, why = "no_leader", f"no living leader of the shard {settings.shard} is known here"
    elif states.get("ingress") == "not_enough_replicas" and state == "waiting":
        code, why = "no_leader", "too few replicas answer, and Consul does not: another broker may lead by now"
        advice = "look at this broker's network, to the other brokers of the shard and to Consul (KMQ_CONSUL)"
    elif row.role_name == "following" and not row.in_isr and state not in LIFELESS:
        code, why = "replica_behind", f"this broker is not in the ISR of the shard {settings.shard}"
    return [Finding(code, REPLICA, why, advice or _ADVICE[code], (*unled, REPLICA))] if code else []


def _of_process(name: str, state: str, row: Row) -> Finding:
    ended = {"down": "has not been started", "stopped": f"has ended{_with_code(row)}"}
    why = ended.get(state) or row.silence() or f"is {state}"
    log = log_of(name, row.supervisor)
    advice = _ADVICE[state].format(pid=row.pid, log=log, start=_start())
    if state == "stopped" and row.exit_code in NO_RESTART:
        again = "the kubelet starts it again" if is_in_pod() else "start it again"
        advice = f"correct what its last event=failed says ({log}); then {_RESTART if row.supervisor else again}"
    return Finding(state, name, f"{name} {why}", advice, (name,))


def _with_code(row: Row) -> str:
    return f" with exit code {row.exit_code} ({EXIT_NAMES.get(row.exit_code, 'crashed')})" if row.exit_code else ""


def _not_processed(agent: Row) -> Finding:
    code = "message_not_processed"
    why = f"what the fleet has told after message {agent.epoch} of the Broadcast Queue cannot be done"
    return Finding(code, AGENT, why, _ADVICE[code], (AGENT,))


def _offsets_unreadable(settings: Settings) -> Finding:
    code = "offsets_unreadable"
    why = "the committed offsets of consumer groups cannot be read; the gateway's log says why (event offsets_damaged)"
    advice = _ADVICE[code].format(heal=of_repair())
    return Finding(code, f"{settings.data}/topics/__consumer_offsets", why, advice, ("gateway",))


def presented(name: str, row: Row, settings: Settings) -> list[Presented]:
    """Return the certificate files that a process uses."""
    chain = Validity(row.certificate_from, row.certificate_until)
    authorities = Validity(0, row.client_ca_until)
    files = (("KMQ_TLS_CERT", settings.tls_cert, chain), ("KMQ_TLS_CLIENT_CA", settings.tls_client_ca, authorities))
    return [Presented(name, setting, path, validity) for setting, path, validity in files if validity.not_after]


def _warnings(certificates: list[Presented]) -> list[Finding]:
    """Return one warning for each certificate file, however many processes use it."""
    now = time.time()
    coded = [(used.validity.warning(now), used) for used in certificates]
    first = {used.setting: certificate_reason(code, used, now) for code, used in reversed(coded) if code}
    return list(first.values())


def certificate_reason(code: str, presented: Presented, now: float) -> Finding:
    """Return the warning `code` about a certificate."""
    setting, path, validity = presented.setting, presented.path, presented.validity
    until = certificate.utc(validity.not_after)
    when = {
        "certificate_expired": f"expired on {until}",
        "certificate_not_yet_valid": f"is not valid before {certificate.utc(validity.not_before)}",
        "certificate_expires": f"expires in {(validity.not_after - now) / 86_400:.1f} days, on {until}",
    }[code]
    is_server = setting == "KMQ_TLS_CERT"
    who = "TLS clients cannot connect" if is_server else "clients with certificates of it cannot connect"
    why = f"{setting}={path} {when}: {who}{' from then on' if code == 'certificate_expires' else ''}"
    advice = _RENEW.format(key=" and KMQ_TLS_KEY" if is_server else "")
    return Finding(code, path, why, advice, (presented.process,), WARNING)
