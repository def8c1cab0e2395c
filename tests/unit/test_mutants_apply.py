"""Every mutant of the chaos tests and of the models still fits the code: its snippets stand in their files, its tests are there.

Whether a test notices a mutant takes hours (`python tests/chaos/mutants.py`). That it can be made at all takes seconds.
"""

import ast
import importlib
import sys
from functools import cache

import pytest
from chaos.mutants import MUTANTS, REPOSITORY, Mutant
from model import cluster_model

sys.path.append(str(REPOSITORY / "tests/model"))
MODELS = [path.stem for path in sorted((REPOSITORY / "tests/model").glob("*mutants.py")) if path.stem[:5] != "test_"]


def mutants_of_models():
    """Yield what each model has: how it makes the code anew, the name of a mutant, its edits."""
    for name in MODELS:
        model = importlib.import_module(name)
        for mutant in model.MUTANTS:
            edits = mutant.edits if hasattr(mutant, "edits") else (mutant.edit,)
            yield pytest.param(model.load, edits, id=f"{name}: {mutant.name}")


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((REPOSITORY / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_its_tests_are_there(mutant: Mutant) -> None:
    texts = {path: (REPOSITORY / path).read_text() for path, _, _ in mutant.edits}
    for path, old, new in mutant.edits:
        assert old in texts[path], f"{path}: {old!r} is not there; the mutant must follow the code"
        texts[path] = texts[path].replace(old, new)
        compile(texts[path], path, "exec", dont_inherit=True)
    for test in mutant.tests:
        path, *names = test.split("::")
        assert (REPOSITORY / path).exists(), path
        assert {name.partition("[")[0] for name in names} <= functions(path), test


def test_each_guard_of_the_model_of_a_shard_is_taken_out_of_the_code_too() -> None:
    made = {mutant.name.removeprefix("cluster: ").partition(",")[0] for mutant in MUTANTS}
    assert {*cluster_model.MUTANTS} <= made


@pytest.mark.parametrize(("load", "edits"), [*mutants_of_models()])
def test_a_mutant_of_a_model_can_be_made(load, edits):
    code = load(edits)  # raises ValueError unless each snippet stands in its module exactly once
    assert all(hasattr(code, module) for module, _, _ in edits), "an edit of a module that the model does not load"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_refuses_a_snippet_that_is_not_there_once(name):
    model = importlib.import_module(name)
    module = next(field for field in model.load()._fields if field != "clock")
    for old in ("no such line", "\n"):
        with pytest.raises(ValueError, match="the mutant must follow"):
            model.load([(module, old, "")])
