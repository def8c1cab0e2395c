"""Warnings for an operator: one finding for each thing that is wrong with a broker.

    judge_concerns(page, settings)       the warnings of a broker that runs, causes before consequences

Source      The stats page alone, so that all readers of one moment get the same findings. A single reading has no
            history. So each process notes on the page its restarts, how long its syncs take, and since when it waits
            (stage.py). The gateway notes what rises or falls over minutes (kmq/gateway/core/trends.py).
Invariant   Every code has a section of its name in the runbook, docs/operations.md, and an alert. A start, a stop, a
            restart by an operator and a burst of messages never raise a concern (docs/decisions/findings.md has the
            thresholds and the reason for each).
"""

import os
import time
from collections.abc import Callable, Iterator

from kmq.broker import clock, ports
from kmq.broker.stats import AGENT, PROCESSES, REPLICA, RESTARTED_S, TIER, TIER_PROBLEMS, StatsPage
from kmq.config.settings import STAGES, Settings
from kmq.config.values import GIB

# --- findings --------------------------------------------------------------------------------------------------------

RUNBOOK = "docs/operations.md"
ERROR, WARNING = "error", "warning"  # not ready; ready, but an operator must act


class Finding:
    """One thing that is wrong with a broker.

    `about`: the process or file; `why`: what is seen, a sentence; `advice`: what to do; `processes`: those concerned.
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
    """Return where the log of a process is. `supervisor`: its pid; `kmq up` writes a file even in a pod."""
    if supervisor or not is_in_pod():
        return "KMQ_PIPES/kmq.log"
    return f"kubectl logs {os.uname().nodename} -c {process} --previous"


def of_repair() -> str:
    """Return how to repair damaged files."""
    if is_in_pod():
        return "by the Job of docs/kubernetes.md#repair-backup-restore"
    return "with: kmq down && kmq verify --repair && kmq up"


def of_kernel() -> str:
    """Return what shows the kernel's messages about this machine: processes killed for lack of memory, broken disks."""
    return f"kubectl describe pod {os.uname().nodename}" if is_in_pod() else "dmesg"


# --- concerns --------------------------------------------------------------------------------------------------------
# What needs an operator although the broker may be ready: one function for each kind of concern.

CONCERNS = (  # in the order of importance: a cause comes before its consequences
    "damage_found",
    "tokens_missing",
    "oom_killed",
    "restarting",
    "unclean_end",
    "flapping",
    "dropped",
    "clock_suspect",
    "clock_behind",
    "disk_low",
    "disk_fills",
    "inodes_low",
    "quota_low",
    "quota_fills",
    "slow_sync",
    "link_stuck",
    "link_full",
    "slow_acks",
    "door_closed",
    "turned_away",
    "unauthorized",
    "refused",
    "errors",
    "group_crashing",
    "letter_refused",
    "nacked_waiting",
    "group_stalled",
    "lag_grows",
    "kafka_misdirected",
    "compactor_behind",
    "agent_ended",
    "consul_lost",
    "agent_disconnected",
    "agent_behind",
    "not_enough_replicas",
    "hw_stands",
    "follower_slow",
    "isr_small",
    "tier_refused",
    "tier_fenced",
    "tier_ahead",
    "tier_damaged",
    "tier_behind",
    "tier_reads_fail",
    "tier_cache_full",
)
RESTARTS = 3  # so many restarts in a row, none after a life of RESTARTED_S
OOM_S = 3600  # an OOM kill is a concern for so long
SLOW_SYNCS, SLOW_S = 4, 60  # so many of the last 16 syncs were slow, the last of them within this time
STUCK_S, FULL_S, PAUSE_S = 10, 60, 2  # a ring without room: at once, on the whole, and what ends "on the whole"
TIER_BEHIND_S = 300  # the age of a record that KMQ_TIER does not have, beyond KMQ_TIER_EVERY
TIER_DUE_S = 3600  # so long old records may wait on the disk while they are less than half of their local limits
COLD_S = 60  # a store that was away for a moment answers sooner, and readers have read what they waited for
SMALL_S = 60  # how long a broker of the shard must be out of the ISR: a restart takes less
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


def _delay(microseconds: int) -> str:
    return f"{microseconds / 1e6:.1f} s" if microseconds >= 100_000 else f"{microseconds / 1e3:.1f} ms"


def _duration(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} hours"


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
FREE_NOW = "kmq log stat shows what takes room; kmq topics set <topic> retention_bytes=<n> and kmq topics delete <topic> free it"


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
        yield _warning("quota_low", settings.data, why, f"{advice}; {FREE_NOW}", "ingress")


def _syncs(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row, why, advice = page.rows["durability"], "", ""
    if row.slow_syncs >= SLOW_SYNCS and _age_s(row.slow_sync_at) < SLOW_S:
        why = f"{row.slow_syncs} of the last 16 syncs to disk took longer than a second: every reply waits for one"
        advice = (
            "look at the disk of KMQ_DATA and at who else uses it (iostat -x 1, dmesg on its machine); in a pod, at the"
            " class of the volume. Nothing is lost"
        )
    elif figures := page.trends().get("slow_sync"):
        why = "{:,} of the last minute's {:,} syncs to disk took longer than half a second: every reply waits for one"
        why, advice = why.format(*figures), "look at the disk of KMQ_DATA and at who else uses it; nothing is lost"
    if why:
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


def _doors(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["gateway"]
    closed = ports.closed_doors(row.doors_closed)
    if closed and row.state_name != "stopped":
        names = ", ".join(f"KMQ_{name.upper()}_PORT={ports.number_of(settings, name)}" for name in closed)
        why = f"{names}: could not be opened, because another program has it; the gateway's other ports serve"
        advice = (
            "stop what uses it (ss -ltnp shows it): then it opens by itself within seconds; or set another number, and"
            " start the broker again"
        )
        yield _warning("door_closed", "gateway", why, advice, "gateway")


def _groups(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["gateway"]
    if row.groups_crashing and not row.silence():
        why = (
            f"{row.groups_crashing} of {row.groups} consumer groups lose member after member, which had messages and"
            " committed none: perhaps one kills them"
        )
        advice = (
            "event=group_crashing in the gateway's log names them; look at the logs of their consumers. With"
            " kmq topics set <topic> max_deliveries=<n> a message that kills becomes a dead letter"
        )
        yield _warning("group_crashing", "groups", why, advice, "gateway")
    if row.letters_refused and not row.silence():
        why = (
            f"{row.letters_refused:,} messages were delivered as often as max_deliveries says, and the broker refuses"
            " their dead letters for good: they wait, and are not delivered"
        )
        advice = (
            "event=letter_refused in the gateway's log says of which topic, group and offset, and why. They become dead"
            " letters within a minute once there is room for <topic>.dlq (KMQ_MAX_TOPICS); or are delivered again"
            " after kmq topics set <topic> --unset max_deliveries"
        )
        yield _warning("letter_refused", "groups", why, advice, "gateway")
    if row.nacked_waiting and not row.silence():
        why = (
            f"{row.nacked_waiting:,} messages that members gave back wait in partitions that members by Kafka's protocol"
            " own: these are not given them"
        )
        advice = (
            "event=nacked_waiting in the gateway's log names the groups. Stop the Kafka members; then kmq consume"
            " <topic> --group <group> is given what waits first, and kmq groups reset drops it"
        )
        yield _warning("nacked_waiting", "groups", why, advice, "gateway")
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
        hosts = [f"{host}:{port}" for host, port in (settings.kafka_advertise or {}).values()]
        where = (
            f"KMQ_KAFKA_ADVERTISE={', '.join(hosts)}"
            if hosts
            else "by default where their first connection has arrived"
        )
        why = f"{who} to the address that they are told, {where}"
        advice = (
            "set KMQ_KAFKA_ADVERTISE=<host>:<port> to where clients reach this broker, and start it again;"
            " event=kafka_misdirected in the gateway's log names one of them"
        )
        yield _warning("kafka_misdirected", "kafka", why, advice, "gateway")


def _fleet(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows[AGENT]
    effect = "what the fleet says is not done here; no message waits for the agent"
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
    elif "agent_disconnected" in (trends := page.trends()):
        why = f"the agent has not been ready for {_duration(trends['agent_disconnected'][0])}: {effect}"
        yield _warning("agent_disconnected", AGENT, why, f"its log says why ({log_of(AGENT, row.supervisor)})", AGENT)
    elif "agent_behind" in trends:
        why = f"the agent has been behind its fleet for {_duration(trends['agent_behind'][0])}: {effect}"
        advice = f"kmq fleet status and its log say why ({log_of(AGENT, row.supervisor)})"
        yield _warning("agent_behind", AGENT, why, advice, AGENT)


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
        why = f"nothing was committed for {_duration(stands_s)}, although {row.last - row.seq:,} records wait for it"
        advice = "kmq cluster status shows which replica of the ISR is behind, or away: look at that broker"
        yield _warning("hw_stands", REPLICA, why, advice, REPLICA)
    followers = page.followers()
    slow = [(name, each) for name, each in followers if each["slow_since"]]
    if slow:
        others = [each["ack_delay_us"] for _, each in followers if each["ack_delay_us"] and not each["slow_since"]]
        delays = ", ".join(f"broker {name} takes {_delay(each['ack_delay_us'])}" for name, each in slow)
        beside = f", the quickest of the others {_delay(min(others))}" if others else ""
        effect = "it is out of the ISR, so that no acknowledgement waits for it"
        if any(each["in_isr"] for _, each in slow):
            effect = f"acknowledgements wait for it while the ISR would have fewer than {row.min_insync} without it"
        why = f"{delays} to confirm what it is sent{beside}: {effect}"
        advice = "look at its disk (iostat -x 1 on its machine) and its network; it joins again once it was quick for a while"
        yield _warning("follower_slow", REPLICA, why, advice, REPLICA)
    if row.small_since and (small_s := _age_s(row.small_since)) >= SMALL_S:
        out = ", ".join(name for name, each in followers if not each["in_isr"]) or "?"
        why = (
            f"{row.isr} of {row.brokers} replicas have been in the ISR for {_duration(small_s)} (out of it: {out}); with"
            f" fewer than {row.min_insync} nothing is committed"
        )
        advice = "kmq cluster status shows which one is away: start that broker, or look at its disk and network"
        yield _warning("isr_small", REPLICA, why, f"{advice}; it catches up by itself", REPLICA)


_TIER = {  # code: (what is seen, what to do)
    "tier_refused": (
        "KMQ_TIER cannot be used, so nothing is copied",
        "event=tier_stands has the words of the store ({log}); correct KMQ_TIER, or use a store that keeps If-None-Match;"
        " it looks again each minute",
    ),
    "tier_fenced": (
        "another broker writes the copy of this directory in KMQ_TIER, so this one copies nothing",
        "kmq tier status names it. If it is gone for good: kmq tier claim --yes; if not, this directory is a clone",
    ),
    "tier_ahead": (
        "KMQ_TIER has records that this directory lacks, or other ones, so nothing is copied: an older state was put"
        " back",
        "stop it, move this directory away, and bring the newer state into an empty one with kmq restore --yes",
    ),
    "tier_damaged": (
        "a part of the copy in KMQ_TIER, or of the WAL, is damaged or missing",
        "event=tier_stands, after which nothing more is copied, or event=tier_object_missing names it ({log}); kmq tier"
        " verify and kmq verify check both",
    ),
}


def _tier(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows[TIER]
    if not row.pid:
        return
    log = log_of(TIER, row.supervisor)
    if row.standing and not row.silence():
        code = f"tier_{TIER_PROBLEMS[row.standing]}"
        why, advice = (text.format(log=log) for text in _TIER[code])
        words = page.note_of(TIER).partition(": ")[2]
        yield _warning(code, TIER, f"{why}: {words}" if words else why, advice, TIER)
    if row.silence() or row.state_name == "stopped":
        why = f"the process tier {row.silence() or 'has ended'}: nothing is copied to KMQ_TIER"
        yield _warning("tier_behind", TIER, why, f"its last event=failed says why ({log})", TIER)
    elif whys := [*_tier_lacks(page, settings)]:
        advice = (
            f"event=tier_partition_damaged names what cannot be copied ({log}); else the network to the store, or"
            " KMQ_TIER_RATE, is too slow"
        )
        if row.failing_since:
            whys.append(f"the store has not answered for {_duration(_age_s(row.failing_since))}")
            advice = f"event=tier_store_away has the words of the store ({log}); copying goes on by itself"
        if full_s := page.rows["gateway"].full_in:
            whys.append(f"at the present rate the disk, or KMQ_DATA_QUOTA, is full in {_duration(full_s)}")
        yield _warning("tier_behind", TIER, "; ".join(whys), advice, TIER)


def _tier_lacks(page: StatsPage, settings: Settings) -> Iterator[str]:
    """Yield what waits for KMQ_TIER for too long."""
    row = page.rows[TIER]
    late_s = TIER_BEHIND_S + (settings.tier_every or 0.0)
    if row.oldest and (behind_s := time.time() - row.oldest) > late_s:
        yield f"KMQ_TIER has no record of the last {_duration(behind_s)}: the loss of this disk would lose them"
    due_s = _age_s(row.due_since) if row.due_since else 0.0
    is_much = bool(row.local_limit) and row.behind_bytes * 2 > row.local_limit
    if row.behind_bytes and due_s > (late_s if is_much else TIER_DUE_S):
        yield f"{row.behind_bytes >> 20:,} MiB of old records have waited on this disk for KMQ_TIER for {_duration(due_s)}"


def _cold(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    row = page.rows["gateway"]
    if row.silence() or row.state_name == "stopped":
        return
    log = log_of("gateway", row.supervisor)
    if row.tier_damaged:
        why = f"old records of topics cannot be read, because {row.tier_damaged:,} objects of KMQ_TIER are missing or altered"
        why += f", the last of them with {page.note_of('gateway')}" if page.note_of("gateway") else ""
        advice = (
            f"event=tier_object_damaged names each ({log}); kmq tier verify --deep; find out who deletes in the store"
        )
        yield _warning("tier_damaged", "gateway", why, advice, "gateway")
    if row.tier_failing_since and (since_s := _age_s(row.tier_failing_since)) >= COLD_S:
        why = f"readers of old records have waited for {_duration(since_s)}: KMQ_TIER does not give what they need"
        advice = (
            f"event=tier_read_failed has the words of the store ({log}); they go on by themselves, nothing else waits"
        )
        yield _warning("tier_reads_fail", "gateway", why, advice, "gateway")
    if row.cache_full_since and (since_s := _age_s(row.cache_full_since)) >= COLD_S:
        why = f"for {_duration(since_s)} readers of old records have waited for room in tier/cache, because others still read"
        advice = "raise KMQ_TIER_CACHE and start the broker again, or let fewer consumers read old records at once"
        yield _warning("tier_cache_full", "gateway", why, advice, "gateway")


_ROOM = "make room, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE"
_TRENDS = {  # code: (what it is about, what is seen, what to do); {0} and {1} are its figures, {time} is {0} as a time
    "flapping": (
        "broker",
        "the broker became ready or not ready {0:,} times in the last 15 min, so that no reason lasts",
        "the events not_ready and ready_again in the gateway's log name the reasons",
    ),
    "dropped": (
        "dropped.log",
        "messages dropped in the last 5 min: {0:,}, because a ring was full and the policy is drop_oldest",
        "dropped.log in KMQ_DATA names each; send them again with: kmq redrive <topic> --dropped; with"
        " RB_OVERFLOW_POLICY=block none is dropped",
    ),
    "refused": (
        "ingress",
        "{0:,} lines of the last minute were no messages, beside {1:,} messages: they are in dead.malformed",
        "kmq log cat dead.malformed shows each with the reason; correct the producer",
    ),
    "errors": (
        "ingress",
        "producers got {0:,} times !err in the last minute, beside {1:,} messages, although the broker is ready",
        "kmq_errors_total of the metrics has the class, the reply of the producer the code: correct the producer",
    ),
    "unauthorized": (
        "ports",
        "{0:,} connections and requests of the last minute had no valid token",
        "event=unauthorized in the log names a peer: give it a token (kmq token new <name>), or keep it out",
    ),
    "turned_away": (
        "ports",
        "{0:,} connections and calls of the last minute were refused or ended, because too many were open",
        "event=turned_away in the log names a peer: find the client that opens one for each message, or raise the limit",
    ),
    "slow_acks": (
        "ingress",
        "{0:,} of the last minute's {1:,} trains of messages waited longer than a second for their replies",
        "look at the disk of KMQ_DATA, at links that are full (kmq status), and at the CPU limit; nothing is lost",
    ),
    "disk_fills": ("disk", "at its present rate the disk of KMQ_DATA is full in {time}", _ROOM),
    "quota_fills": ("quota", "at the present rate KMQ_DATA_QUOTA is reached in {time}", f"raise it, {_ROOM}"),
    "lag_grows": (
        "groups",
        "consumer groups whose lag only grows: {0:,}; {1:,} messages wait for them",
        "event=lag_grows in the gateway's log names them; kmq groups describe <group> shows its members: start more, or"
        " look why they are slow",
    ),
    "compactor_behind": (
        "compactor",
        "partitions on which the compactor is behind: {0:,}; {1:,} bytes have waited for a day",
        "look for event=compaction_pass in its log; raise KMQ_COMPACT_RATE",
    ),
}


def _trends(page: StatsPage, settings: Settings) -> Iterator[Finding]:
    """Yield what the gateway has judged over minutes. Trends of syncs and the agent are with their other findings."""
    for code, figures in page.trends().items():
        if code in _TRENDS:
            about, why, advice = _TRENDS[code]
            yield _warning(code, about, why.format(*figures, time=_duration(figures[0])), advice)


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
    _doors,
    _groups,
    _kafka,
    _fleet,
    _shard,
    _tier,
    _cold,
    _trends,
)
