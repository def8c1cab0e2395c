"""Decide if a broker is ready, and if not, why: one verdict for `kmq status`, /readyz, gRPC health, metrics, probes.

Ready       A message sent now is accepted, and on disk in a moment: every stage is in its loop and no stage waits for
            space. The gateway counts if this broker has one, unless it has ended in order: with exit code 0.
Source      The stats page alone, so that all readers of one moment get the same verdict. Each process writes there what
            it knows: why ingress refuses messages, what a stage waits for, how long the certificates in use are valid.
Warning     An operator must act, but messages are accepted and delivered meanwhile (docs/decisions/readiness.md says
            why an expired certificate is only a warning).
Not covered If containers do not share process ids, a process that is only `silent` may be reported as `dead`.
"""

import time

from kmq.access import certificate
from kmq.access.certificate import Validity
from kmq.broker import findings
from kmq.broker.concerns import CONCERNS, judge_concerns
from kmq.broker.findings import WARNING, Finding
from kmq.broker.stats import ADMISSIONS, AGENT, FRESH_S, PROCESSES, Row, StatsPage
from kmq.config.settings import STAGES, Settings
from kmq.errors import EXIT_NAMES, NO_RESTART

NO_SPACE = ADMISSIONS[1:]
LASTING = (*NO_SPACE, "offsets_unreadable")  # no start that waits longer gets ready
LIFELESS = ("down", "stopped", "dead", "silent")  # a process in such a state does nothing at all
_AGAIN = "it is started again within seconds; if not, its log says why ({log})"
_ADVICE = {  # in the order of importance: a cause comes before its consequences
    "data_missing": "put it back there (move it, mount it, make it readable): the broker resumes by itself, and nothing"
    " acknowledged is lost",
    "disk_full": "make room on that disk, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE"
    " (kmq log stat shows it); the broker resumes by itself",
    "quota": "raise KMQ_DATA_QUOTA, or bound what is kept by KMQ_RETENTION_BYTES or KMQ_RETENTION_AGE"
    " (kmq log stat shows it); the broker resumes by itself",
    "down": _AGAIN,
    "stopped": _AGAIN,
    "dead": _AGAIN,
    "silent": "if it was stopped: kill -CONT {pid}; else look at its disk; kill -9 {pid} loses nothing,"
    " it is started again",
    "message_not_processed": "its log says why (event message_not_processed or states_ignored); it is tried again until"
    " it succeeds",
    "offsets_unreadable": "heal them from the WAL {heal}; until then no group is served, because to begin again would"
    " repeat or skip messages",
    "draining": "wait until it has ended; then {start}",
    "recovering": "wait: its log says how far it is",
    "waiting": "wait: its log says for whom",
    "starting": "wait; if it lasts, its log says why",
}
# No reasons of their own: lack of space, or of the data directory, is one reason for all processes together.
_FINE = ("ready", "data_missing", *NO_SPACE)
_LACKS = {
    "disk_full": "the disk has no room, or no inodes, for more messages",
    "quota": "KMQ_DATA_QUOTA is reached",
}
_RESTART = "start it with: kmq down && kmq up"
_MODULES = {"gateway": "kmq.gateway", AGENT: "kmq.cluster.agent"}
_RENEW = "replace the file{key}; the broker takes it up within seconds, without a restart"
REASONS = tuple(_ADVICE)
WARNINGS = ("certificate_expired", "certificate_not_yet_valid", "certificate_expires")
ALL_WARNINGS = (*CONCERNS[:2], *WARNINGS, *CONCERNS[2:])  # in the order of importance
Reason = Finding  # one that keeps a broker from being ready


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
    lacking = {code: tuple(name for name in states if states[name] == code) for code in NO_SPACE}
    reasons = [_no_room(code, names, settings) for code, names in lacking.items() if names]
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
    """Return the state of a process in one word: one of REASONS, or ready."""
    if not row.pid:
        return "down"
    if row.state_name == "stopped":
        return "stopped"
    if row.age_s > FRESH_S:
        return "silent" if is_process(row.pid, name) else "dead"
    if row.state_name in ("ready", "disk_full"):
        return row.admission_name or row.state_name
    return row.state_name if row.state_name in _ADVICE else "starting"


def is_process(pid: int, name: str) -> bool:
    """Return True if the process `pid` is still that stage, gateway or agent: the system reuses pids."""
    module = _MODULES.get(name, f"stages.{name}")
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return module.encode() in file.read().split(b"\0")
    except OSError:
        return False


def _down(settings: Settings) -> Finding:
    why = f"the broker of KMQ_DATA={settings.data} does not run (KMQ_INSTANCE={settings.instance})"
    advice = f"{_start()}; if it ended by itself, the last event=failed says why ({findings.log_of('<stage>')})"
    return Finding("down", "broker", why, advice, (*STAGES, "gateway"))


def _start() -> str:
    return "the kubelet starts it" if findings.is_in_pod() else "start it with: kmq up"


def _no_room(code: str, names: tuple[str, ...], settings: Settings) -> Finding:
    why = f"{_LACKS[code]}: acknowledged producers are refused, others wait (said by {', '.join(names)})"
    return Finding(code, settings.data, why, _ADVICE[code], names)


def _data_missing(names: tuple[str, ...], settings: Settings) -> Finding:
    code = "data_missing"
    why = (
        f"KMQ_DATA={settings.data} is not the data directory with which this broker runs: it was moved, is not mounted, or"
        f" cannot be read and written (waiting for it: {', '.join(names)})"
    )
    return Finding(code, settings.data, why, _ADVICE[code], names)


def _of_process(name: str, state: str, row: Row) -> Finding:
    ended = {"down": "has not been started", "stopped": f"has ended{_with_code(row)}"}
    why = ended.get(state) or row.silence() or f"is {state}"
    log = findings.log_of(name, row.supervisor)
    advice = _ADVICE[state].format(pid=row.pid, log=log, start=_start())
    if state == "stopped" and row.exit_code in NO_RESTART:
        again = "the kubelet starts it again" if findings.is_in_pod() else "start it again"
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
    advice = _ADVICE[code].format(heal=findings.of_repair())
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
