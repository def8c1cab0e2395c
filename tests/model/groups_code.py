"""The code of consumer groups, made anew; for a mutant with a guard taken out."""

import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

GROUPS = Path(__file__).resolve().parents[2] / "kmq/gateway/groups"
PACKAGE = "kmq.gateway.groups"
# Each after what it imports.
MODULES = ("assignors", "protocol", "group", "coordinator")

Edit = tuple[str, str, str]  # module, what stands there (once), what is put in its place


class Code(NamedTuple):
    """The modules: they share nothing with those that `import kmq.gateway.groups` gives."""

    assignors: Any
    protocol: Any
    group: Any
    coordinator: Any


def _edited(name: str, edits: Iterable[Edit]) -> str:
    text = (GROUPS / f"{name}.py").read_text()
    for module, old, new in edits:
        if module == name:
            if text.count(old) != 1:
                raise ValueError(
                    f"{name}.py: {old!r} stands there {text.count(old)} times; the mutant must follow the code"
                )
            text = text.replace(old, new)
    return text


def load(edits: Iterable[Edit] = ()) -> Code:
    """Return the modules with these edits."""
    edits = tuple(edits)
    names = [PACKAGE, *(f"{PACKAGE}.{name}" for name in MODULES)]
    others = {name: sys.modules.pop(name, None) for name in names}
    modules = {}
    try:
        package = types.ModuleType(PACKAGE)
        package.__path__ = []
        sys.modules[PACKAGE] = package
        for name in MODULES:
            module = modules[name] = types.ModuleType(f"{PACKAGE}.{name}")
            sys.modules[module.__name__] = module
            exec(compile(_edited(name, edits), f"{name}.py{' mutated' if edits else ''}", "exec"), module.__dict__)
    finally:
        for name, other in others.items():
            sys.modules.pop(name, None)
            if other is not None:
                sys.modules[name] = other
    return Code(**modules)
