"""Decide if a broker is ready, and if not, why: one verdict for `kmq status`, /readyz, gRPC health, metrics, probes.

Ready       A message sent now is accepted, and on disk in a moment: every stage is in its loop and no stage waits for
            space. The gateway counts if this broker has one, unless it has ended with exit code 0.
            In a shard the replica counts, too. A follower is ready while its replica is in the ISR: its leader stores
            what is sent to it. A leader with open doors is ready, also while too few replicas answer for new messages:
            no other broker of the shard could take them, and readers continue. Without Consul it is not ready: another
            broker may lead without its knowledge.
Source      The stats page alone, so that all readers of one moment get the same verdict. Each process writes there what
            it knows: why ingress refuses messages, what a stage waits for, how long the certificates in use are valid.
            A single reading has no history, so each process also notes its restarts, how long its syncs take, and since
            when it waits (stage.py).
Warning     An operator must act, but messages are accepted and delivered meanwhile (docs/decisions/readiness.md says
            why an expired certificate is only a warning).
Not covered If containers do not share process ids, a process that is only `silent` may be reported as `dead`.
"""

import time

from kmq.access import certificate
from kmq.access.certificate import Validity
from kmq.broker.concerns import (
    CONCERNS,
    FREE_NOW,
    WARNING,
    Finding,
    is_in_pod,
    judge_concerns,
    log_of,
    of_repair,
)
from kmq.broker.stats import ADMISSIONS, AGENT, FRESH_S, PROCESSES, REPLICA, TIER, Row, StatsPage
from kmq.config.settings import STAGES, Settings
from kmq.errors import EXIT_NAMES, NO_RESTART

# --- readiness -------------------------------------------------------------------------------------------------------

LASTING = ("disk_full", "quota", "offsets_unreadable")  # a longer wait does not make the broker ready
_ENDED = ("down", "stopped", "dead")
LIFELESS = (*_ENDED, "silent")  # a process in such a state does nothing at all
_AGAIN = "it is started again within seconds; if not, its log says why ({log})"
_ADVICE = {  # in the order of importance: a cause comes before its consequences
    "data_missing": "put it back there (move it, mount it, make it readable): the broker resumes by itself, and nothing"
    " acknowledged is lost",
    "disk_full": "make room on that disk, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE"
    " (kmq log stat shows it); the broker resumes by itself",
    "quota": f"raise KMQ_DATA_QUOTA, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE; {FREE_NOW};"
    " the broker resumes by itself",
    "down": _AGAIN,
    "stopped": _AGAIN,
    "dead": _AGAIN,
    "silent": "if it was stopped: kill -CONT {pid}; else look at its disk; kill -9 {pid} loses nothing, {again}",
    "register_went_back": "bring Consul's data back, or rebuild the register with: kmq cluster recover; nothing"
    " acknowledged is lost",
    "register_unreadable": "if a later release wrote it, install that here; else put the register back"
    " (docs/replicated-cluster.md); nothing acknowledged is lost",
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
_MODULES = {"gateway": "kmq.gateway", AGENT: "kmq.cluster.agent", REPLICA: "kmq.replica", TIER: "kmq.tier"}
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
    comes_again = any(states[name] == "dead" and is_supervisor(page.rows[name].supervisor) for name in STAGES)
    if all(states[name] in _ENDED for name in STAGES) and not comes_again:
        return Verdict([_down(settings)], [], [])
    if states["gateway"] in ("down", "stopped") and not page.rows["gateway"].exit_code:
        del states["gateway"]  # messages are accepted and routed without it
    agent = page.rows[AGENT] if states.pop(AGENT) not in LIFELESS else None  # messages are accepted without it, too
    del states[TIER]  # the same
    reasons = _of_replica(states, page.rows[REPLICA], settings)
    lacking = {code: tuple(name for name in states if states[name] == code) for code in _LACKS}
    reasons += [_refusing(code, names, settings) for code, names in lacking.items() if names]
    if waiting := tuple(name for name in states if states[name] == "data_missing"):
        reasons.append(_data_missing(waiting, settings))
    if states.get("gateway") == "recovering" and page.rows["gateway"].failing:
        states["gateway"] = "ready"  # it serves everything except groups
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


# A supervisor has one of these words on its command line: `up` in the foreground, otherwise its module, by either name.
_SUPERVISORS = {b"up", b"kmq.broker.supervisor", b"kmq.supervisor"}


def is_supervisor(pid: int) -> bool:
    """Return True if a supervisor of KMQ runs under this pid and is visible from here."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return not _SUPERVISORS.isdisjoint(file.read().split(b"\0"))
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
    """Return why a broker of a shard is not ready. Keeps the replica's state in `states` only if it is a reason."""
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
        advice = "once all of its brokers are up: kmq cluster init (docs/replicated-cluster.md)"
    elif unled and row.isr_replaced:
        code, why = "no_leader", "each broker of the ISR runs with another directory, so nobody can be elected any more"
        advice = "kmq cluster recover says what to type (docs/replicated-cluster-backup.md); waiting does not help"
    elif unled:
        code, why = "no_leader", f"no living leader of the shard {settings.shard} is known here"
    elif states.get("ingress") == "not_enough_replicas" and state == "waiting":
        code, why = "no_leader", "too few replicas answer, and Consul does not: another broker may lead by now"
        advice = "look at this broker's network, to the other brokers of the shard and to Consul (KMQ_CONSUL)"
    elif row.role_name == "waiting" and "following" in states.values() and state not in LIFELESS:
        code, why = "no_leader", "this broker has no connection to its leader: clients are sent to the other brokers"
        advice = "look at its network to the leader (kmq cluster status); it resumes by itself"
    elif row.role_name == "following" and not row.in_isr and state not in LIFELESS:
        code, why = "replica_behind", f"this broker is not in the ISR of the shard {settings.shard}"
    return [Finding(code, REPLICA, why, advice or _ADVICE[code], (*unled, REPLICA))] if code else []


def _of_process(name: str, state: str, row: Row) -> Finding:
    ended = {"down": "has not been started", "stopped": f"has ended{_with_code(row)}"}
    why = ended.get(state) or row.silence() or f"is {state}"
    log = log_of(name, row.supervisor)
    is_orphan = row.supervisor and not is_supervisor(row.supervisor)
    again = f"but its supervisor was killed, so then {_RESTART}" if is_orphan else "it is started again"
    advice = _ADVICE[state].format(pid=row.pid, log=log, start=_start(), again=again)
    if state == "stopped" and row.exit_code in NO_RESTART:
        again = "the kubelet starts it again" if is_in_pod() else "start it again"
        advice = f"correct what its last event=failed says ({log}); then {_RESTART if row.supervisor else again}"
    elif state in _ENDED and is_orphan:
        advice = f"its supervisor was killed, so nobody starts it again; {_RESTART}"
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
