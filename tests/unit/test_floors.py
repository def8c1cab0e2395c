"""The rooms of the house and what each may import: arrows run down only, and nothing grows too large to read.

Reads the source only (`ast`): imports inside functions and under `if TYPE_CHECKING` count like those at the top of a module.
`COUNTERS` measure how far the code is in pieces. Each has its value in MOST, which may only fall.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from syntax_trees import nodes, tree

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE, MAX_FUNCTION = 800, 60
SMALL_FILE = 100

# From the top down. A module may import from its own room and from every lower floor; rooms of one floor never import one
# another. A room is one string of packages and modules; the longest name that fits decides (`kmq.spark.sink` before `kmq.spark`).
FLOORS = [
    ["scripts kmq.__main__ kmq.probe kmq.spark.submit"],
    ["kmq.cli"],
    [
        "stages.ingress",
        "stages.framer",
        "stages.durability",
        "stages.router",
        "stages",
        "kmq.gateway",
        "kmq.spark",
        "kmq.fleet kmq.cluster.agent",
        "kmq.tier.restore",
        "kmq.testing",
        "kmq.shipping",
    ],
    [
        "kmq.gateway.http",
        "kmq.gateway.grpc",
        "kmq.gateway.lines",
        "kmq.gateway.kafka",
        "kmq.spark.pipelines",
        "kmq.spark.audit",
        "kmq.spark.sql",
    ],
    ["kmq.gateway.console"],
    ["kmq.gateway.groups"],
    ["kmq.gateway.core", "kmq.spark.tables", "kmq.spark.streaming", "kmq.spark.sink"],
    ["kmq.spark.source"],
    ["kmq.spark.connections kmq.spark.failures kmq.spark.paths kmq.spark.pinned"],
    ["kmq.ingress", "kmq.framing", "kmq.router", "kmq.repair", "kmq.deadletters", "kmq.replica", "kmq.tier"],
    ["kmq.broker"],
    ["kmq.client kmq", "kmq.log"],
    ["kmq.links", "kmq.cluster", "kmq.access", "kmq.sending"],
    ["kmq.config"],
    ["kmq.wire", "kmq.files"],
    ["kmq.message"],
    ["kmq.errors kmq.logfmt"],
]

# What breaks the rules today, one entry a line. The list only shrinks: an entry that no longer breaks a rule has to go.
STILL: dict[str, set[str]] = {
    "arrow": set(),
    "circle": set(),
    "file": set(),
    "function": set(),
}


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def read_sources() -> dict[str, tuple[str, str]]:
    """Every Python file under kmq, stages and scripts: name of the module → (path, text)."""
    paths = [path for top in ("kmq", "stages", "scripts") for path in sorted((ROOT / top).rglob("*")) if path.is_file()]
    scripts = [path for path in paths if not path.suffix and path.read_bytes().startswith(b"#!/usr/bin/env python3")]
    is_python = [path for path in paths if path.suffix == ".py"] + scripts
    names = [path.relative_to(ROOT) for path in is_python]
    return {module_name(name): (str(name), (ROOT / name).read_text()) for name in names}


@cache
def names_taken(importer: str, path: str, text: str) -> list[tuple[str, str]]:
    """What a module imports: (module, name) for each name of `from module import name`, (module, module) for `import module`."""
    pairs = []
    for node in nodes(text):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            if node.level:  # relative: `from .` or `from ..package`
                inside = importer.split(".") if path.endswith("__init__.py") else importer.split(".")[:-1]
                package = ".".join([*inside[: len(inside) - node.level + 1], *filter(None, [node.module])])
            pairs += [(package, alias.name) for alias in node.names]
    return pairs


def imports(sources: dict[str, tuple[str, str]]) -> dict[tuple[str, str], set[str]]:
    """(importing module, imported module of ours) → the names taken."""
    taken: dict[tuple[str, str], set[str]] = {}
    for importer, (path, text) in sources.items():
        for package, name in names_taken(importer, path, text):
            targets = [f"{package}.{name}", package, f"scripts.{package}"]  # scripts import each other by the bare name
            target = next((target for target in targets if target in sources), None)
            if target and target != importer:
                taken.setdefault((importer, target), set()).add(name)
    return taken


@cache
def place(module: str) -> tuple[int, str]:
    """The floor of a module, counted from the top, and its room."""
    rooms = [(part, floor, room) for floor, row in enumerate(FLOORS) for room in row for part in room.split()]
    # `kmq` alone is the package's own __init__: a new module or package beneath it has to be given a floor.
    matching = [
        found for found in rooms if module == found[0] or (found[0] != "kmq" and module.startswith(f"{found[0]}."))
    ]
    assert matching, f"{module} has no floor: give it one in FLOORS"
    _, floor, room = max(matching, key=lambda found: len(found[0]))
    return floor, room


def wrong_arrows(sources: dict[str, tuple[str, str]]) -> dict[str, str]:
    wrong = {}
    for (importer, target), names in imports(sources).items():
        (floor, room), (lower, other) = place(importer), place(target)
        if room != other and lower <= floor:
            key = f"{sources[importer][0]} -> {sources[target][0]}"
            wrong[key] = f"{key}: takes {', '.join(sorted(names))}; {room!r} must not import {other!r}"
    return wrong


def circles(sources: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Every set of modules that import one another in a circle."""
    arrows: dict[str, set[str]] = {module: set() for module in sources}
    taken = imports(sources)
    for importer, target in taken:
        arrows[importer].add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*arrows[start]]
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += arrows[module]
        return seen

    reach = {module: reached(module) for module in sources}
    found = {}
    for module in sources:
        if module in reach[module]:
            members = {other for other in reach[module] if module in reach[other]}
            inner = [(a, b, names) for (a, b), names in taken.items() if a in members and b in members]
            key = " <-> ".join(sorted(sources[member][0] for member in members))
            found[key] = "; ".join(
                f"{sources[a][0]} takes {', '.join(sorted(n))} of {sources[b][0]}" for a, b, n in inner
            )
    return found


def long_files(sources: dict[str, tuple[str, str]]) -> dict[str, str]:
    lengths = {path: len(text.splitlines()) for path, text in sources.values()}
    return {path: f"{path} has {lines} lines" for path, lines in lengths.items() if lines > MAX_FILE}


@cache
def defined(path: str, text: str) -> list[tuple[str, ast.AST]]:
    """Every definition of a file, with its dotted name inside the file."""

    def inside(node: ast.AST, prefix: str):
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None) if isinstance(child, DEFINITIONS) else None
            dotted = f"{prefix}.{name}" if prefix and name else name or prefix
            if isinstance(child, DEFINITIONS):
                yield dotted, child
            yield from inside(child, dotted)

    return list(inside(tree(text), ""))


def definitions(sources: dict[str, tuple[str, str]], kind: type[ast.AST] | tuple[type[ast.AST], ...]):
    """Every definition of a kind, with its path and its dotted name inside the file."""
    for path, text in sources.values():
        for name, node in defined(path, text):
            if isinstance(node, kind):
                yield f"{path}: {name}", node


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


def long_functions(sources: dict[str, tuple[str, str]]) -> dict[str, str]:
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node in definitions(sources, FUNCTIONS)}
    return {name: f"{name} has {lines} lines" for name, lines in lengths.items() if lines > MAX_FUNCTION}


CHECKS = {
    "arrow": wrong_arrows,
    "circle": circles,
    "file": long_files,
    "function": long_functions,
}


def broken(rule: str, sources: dict[str, tuple[str, str]], still: set[str]) -> list[str]:
    """What breaks a rule and is not in `still`, and what is in `still` and breaks it no longer."""
    found = CHECKS[rule](sources)
    mended = [f"{key!r} no longer breaks the rule: remove it from STILL" for key in sorted(still - found.keys())]
    return [text for key, text in found.items() if key not in still] + mended


@pytest.mark.parametrize("rule", CHECKS)
def test_the_house_keeps_the_rule_of(rule):
    wrong = broken(rule, read_sources(), STILL[rule])
    assert not wrong, "\n" + "\n".join(wrong)


def test_an_entry_that_breaks_no_rule_any_more_has_to_go():
    assert broken("file", {"kmq.log.new": ("kmq/log/new.py", "")}, {"kmq/log/new.py"}) == [
        "'kmq/log/new.py' no longer breaks the rule: remove it from STILL"
    ]


def test_every_name_in_the_floors_exists():
    sources = read_sources()
    parts = [part for row in FLOORS for room in row for part in room.split()]
    absent = [part for part in parts if part != "scripts" and part not in sources]
    assert not absent and len(parts) == len(set(parts))


def sources_with(**added: str) -> dict[str, tuple[str, str]]:
    """The sources as they are, and modules beside them whose text is given: `kmq__log__new="import …"`."""
    names = {name.replace("__", "."): text for name, text in added.items()}
    return read_sources() | {name: (name.replace(".", "/") + ".py", text) for name, text in names.items()}


@pytest.mark.parametrize(
    "text",
    [
        "from kmq.router import queues",
        "import kmq.router.queues",
        "from kmq.router.queues import Queues",
        "from ..router import queues",
        "def later():\n    from kmq.router import queues",
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from kmq.router import queues",
    ],
)
def test_an_arrow_that_runs_up_is_found_and_named(text):
    wrong = wrong_arrows(sources_with(kmq__log__new=text))
    [said] = [said for key, said in wrong.items() if key == "kmq/log/new.py -> kmq/router/queues.py"]
    assert "takes" in said and "ueues; 'kmq.log' must not import 'kmq.router'" in said


@pytest.mark.parametrize(
    ("importer", "target"),
    [
        ("kmq/gateway/http/new.py", "kmq/gateway/grpc/front.py"),
        ("kmq/gateway/core/new.py", "kmq/gateway/server.py"),
        ("kmq/repair/new.py", "kmq/router/queues.py"),
        ("kmq/spark/source/new.py", "kmq/spark/sink/sink.py"),
        ("stages/router.py", "stages/framer.py"),
        ("kmq/cli/new.py", "scripts/demo.py"),
    ],
)
def test_rooms_of_one_floor_and_higher_ones_are_not_imported(importer, target):
    added = {module_name(Path(importer)).replace(".", "__"): f"import {module_name(Path(target))}"}
    assert f"{importer} -> {target}" in wrong_arrows(sources_with(**added))


def test_an_arrow_down_and_one_inside_a_room_are_allowed():
    wrong = wrong_arrows(sources_with(kmq__log__new="from kmq.links import fifo\nfrom kmq.log import disk\nimport os"))
    assert not [key for key in wrong if key.startswith("kmq/log/new.py")]


def test_a_circle_is_found_with_its_names():
    found = circles(
        sources_with(kmq__log__a="from kmq.log import b", kmq__log__b="def f():\n    from kmq.log.a import X")
    )
    text = found["kmq/log/a.py <-> kmq/log/b.py"]
    assert "kmq/log/a.py takes b of kmq/log/b.py" in text and "kmq/log/b.py takes X of kmq/log/a.py" in text


def test_what_grows_too_large_is_found():
    grown = "class C:\n    def f(self): pass\n    async def g(self):\n" + "        1\n" * MAX_FUNCTION
    sources = sources_with(kmq__log__new=grown, kmq__log__longer="\n" * (MAX_FILE + 1))
    assert "kmq/log/longer.py" in long_files(sources) and "kmq/log/new.py" not in long_files(sources)
    assert "kmq/log/new.py: C.g" in long_functions(sources) and "kmq/log/new.py: C.f" not in long_functions(sources)


def test_a_module_without_a_floor_is_found():
    with pytest.raises(AssertionError, match=r"kmq\.stranger has no floor"):
        place("kmq.stranger")


# --- counters --------------------------------------------------------------------------------------------------------

Sources = dict[str, tuple[str, str]]


def small_files(sources: Sources) -> set[str]:
    """Files that only one module needs, and that are too small to be a chapter."""
    importers: Counter[str] = Counter(target for _, target in imports(sources))
    return {
        path
        for module, (path, text) in sources.items()
        if importers[module] == 1 and len(text.splitlines()) < SMALL_FILE and not path.endswith("__init__.py")
    }


def homonyms(sources: Sources) -> set[str]:
    """Names that more than one class has."""
    names = Counter(node.name for _, node in definitions(sources, ast.ClassDef))
    return {name for name, count in names.items() if count > 1}


def methods(node: ast.ClassDef) -> list[str]:
    return [child.name for child in node.body if isinstance(child, FUNCTIONS) and not child.name.startswith("__")]


def has_callable(annotation: ast.AST | None) -> bool:
    return annotation is not None and "Callable" in ast.unparse(annotation)


@cache
def callable_names(path: str, text: str) -> tuple[set[str], set[str], set[str], set[str]]:
    """Names in a file: of functions, and of attributes: called, annotated as Callable, and those that are values."""
    functions, called, annotated, values = set(), set(), set(), set()
    for node in nodes(text):
        if isinstance(node, FUNCTIONS):
            functions.add(node.name)
        elif isinstance(node, ast.arg) and has_callable(node.annotation):
            functions.add(node.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called.add(node.func.attr)
        elif isinstance(node, ast.AnnAssign):
            into = annotated if has_callable(node.annotation) else values
            into.add(getattr(node.target, "attr", getattr(node.target, "id", "")))
        elif isinstance(node, ast.AugAssign):
            values.add(getattr(node.target, "attr", ""))
    return functions, called, annotated, values


def set_later(sources: Sources) -> set[str]:
    """Callables that are set on another object after it was made: an import upward that no floor sees.

    Names decide, for types are not known here: what is set is a function, a method or a `partial`, and an attribute of that
    name is annotated as Callable, or called and never a number or a text.
    """
    known = {method for _, node in definitions(sources, ast.ClassDef) for method in methods(node)}
    names = [callable_names(*each) for each in sources.values()]
    called, annotated, values = (set().union(*(each[at] for each in names)) for at in (1, 2, 3))
    found = set()
    for path, text in sources.values():
        functions = callable_names(path, text)[0]
        for node in nodes(text):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                is_own = getattr(getattr(target, "value", None), "id", "") in ("self", "cls")
                if not isinstance(target, ast.Attribute) or is_own or target.attr not in (called - values) | annotated:
                    continue
                value = node.value
                is_function = isinstance(value, ast.Lambda) or getattr(value, "id", "") in functions
                is_method = isinstance(value, ast.Attribute) and value.attr in known
                is_partial = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "partial"
                if is_function or is_method or is_partial:
                    found.add(f"{path}: {ast.unparse(node)}")
    return found


def pass_on(sources: Sources) -> set[str]:
    """Functions that hand their arguments to another one, and do nothing else."""
    found = set()
    for name, node in definitions(sources, FUNCTIONS):
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        value = getattr(body[0], "value", None) if len(body) == 1 else None
        call = value.value if isinstance(value, ast.Await) else value
        taken = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        given = [*call.args, *(each.value for each in call.keywords)] if isinstance(call, ast.Call) else None
        wanted = taken[1:] if taken[:1] in (["self"], ["cls"]) else taken
        is_plain = not node.decorator_list and not node.name.startswith("__")
        if is_plain and given is not None and wanted and [getattr(each, "id", None) for each in given] == wanted:
            found.add(name)
    return found


COUNTERS = {
    "files under 100 lines with one importer": small_files,
    "class names used twice": homonyms,
    "callables set later": set_later,
    "functions that only pass on": pass_on,
}
MOST = {
    "files under 100 lines with one importer": 8,
    "class names used twice": 20,  # the Kafka door has a Connection of its own, as ingress has
    "callables set later": 1,  # SSLContext.wrap_socket, which the clients of the standard library call
    "functions that only pass on": 22,
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_only_falls(name, capsys):
    found = COUNTERS[name](read_sources())
    with capsys.disabled():
        print(f"\n{name}: {len(found)} (at most {MOST[name]})")
    assert len(found) <= MOST[name], "one too many, among: " + ", ".join(sorted(found))
    assert len(found) == MOST[name], f"it fell: MOST[{name!r}] is {len(found)} now"


def test_the_counters_count():
    later = (
        "class C:\n    def f(self, a): return g(a)\n    def h(self): self.on_new(); self.c.ask_new()\n"
        "    new_size: int = 0\ndef g(a): return a + 1\n"
        "c = C()\nc.on_new = g\nc.on_new = c.f\nc.c.ask_new = partial(g, 1)\nc.on_new = lambda: 1\n"
        "c.uncalled_new = g\nc.new_size = c.f\nc.on_new = 1\n"
    )
    before, after = read_sources(), sources_with(kmq__log__new=later, kmq__log__user="from kmq.log.new import C")
    more = {name: count(after) - count(before) for name, count in COUNTERS.items()}
    assert more["files under 100 lines with one importer"] == {"kmq/log/new.py"}
    assert more["functions that only pass on"] == {"kmq/log/new.py: C.f"}
    set_texts = {"c.on_new = g", "c.on_new = c.f", "c.c.ask_new = partial(g, 1)", "c.on_new = lambda: 1"}
    assert more["callables set later"] == {f"kmq/log/new.py: {text}" for text in set_texts}
    twice = sources_with(kmq__log__new=later, kmq__log__other="class C:\n    def f(self): pass\nC()\n")
    assert "C" in homonyms(twice) - homonyms(before)
