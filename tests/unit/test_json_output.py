"""Every command that prints a table prints it for programs, too: --json."""

import ast
import importlib
import inspect
import json
from functools import cache
from pathlib import Path

from command_tree import every_command, is_group
from syntax_trees import nodes
from typer.testing import CliRunner

from kmq.cli.app import app

ROOT = Path(__file__).parents[2]


@cache
def source(module: str) -> str | None:
    path = ROOT / (module.replace(".", "/") + ".py")
    return path.read_text() if path.exists() else None


@cache
def functions(module: str) -> dict[str, ast.FunctionDef]:
    text = source(module)
    return {} if text is None else {each.name: each for each in nodes(text) if isinstance(each, ast.FunctionDef)}


@cache
def imports(module: str) -> dict[str, tuple[str, str]]:
    """Name → (module, "" or what of it) of the imports anywhere in a module."""
    found = {}
    for each in nodes(source(module)):
        if isinstance(each, ast.ImportFrom) and each.module and each.level == 0:
            for name in each.names:
                inner = f"{each.module}.{name.name}"
                found[name.asname or name.name] = (inner, "") if source(inner) is not None else (each.module, name.name)
    return found


def builds_table(module: str, function: str, seen: set[tuple[str, str]]) -> bool:
    """Whether a function, or one that it names, makes a rich Table."""
    node = functions(module).get(function)
    if node is None or (module, function) in seen:
        return False
    seen.add((module, function))
    known = imports(module)
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            place = known.get(each.id, (module, each.id))
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in known:
            place = known[each.value.id][0], each.attr
        else:
            continue
        if place == ("rich.table", "Table") or builds_table(*place, seen):
            return True
    return False


def commands():
    return {" ".join(("kmq", *words)): command for words, command in every_command() if not is_group(command)}


def with_tables() -> dict[str, set[str]]:
    """Command that prints a table → its options."""
    found = {}
    for name, command in commands().items():
        function = inspect.unwrap(command.callback)
        if builds_table(function.__module__, function.__name__, set()):
            found[name] = {option for each in command.params for option in each.opts}
    return found


def test_every_command_that_prints_a_table_has_json():
    found = with_tables()
    assert {"kmq status", "kmq topics list", "kmq topics show", "kmq groups list", "kmq groups describe"} <= set(found)
    assert {"kmq log stat", "kmq dlq ls", "kmq bq status", "kmq fleet status", "kmq config show"} <= set(found)
    assert {"kmq audit", "kmq sql", "kmq pipeline status", "kmq pipeline run metrics"} <= set(found)
    assert [name for name, options in found.items() if "--json" not in options] == []


def test_lists_that_are_no_tables_have_json_too():
    every = commands()
    for name in ("kmq token list", "kmq pipeline list", "kmq verify"):
        assert "--json" in {option for each in every[name].params for option in each.opts}, name


def test_pipeline_list_as_json_has_every_pipeline_of_the_text():
    shown, said = (CliRunner().invoke(app, ["pipeline", "list", *more]) for more in ([], ["--json"]))
    rows = json.loads(said.stdout)["pipelines"]
    assert [f"{row['name']:10} {row['help']}" for row in rows] == shown.stdout.splitlines()
    assert {"audit", "metrics", "mirror"} <= {row["name"] for row in rows}


def test_a_table_that_is_made_far_away_is_seen():
    module = importlib.import_module("kmq.cli.pipelines")
    assert builds_table(module.__name__, "audit", set()) and not builds_table("kmq.cli.lifecycle", "down", set())
