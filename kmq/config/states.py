"""KMQ_DATA/cluster/states: the states that the fleet set, for the processes of this broker that do not use Consul.

    kmq-states 1 cluster=prod epoch=17 id=0f4be2a65d1c4f7e9a31c5b8d2e60f17
    settings/retention_age 30d
    tokens/orders revoked
    topics/orders partitions=4 retention_age=30d

File        Line 1: version of the format, name of the cluster, last message that is contained, and its id. Then one
            line a state: its key in Consul, a blank, its value. Value DEFAULT: the fleet sets no value for this limit
            or setting.
Owner       The agent replaces it, whole. Ingress, durability, router and gateway look once a second.
Invariant   The epoch of the file is never lower than the mark in Consul, so a broker without Consul has all confirmed
            states. A process that has read the file keeps its states in force if the file is removed or becomes
            unreadable. A process that starts with an unreadable file accepts no tokens until the agent has rewritten
            it. A setting that this broker was given itself always wins over the fleet's.
Not covered Without KMQ_CLUSTER, or with another one, the file has no effect.
"""

from collections.abc import Callable

from kmq.config.settings import SHARED, Settings
from kmq.errors import ConfigError
from kmq.files import Watch

VERSION = 1
DEFAULT = "default"
REVOKED = "revoked"
UNREADABLE = "\ufffd"  # replaces a value that is not one line of text; a token with it is revoked, too
TOPICS, TOKENS, SETTINGS = "topics/", "tokens/", "settings/"
KINDS = (TOPICS, TOKENS, SETTINGS)


class States:
    """All states at one epoch: key → value."""

    __slots__ = ("cluster", "epoch", "id", "values")

    def __init__(self, cluster: str, epoch: int, values: dict[str, str], id: str = "") -> None:
        """`id`: of the message of that epoch; "": no message."""
        self.cluster, self.epoch, self.values, self.id = cluster, epoch, values, id

    def encode(self) -> bytes:
        """Return the text of the file."""
        lines = [
            f"kmq-states {VERSION} cluster={self.cluster} epoch={self.epoch}" + (f" id={self.id}" if self.id else "")
        ]
        lines += [f"{key} {value}" for key, value in sorted(self.values.items())]
        return ("\n".join(lines) + "\n").encode()

    @classmethod
    def decode(cls, text: bytes) -> "States":
        """Return the states in the text of a file. Raises ValueError if it is not a file of this version."""
        head, *lines = text.decode().removesuffix("\n").split("\n")
        if not head:
            raise ValueError("is empty")
        word, version, cluster, epoch, id = (head.split(" ") + [""] * 5)[:5]
        if word != "kmq-states" or not version.isdigit():
            raise ValueError("is no file of states")
        if int(version) != VERSION:
            raise ValueError(f"has version {version}, but this release knows {VERSION}")
        if not text.endswith(b"\n"):
            raise ValueError("is cut")
        values = {key: value for key, _, value in (line.partition(" ") for line in lines)}
        number = int(epoch.removeprefix("epoch="))
        return cls(cluster.removeprefix("cluster="), number, values, id.removeprefix("id="))

    def under(self, prefix: str) -> dict[str, str]:
        """Return name → value of one kind of states."""
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}


def path_of(settings: Settings) -> str:
    return f"{settings.data}/cluster/states"


def read(settings: Settings) -> States | None:
    """Return the states of these settings' cluster; None: no file yet. Raises ConfigError if it is unreadable."""
    path = path_of(settings)
    if not settings.cluster:
        return None
    try:
        with open(path, "rb") as file:
            states = States.decode(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; the agent makes it again from Consul, see its log") from None
    return states if states.cluster == settings.cluster else None


def fault(name: str, value: str) -> str:
    """Return why a setting of the fleet has no effect here; "" if it has an effect."""
    if name not in SHARED:
        return f"unknown setting; this release knows {', '.join(SHARED)}"
    if UNREADABLE in value:
        return "is not readable; publish it anew with: kmq fleet set"
    if value != DEFAULT:
        try:
            SHARED[name].parse(value)
        except ValueError as error:
            return str(error)
    return ""


class InForce:
    """The settings and revoked tokens that are in force now. Cheap to ask; empty without KMQ_CLUSTER."""

    def __init__(self, settings: Settings, warn: Callable[..., None] | None = None) -> None:
        """`warn`: called with a log event when the file cannot be read; only one process of the broker passes it."""
        self._own, self._warn = settings, warn
        self.settings, self.revoked = settings, frozenset[str]()
        self.is_unknown = False  # the file exists, but was never read: any token may be revoked
        self._has_read = False
        self._watch = Watch(path_of(settings)) if settings.cluster else None
        if self._watch is not None:
            self._read()

    def changed(self) -> bool:
        """Return True if settings or tokens have changed since the last call."""
        if self._watch is None or not self._watch.changed():
            return False
        before = self.settings, self.revoked
        self._read()
        return before != (self.settings, self.revoked)

    def _report_unreadable(self, reason: object) -> None:
        self.is_unknown = not self._has_read
        effect = "what was in force stays in force"
        if self.is_unknown:
            effect = "no token is accepted, and nothing that the fleet has set is in force, until it can be read"
        if self._warn is not None:
            self._warn("states_kept", reason=reason, effect=effect)

    def _read(self) -> None:
        try:
            states = read(self._own)
        except ConfigError as error:
            return self._report_unreadable(error)
        if states is None:
            if self._has_read or self.is_unknown:
                self._report_unreadable(f"{path_of(self._own)}: is gone, or another cluster's")
            return None
        self._has_read, self.is_unknown = True, False
        texts = states.under(SETTINGS)
        self.settings = self._own.with_shared(
            {name: text for name, text in texts.items() if text != DEFAULT and not fault(name, text)}
        )
        self.revoked = frozenset(states.under(TOKENS))
        return None
