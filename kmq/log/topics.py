"""topics/<topic>/topic.toml: what has been declared, and from which seq on it is in force.

    partitions = 4                   fixed for the topic's life
    from_seq = 17                    written by the router
    segment_bytes = "256 MiB"        these five in place of the settings, written as they are; read by the router
    segment_age = "1d"               when it starts or adopts the topic, written by it on request (requests.py)
    retention_age = "30d"
    retention_bytes = "10 GiB"
    cleanup = "compact"              delete (default) or compact: only the latest record of each key has to stay

A declaration without `from_seq` is pending: `declare` makes it, the router adopts it with the next seq it will route.
That is the only way to a seq that is right by construction: only the router knows what has been routed.
"""

import os
import re
from collections.abc import Iterator

from kmq import record, routing
from kmq.errors import ConfigError, CorruptError
from kmq.log import identity
from kmq.log.deletions import Deleted
from kmq.log.disk import replace_file, sync_directory
from kmq.log.segment import LIMITS, Limits
from kmq.routing import Table, Topic

MAX_PARTITIONS = 1024


def toml_path(data: str, name: str) -> str:
    return f"{data}/topics/{name}/topic.toml"


class Declaration:
    """What topic.toml says. `from_seq` is None while it is pending; `limits`: in place of the settings, as texts."""

    __slots__ = ("from_seq", "is_guessed", "limits", "partitions")

    def __init__(self, partitions: int, from_seq: int | None = None, limits: dict[str, str] | None = None) -> None:
        self.partitions, self.from_seq, self.limits = partitions, from_seq, limits or {}
        self.is_guessed = False  # from the directories, because the file cannot be read

    def text(self) -> bytes:
        lines = [f"partitions = {self.partitions}"]
        if self.from_seq is not None:
            lines.append(f"from_seq = {self.from_seq}")
        lines += [_limit_line(name, value) for name, value in self.limits.items()]
        return ("\n".join(lines) + "\n").encode()


def _limit_line(name: str, value: str) -> str:
    return f"{name} = {value}" if value.isdigit() else f'{name} = "{value}"'


def with_limits(text: str, changes: dict[str, str]) -> str:
    """The text of a topic.toml with other limits; "" takes one away. All other lines stay as they are."""
    lines = text.splitlines()
    for name, value in changes.items():
        at = [number for number, line in enumerate(lines) if re.match(rf"\s*{name}\s*=", line)]
        place = at[0] if at else next((n for n, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
        lines = [line for number, line in enumerate(lines) if number not in at]
        if value:
            lines.insert(place, _limit_line(name, value))
    return "\n".join(lines) + "\n"


def _in_range(partitions: int) -> int:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ValueError(f"partitions = {partitions}: must be between 1 and {MAX_PARTITIONS}")
    return partitions


def read(data: str, name: str) -> Declaration:
    """The declaration of a topic.

    A file that a power cut left empty is made good from the partitions that are there: only topics that messages
    created themselves are written without a sync, and those have one partition and are in force from the start.
    """
    try:
        with open(toml_path(data, name), "rb") as file:
            return parse(file.read().decode())
    except (FileNotFoundError, KeyError, ValueError):
        try:
            found = sum(entry.isdigit() for entry in os.listdir(f"{data}/topics/{name}"))
        except FileNotFoundError:  # deleted a moment ago
            return Declaration(1)
        guessed = Declaration(max(1, found), Deleted.of(data).last_seq(name) + 1)
        guessed.is_guessed = True
        return guessed


def parse(text: str) -> Declaration:
    """What the text of a topic.toml says. Raises KeyError or ValueError where it is none."""
    import tomllib

    table = tomllib.loads(text)
    partitions, from_seq = _in_range(int(table["partitions"])), table.get("from_seq")
    limits = {each: str(table[each]) for each in LIMITS if each in table}
    return Declaration(partitions, None if from_seq is None else int(from_seq), limits)


def fault(data: str, name: str, since: int | None = None, at_start: bool = False) -> str:
    """What is wrong with a declaration; "" where nothing is. `since`: its from_seq by router.ckpt, where that knows it.

    `at_start`: only faults with which the router must not start. It makes missing partitions again.
    """
    import tomllib

    found = sum(entry.isdigit() for entry in os.listdir(f"{data}/topics/{name}"))
    try:
        with open(toml_path(data, name), "rb") as file:
            text = file.read()
        table = tomllib.loads(text.decode())
        partitions, from_seq = _in_range(int(table["partitions"])), table.get("from_seq")
        if not at_start:
            Limits().but(read(data, name).limits)
    except (FileNotFoundError, KeyError, TypeError, ValueError, ConfigError) as err:
        return f"cannot be read: {err}"
    if from_seq is None:
        has = any(size for number in range(found) for size in _sizes(f"{data}/topics/{name}/{number}"))
        return "has no from_seq, but the topic has records" if has else ""
    if partitions < found or (partitions > found and not at_start):
        return f"says {partitions} partitions, but there are {found}"
    if not text.endswith(b"\n"):  # the router wrote one; a cut number is a number too
        return "is cut"
    if since not in (None, from_seq):
        return f"says from_seq {from_seq}, but router.ckpt says {since}"
    return ""


def _sizes(directory: str) -> list[int]:
    return [entry.stat().st_size for entry in os.scandir(directory)] if os.path.isdir(directory) else []


def load(data: str, name: str) -> tuple[int, int | None]:
    """(partitions, from_seq) of a topic; from_seq is None while the declaration is pending."""
    found = read(data, name)
    return found.partitions, found.from_seq


def names(data: str) -> list[str]:
    """Names of all topics, in order. What cannot be one is none of ours (`check_names`)."""
    left = {name for name, _ in left_over(data)}
    return sorted(name for name in _directories(data) if name not in left and record.is_topic_name(name))


def left_over(data: str) -> list[tuple[str, int]]:
    """(name, partitions) of deleted topics whose directory still exists, because a kill came before its removal."""
    found = []
    for name, lives in Deleted.of(data).lives.items():
        if os.path.isdir(f"{data}/topics/{name}"):
            declared = read(data, name)
            if declared.from_seq is not None and declared.from_seq <= lives[-1][1]:
                found.append((name, declared.partitions))
    return found


def misnamed(data: str) -> list[str]:
    """Directories among the topics that cannot be one. Each may be what is left of a topic."""
    return sorted(name for name in _directories(data) if not record.is_topic_name(name) and name != "lost+found")


def printable(name: str) -> str:
    """The name of a directory, whatever bytes it is made of."""
    return repr(os.fsencode(name))[2:-1]


def check_names(data: str) -> None:
    """Raise CorruptError where a directory among the topics is misnamed."""
    for name in misnamed(data):
        raise CorruptError(
            f"{data}/topics/{printable(name)}: is not a topic's name; move it away, or run kmq verify --repair"
        )


def _directories(data: str) -> Iterator[str]:
    return (entry.name for entry in os.scandir(f"{data}/topics") if not entry.name.startswith(".") and entry.is_dir())


def listing(data: str) -> list[tuple[str, int, int | None]]:
    """(name, partitions, from_seq) of all topics, in order."""
    return [(name, *load(data, name)) for name in names(data)]


def table(data: str) -> Table:
    """The topics in force, and those that were deleted, as `kmq.routing.resolve` takes them."""
    in_force = [(name, partitions, since) for name, partitions, since in listing(data) if since is not None]
    return routing.table(in_force, Deleted.of(data).lives, identity.marks_from(data))


def declare(data: str, name: str, partitions: int, limits: dict[str, str] | None = None) -> None:
    """Declare a topic; it is pending until the router has adopted it. Raises ConfigError naming what is wrong."""
    Limits().but(limits or {})
    if not record.is_topic(name):
        raise ConfigError(
            f"topic {name!r}: must match [A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}} and not begin with append, dropped or __"
        )
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ConfigError(f"partitions={partitions}: must be between 1 and {MAX_PARTITIONS}")
    if os.path.isdir(f"{data}/topics/{name}"):
        raise ConfigError(f"topic {name!r} exists already with {load(data, name)[0]} partition(s)")
    for link in Topic(name, partitions, 1).log_names():
        if os.path.lexists(f"{data}/{link}"):
            raise ConfigError(f"topic {name!r}: its symlink {link} exists already and leads to another queue")
    try:
        make(data, name, Declaration(partitions, None, limits))
    except OSError as err:
        raise ConfigError(f"topic {name!r}: could not be declared: {err.strerror}") from err


def make(data: str, name: str, declaration: Declaration) -> None:
    """A new topic, on disk with its declaration or not at all."""
    directory, making = f"{data}/topics/{name}", f"{data}/topics/.new-{name}-{os.urandom(4).hex()}"
    if os.path.isdir(directory):
        replace_file(f"{directory}/topic.toml", declaration.text())
        return
    os.mkdir(making)
    try:
        replace_file(f"{making}/topic.toml", declaration.text())
        os.rename(making, directory)
    except OSError:
        import shutil  # here, because it takes half a MiB of each stage

        shutil.rmtree(making)
        raise
    sync_directory(f"{data}/topics")
