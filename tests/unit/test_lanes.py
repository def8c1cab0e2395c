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


def make_project(tmp_path):
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


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path)


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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


COUNTED = """
import os, time
from pathlib import Path
def test_counted():
    with open(Path(__file__).parents[1] / "counted", "a") as counted:
        counted.write(f"{Path(__file__).name} {os.environ['LANE_OWN'].split()[0]}\\n")
    time.sleep(1)
"""
NOTED = """
import time
from pathlib import Path
def test_noted():
    with open(Path(__file__).parents[1] / "noted", "a") as noted:
        noted.write(f"{Path(__file__).stem}\\n")
    time.sleep(%s)
"""
NESTED = """
import subprocess, sys
def test_nested():
    done = subprocess.run([sys.executable, "-m", "pytest", "tests/chaos", "-q"], capture_output=True, text=True)
    assert "1 passed" in done.stdout
"""
FIXTURE = """
import pytest
@pytest.fixture(scope="session", params=[1, 2])
def each(request):
    return request.param
"""
APART = """
from pathlib import Path
def test_apart(each):
    (Path(__file__).parents[1] / f"{Path(__file__).stem}.{each}").touch()
"""


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """(project, what was said) of one run in which all passes: a run is nine starts of Python."""
    project = make_project(tmp_path_factory.mktemp("good"))
    for number in range(6):
        (project / f"tests/spark/test_counted{number}.py").write_text(COUNTED)
    for name, seconds in (("test_a", 0), ("test_b", 0), ("test_c", 5.1)):
        (project / f"tests/model/{name}.py").write_text(NOTED % seconds)
    (project / "tests/durations").write_text("30 tests/model/test_b.py\n7 tests/model/test_c.py\n")
    (project / "tests/unit/test_nested.py").write_text(NESTED)
    with (project / "tests/conftest.py").open("a") as conftest:
        conftest.write(FIXTURE)
    for name in ("test_one", "test_two"):
        (project / f"tests/scenario/{name}.py").write_text(APART)
    code, said = run(project, RECORD="1")
    assert code == 0, said
    return project, said


def test_each_file_is_run_by_one_lane_and_a_lane_that_is_through_goes_on_with_those_of_others(good_run):
    project, said = good_run
    counted = [line.split() for line in (project / "tests/counted").read_text().splitlines()]
    assert sorted(name for name, _ in counted) == [f"test_counted{number}.py" for number in range(6)]
    assert len({lane for _, lane in counted}) > 1
    assert [f"cpu-seconds: lane {number}: " in said for number in range(3)] == [True] * 3


def test_a_pytest_that_a_test_starts_runs_what_it_is_told_to(good_run):
    assert "test_nested.py" in good_run[1], "NESTED passed"


def test_the_longest_files_of_a_folder_come_first_as_they_were_recorded(good_run):
    project, _ = good_run
    assert (project / "tests/noted").read_text().split() == ["test_b", "test_c", "test_a"]
    recorded = dict(reversed(line.split()) for line in (project / "tests/durations").read_text().splitlines())
    assert int(recorded["tests/model/test_c.py"]) >= 5 and "tests/model/test_a.py" not in recorded
    assert recorded.get("tests/model/test_b.py") != "30"


def test_tests_of_a_file_that_pytest_takes_apart_are_all_run(good_run):
    """As it does for a fixture of the session with parameters, between those of another file."""
    assert sorted(path.name for path in good_run[0].glob("tests/test_*.[12]")) == [
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

    # Forks of one process that has imported pytest.
    choose = """
import os, sys, pytest
for seed in sys.argv[1:]:
    print("seed", flush=True)
    if not os.fork():
        os.environ["SAMPLE_SEED"] = seed
        code = pytest.main(["--collect-only", "-q", "tests/unit/test_cases.py"])
        sys.stdout.flush()
        os._exit(code)
    assert os.wait()[1] == 0
"""
    seeds = [*map(str, range(8)), "3", ""]
    command, env = [sys.executable, "-c", choose, *seeds], os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=project, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    _, *texts = done.stdout.split("seed\n")
    *runs, again, whole = [[line.partition("::")[2] for line in text.splitlines() if "::" in line] for text in texts]
    for names in runs:
        assert sum(name.startswith("test_case") for name in names) == 3 and "test_always" in names
        assert sum(name.startswith(("test_trial", "test_other")) for name in names) == 1
    assert {"test_seldom" in names for names in runs} == {True, False}
    assert len({tuple(names) for names in runs}) > 1 and again == runs[3]
    assert len(whole) == 25
