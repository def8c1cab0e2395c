"""The table of refusals: every code that a module sends has a row, and every row is sent by some module."""

import ast
import pathlib
import re
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
from syntax_trees import nodes

from kmq import errors
from kmq.broker.stats import ADMISSIONS
from kmq.wire import refusals

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = [*(ROOT / "kmq").rglob("*.py"), *(ROOT / "stages").glob("*.py")]
MODULES.remove(ROOT / "kmq" / "wire" / "refusals.py")
# What is called with a code, and where: alone, or before its text.
CALLS = {
    "RequestRefused": 0,
    "Refused": 0,
    "malformed": 0,
    "reason": 0,
    "known": 0,
    "status_of": 0,
    "_end_line": 1,
    "_put": 3,
}
FUNCTIONS = {"refusal", "_refusal"}  # whose result is a code, or "" for none
NAMES = {"reason", "REFUSAL"}  # what is assigned a code
BEFORE_A_CODE = re.compile(r"!err (?:%d|0) ([a-z_]+)")
FIRST_WORD = re.compile(r"[a-z_]{3,}(?= |$)")


def texts(parts: Iterable[ast.AST]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes)):
            yield part.value if isinstance(part.value, str) else part.value.decode(errors="replace")


def choices(node: ast.AST) -> Iterator[str]:
    """The text that an expression is, or is one of, or begins with."""
    if isinstance(node, ast.IfExp):
        yield from choices(node.body)
        yield from choices(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield from choices(node.values[0])
    elif isinstance(node, ast.Constant):
        yield from texts([node])


def sent_by(module: str) -> set[str]:
    """The codes in the text of a module."""
    found = []
    for node in nodes(module):
        if isinstance(node, ast.Call):
            place = CALLS.get(getattr(node.func, "attr", getattr(node.func, "id", "")), len(node.args))
            found += [*choices(node.args[place])] if place < len(node.args) else []
        elif isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            for returned in (part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value):
                found += [text for text in choices(returned) if FIRST_WORD.fullmatch(text)]
        elif isinstance(node, ast.Assign) and {getattr(target, "id", "") for target in node.targets} & NAMES:
            found += [text for text in choices(node.value) if FIRST_WORD.fullmatch(text)]
    codes = {word[0] for text in found if (word := FIRST_WORD.match(text))}
    return codes | {code for text in texts(nodes(module)) for code in BEFORE_A_CODE.findall(text)}


@cache
def modules() -> list[str]:
    return [path.read_text() for path in MODULES]


@cache
def all_sent() -> set[str]:
    return {*filter(None, ADMISSIONS)}.union(*map(sent_by, modules()))


def test_every_code_that_a_module_sends_has_a_row():
    assert not all_sent() - {row.code for row in refusals.table()}


def test_every_row_is_sent_by_some_module():
    named = {word[0] for module in modules() for text in texts(nodes(module)) if (word := FIRST_WORD.match(text))}
    assert not {row.code for row in refusals.table()} - all_sent() - named


@pytest.mark.parametrize(
    "module",
    [
        'raise Refused(f"new_code {text}")',
        'raise RequestRefused("new_code", "text")',
        'return b"!err %d new_code" % n',
        'def refusal(line):\n    return "new_code" if line else ""',
        'reason = "too_long" if line else "new_code"',
    ],
)
def test_a_code_without_a_row_is_found_wherever_it_is_sent(module):
    assert "new_code" in sent_by(module)


def test_each_code_has_one_row_with_a_text_and_an_exit_code_that_exists():
    rows = refusals.table()
    assert len({row.code for row in rows}) == len(rows)
    assert all(row.text and row.exit_code in errors.EXIT_NAMES for row in rows)
    assert all(FIRST_WORD.fullmatch(row.code) for row in rows)


def test_what_passes_is_worth_a_restart_or_another_attempt():
    assert {row.exit_code for row in refusals.table() if row.is_retryable} <= {errors.EXIT_RETRY, errors.EXIT_FAILED}
    assert all(row.is_retryable for row in refusals.table() if row.exit_code == errors.EXIT_RETRY)
    of_shard = {"not_enough_replicas", "no_leader"}
    assert {"disk_full", "quota", "stopping", "busy", "connections", *of_shard} == refusals.RETRYABLE


def test_a_code_of_another_version_counts_as_internal_and_cannot_be_sent():
    assert refusals.find("of_tomorrow") is refusals.find("internal")
    with pytest.raises(KeyError):
        refusals.by_code("of_tomorrow")
    with pytest.raises(KeyError):
        refusals.reason("of_tomorrow")


def test_the_reason_of_a_refusal_is_its_code_and_a_text():
    assert refusals.reason("fenced") == "fenced a newer connection, member or generation of the same name is in force"
    assert refusals.reason("bad_hello", "acks= must be 0, 1 or all") == "bad_hello acks= must be 0, 1 or all"
