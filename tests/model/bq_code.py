"""The code of the Broadcast Queue with a clock of the test's, small limits, and, for a mutant, a guard taken out."""

import sys
import types
import uuid
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

DAY_S = 90_000.0  # after which a broker counts as absent
CLUSTER = Path(__file__).resolve().parents[2] / "kmq/cluster"
MODULES = ("consul", "presence", "publisher", "subscriber")  # each after what it imports

Edit = tuple[str, str, str]  # module, what stands there (once), what is put in its place


class Clock:
    """Stands in for the module `time`: both clocks move only when they are told to."""

    def __init__(self) -> None:
        self.wall, self.run = 1_700_000_000.0, 0.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.run

    def forward(self, seconds: float) -> None:
        self.wall += seconds
        self.run += seconds


class Uuids:
    """Stands in for the module `uuid`: the same names in each run."""

    def __init__(self) -> None:
        self._last = 0

    def uuid4(self) -> uuid.UUID:
        self._last += 1
        return uuid.UUID(int=self._last)


class Code(NamedTuple):
    """The modules, made anew: they share nothing with those that `import kmq.cluster` gives."""

    consul: Any
    presence: Any
    publisher: Any
    subscriber: Any
    clock: Clock


@cache
def _compiled(name: str, edits: Sequence[Edit]) -> types.CodeType:
    text = (CLUSTER / f"{name}.py").read_text()
    for _, old, new in edits:
        if text.count(old) != 1:
            raise ValueError(
                f"{name}.py: {old!r} stands there {text.count(old)} times; the mutant must follow the code"
            )
        text = text.replace(old, new)
    return compile(text, f"{name}.py{' mutated' if edits else ''}", "exec")


def load(edits: Iterable[Edit] = (), kept: int = 3, kept_bytes: int = 200, trim_every: int = 2) -> Code:
    """Return the modules with these edits and limits."""
    edits = tuple(edits)
    names = ["kmq.cluster", *(f"kmq.cluster.{name}" for name in MODULES)]
    others = {name: sys.modules.pop(name, None) for name in names}
    clock, uuids = Clock(), Uuids()
    modules = {}
    try:
        package = types.ModuleType("kmq.cluster")
        package.__path__ = []
        sys.modules["kmq.cluster"] = package
        for name in MODULES:
            module = modules[name] = types.ModuleType(f"kmq.cluster.{name}")
            sys.modules[module.__name__] = module
            setattr(package, name, module)
            exec(_compiled(name, tuple(edit for edit in edits if edit[0] == name)), module.__dict__)
            for stand_in, real in ((clock, "time"), (uuids, "uuid")):
                if isinstance(getattr(module, real, None), types.ModuleType):
                    setattr(module, real, stand_in)
    finally:
        for name, other in others.items():
            sys.modules.pop(name, None)
            if other is not None:
                sys.modules[name] = other
    code = Code(**modules, clock=clock)
    code.publisher.KEPT, code.publisher.KEPT_BYTES = kept, kept_bytes
    code.publisher.GONE_S = 1.5 * DAY_S  # so that two days are enough
    code.publisher.TRIM_EVERY = trim_every
    return code
