"""`make test`: its lanes, and the second look at what failed, with a folder of tests of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEST = Path(__file__).parents[2] / "scripts" / "test"
LANES = ("chaos", "contract", "model", "unit", "pod", "scenario", "spark", "kafka")
ONCE = """
from pathlib import Path
def test_once():
    seen = Path(__file__).with_suffix(".seen")
    was, _ = seen.exists(), seen.touch()
    assert was
"""


@pytest.fixture
def project(tmp_path):
    for name in ("kmq", "stages", "scripts", ".venv/bin", *(f"tests/{lane}" for lane in LANES)):
        (tmp_path / name).mkdir(parents=True)
    for lane in LANES:
        (tmp_path / f"tests/{lane}/test_{lane}.py").write_text("def test_good():\n    pass\n")
    shutil.copy(TEST, tmp_path / "scripts/test")
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    (tmp_path / "tests/quick_jvm.py").write_text("")
    return tmp_path


def run(project):
    done = subprocess.run([project / "scripts/test"], capture_output=True, text=True, timeout=200, cwd=project)
    return done.returncode, done.stdout + done.stderr


def test_what_fails_once_is_named_and_passes(project):
    (project / "tests/scenario/test_rare.py").write_text(ONCE)
    (project / "tests/model/test_rare.py").write_text(ONCE)
    code, said = run(project)
    assert code == 0, said
    named = said.partition("passed only the second time")[2]
    assert "tests/scenario/test_rare.py::test_once" in named and "tests/model/test_rare.py::test_once" in named
    assert "assert was" in said.partition("run once more, alone")[0]  # the first report says why


@pytest.mark.parametrize(
    "bad",
    [
        "def test_bad():\n    assert 0\n",
        ONCE.replace("assert was", "pytest.skip() if was else pytest.fail()").replace("from", "import pytest\nfrom", 1),
    ],
    ids=["fails", "is skipped"],
)
def test_what_does_not_pass_the_second_time_is_red(project, bad):
    (project / "tests/spark/test_bad.py").write_text(bad)
    (project / "tests/pod/test_rare.py").write_text(ONCE)
    code, said = run(project)
    assert code == 1 and "run once more" in said and "passed only the second time" not in said


@pytest.mark.parametrize(
    "text", [ONCE + "\n".join(f"def test_{n}(): test_once.n{n}" for n in range(5)), "def test_good(\n"]
)
def test_much_that_fails_and_what_cannot_be_read_is_red_at_once(project, text):
    (project / "tests/contract/test_bad.py").write_text(text)
    code, said = run(project)
    assert code > 0 and "run once more" not in said
