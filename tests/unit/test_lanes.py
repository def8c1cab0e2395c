"""`make test`: its lanes, and the second look at what failed, with a folder of tests of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    for script in ("test", "cpu-seconds"):
        shutil.copy(ROOT / "scripts" / script, tmp_path / "scripts")
    shutil.copy(ROOT / "tests/lanes.py", tmp_path / "tests/conftest.py")
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    (tmp_path / "tests/quick_jvm.py").write_text("")
    (tmp_path / "tests/second-tries").write_text("2\nwhatever the real number is by now\n")
    return tmp_path


def run(project, **env):
    command, env = (
        [project / "scripts/test"],
        os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | env,
    )  # a quick start
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=project, env=env)
    return done.returncode, done.stdout + done.stderr


def test_what_fails_once_is_named_and_passes(project):
    (project / "tests/scenario/test_rare.py").write_text(ONCE)
    (project / "tests/model/test_seldom.py").write_text(ONCE)
    code, said = run(project)
    assert code == 0, said
    named = said.partition("passed only the second time")[2]
    assert "tests/scenario/test_rare.py::test_once" in named and "tests/model/test_seldom.py::test_once" in named
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
    "text", [ONCE + "\n".join(f"def test_{n}(): test_once.n{n}" for n in range(2)), "def test_good(\n"]
)
def test_much_that_fails_and_what_cannot_be_read_is_red_at_once(project, text):
    (project / "tests/contract/test_bad.py").write_text(text)
    code, said = run(project)
    assert code > 0 and "run once more" not in said


def test_without_the_number_of_second_tries_there_are_none(project):
    (project / "tests/second-tries").unlink()
    (project / "tests/scenario/test_rare.py").write_text(ONCE)
    code, said = run(project)
    assert code == 1 and "run once more" not in said


def test_the_number_of_second_tries_is_the_first_line_of_its_file():
    number, meaning = (ROOT / "tests/second-tries").read_text().splitlines()
    assert 0 <= int(number) <= 5 and "may only fall" in meaning


def test_each_file_is_run_by_one_lane_and_a_lane_that_is_through_goes_on_with_those_of_others(project):
    counted = """
import os, time
from pathlib import Path
def test_counted():
    with open(Path(__file__).parents[1] / "ran", "a") as ran:
        ran.write(f"{Path(__file__).name} {os.environ['LANE_OWN'].split()[0]}\\n")
    time.sleep(1)
"""
    for number in range(6):
        (project / f"tests/spark/test_counted{number}.py").write_text(counted)
    code, said = run(project)
    ran = [line.split() for line in (project / "tests/ran").read_text().splitlines()]
    assert code == 0, said
    assert sorted(name for name, _ in ran) == [f"test_counted{number}.py" for number in range(6)]
    assert len({lane for _, lane in ran}) > 1
    assert [f"cpu-seconds: lane {number}: " in said for number in range(3)] == [True] * 3


def test_a_pytest_that_a_test_starts_runs_what_it_is_told_to(project):
    nested = """
import subprocess, sys
def test_nested():
    done = subprocess.run([sys.executable, "-m", "pytest", "tests/unit", "-q"], capture_output=True, text=True)
    assert "1 passed" in done.stdout
"""
    (project / "tests/unit/test_nested.py").write_text(nested.replace("tests/unit", "tests/model"))
    code, said = run(project)
    assert code == 0, said


def test_the_longest_files_of_a_folder_come_first_as_they_were_recorded(project):
    noted = """
import time
from pathlib import Path
def test_noted():
    with open(Path(__file__).parents[1] / "ran", "a") as ran:
        ran.write(f"{Path(__file__).stem}\\n")
    time.sleep(%s)
"""
    for name, seconds in (("test_a", 0), ("test_b", 0), ("test_c", 5.1)):
        (project / f"tests/model/{name}.py").write_text(noted % seconds)
    (project / "tests/durations").write_text("30 tests/model/test_b.py\n7 tests/model/test_c.py\n")
    code, said = run(project, RECORD="1")
    assert code == 0, said
    assert (project / "tests/ran").read_text().split() == ["test_b", "test_c", "test_a"]
    assert (project / "tests/durations").read_text() == "5 tests/model/test_c.py\n"


def test_tests_of_a_file_that_pytest_takes_apart_are_all_run(project):
    """As it does for a fixture of the session with parameters, between those of another file."""
    fixture = "\n@pytest.fixture(scope='session', params=[1, 2])\ndef each(request):\n    return request.param\n"
    with (project / "tests/conftest.py").open("a") as conftest:
        conftest.write(fixture)
    text = """
from pathlib import Path
def test_apart(each):
    (Path(__file__).parents[1] / f"{Path(__file__).stem}.{each}").touch()
"""
    for name in ("test_one", "test_two"):
        (project / f"tests/scenario/{name}.py").write_text(text)
    code, said = run(project)
    assert code == 0, said
    assert sorted(path.name for path in project.glob("tests/test_*.[12]")) == [
        "test_one.1", "test_one.2", "test_two.1", "test_two.2",
    ]  # fmt: skip


def test_the_seed_chooses_the_cases_of_a_sample_and_without_one_all_run(project):
    shutil.copy(ROOT / "tests/sampling.py", project / "tests/conftest.py")
    (project / "pytest.ini").write_text("[pytest]\nmarkers = sampled(n)\n")
    text = """
import pytest
@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", range(20))
def test_case(n): pass
@pytest.mark.sampled(0.5)
def test_seldom(): pass
@pytest.mark.sampled(1, group="trials")
def test_trial(): pass
@pytest.mark.sampled(1, group="trials")
@pytest.mark.parametrize("n", range(2))
def test_other(n): pass
def test_always(): pass
"""
    (project / "tests/unit/test_cases.py").write_text(text)

    def chosen(seed):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/unit/test_cases.py"]
        env = {name: value for name, value in os.environ.items() if name != "SAMPLE_SEED"} | seed
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=project, env=env)
        assert done.returncode == 0, done.stdout
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    runs = [chosen({"SAMPLE_SEED": str(number)}) for number in range(8)]
    for names in runs:
        assert sum(name.startswith("test_case") for name in names) == 3 and "test_always" in names
        assert sum(name.startswith(("test_trial", "test_other")) for name in names) == 1
    assert {"test_seldom" in names for names in runs} == {True, False}
    assert len({tuple(names) for names in runs}) > 1 and chosen({"SAMPLE_SEED": "3"}) == runs[3]
    assert len(chosen({})) == 25
