"""`scripts/setup` where Java is missing: an environment, an apt-get and a user that are made up."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "scripts" / "setup"
PYTHON = """#!/bin/sh
case $* in
    *--no-binary*) [ "$COMPILER" ] && touch "$BUILT"; exit ;;
    *SEMAPHORE_TIMEOUT_SUPPORTED*) [ -e "$BUILT" ]; exit ;;
    -m*) exit 0 ;;  # pip, which has nothing to do
esac
[ -e "$JAVA" ]
"""
APT = """#!/bin/sh
echo "$@" >>"$CALLS"
case $* in *"$PACKAGE"*) touch "$JAVA" ;; *update*) ;; *) echo "E: Unable to locate package" >&2; exit 100 ;; esac
"""


@pytest.fixture
def setup(tmp_path):
    """A function that runs the script.

    `package`: the only one that apt-get can install; `built`, `compiler`: is sysv_ipc built from source, and can it be?
    """

    def run(package="", uid=0, java=False, chromium=True, built=True, compiler=True):
        (tmp_path / "venv" / "bin").mkdir(parents=True)
        (tmp_path / "bin").mkdir()
        programs = {"venv/bin/python": PYTHON, "bin/apt-get": APT, "bin/id": f"#!/bin/sh\necho {uid}\n"}
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        if built:
            (tmp_path / "built").touch()
        if java:
            (tmp_path / "java").touch()
        env = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "JAVA": str(tmp_path / "java"),
            "CHROMIUM": "/bin/true" if chromium else str(tmp_path / "chromium"),
            "BUILT": str(tmp_path / "built"),
            "COMPILER": "yes" if compiler else "",
            "CALLS": str(tmp_path / "calls"),
            "PACKAGE": package or "no such package",
        }
        done = subprocess.run(
            [SETUP, sys.executable, tmp_path / "venv"], env=env, capture_output=True, text=True, timeout=60
        )
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


@pytest.mark.parametrize("compiler", [True, False])
def test_the_package_of_the_doorbells_is_built_where_it_can_be(setup, tmp_path, compiler):
    done, _ = setup(java=True, built=False, compiler=compiler)
    assert done.returncode == 0 and (tmp_path / "built").exists() == compiler
    assert ("the doorbells wait by ctypes" in done.stderr) == (not compiler)


def test_a_java_that_is_there_is_left_alone(setup):
    done, calls = setup(java=True)
    assert (done.returncode, calls) == (0, []), done.stderr


@pytest.mark.parametrize("package", ["openjdk-17-jre-headless", "openjdk-21-jre-headless"])
def test_a_missing_java_is_installed_on_debian_as_root_and_it_says_so(setup, package):
    done, calls = setup(package)
    assert done.returncode == 0, done.stderr
    assert "no Java 17 or newer" in done.stdout
    assert calls[-1].split()[-1] == package


def test_setup_without_java_and_with_a_failing_apt_does_the_rest_and_says_so(setup):
    done, calls = setup()
    assert done.returncode == 0, done.stderr
    assert any("update" in call for call in calls), "the lists of packages may be old or missing"
    [line] = [line for line in done.stderr.splitlines() if "Java" in line]
    assert "Spark's parts" in line and "are skipped" in line
    assert "sudo apt-get install openjdk-17-jre-headless" in line
    assert "E:" not in done.stderr, "apt's own errors only hide that line"


def test_who_is_not_root_gets_the_command_and_nothing_is_tried(setup):
    done, calls = setup("openjdk-17-jre-headless", uid=1000)
    assert (done.returncode, calls) == (0, [])
    assert "sudo apt-get install openjdk-17-jre-headless" in done.stderr


def test_setup_without_chromium_tries_apt_and_says_how_to_get_it(setup):
    done, calls = setup(java=True, chromium=False)
    assert done.returncode == 0, done.stderr
    assert any(call.endswith("install -y chromium fonts-dejavu-core") for call in calls), calls
    assert "sudo apt-get install chromium fonts-dejavu-core" in done.stderr


@pytest.mark.parametrize(("ci", "code", "outcome"), [("", 0, "skipped"), ("true", 1, "errors")])
def test_tests_that_need_java_are_skipped_without_it_and_fail_in_ci(ci, code, outcome):
    arguments = ["-q", "-p", "no:cacheprovider", "tests/spark/test_sql.py"]
    change = "from kmq.spark import sessions; sessions.JAVA = 1000"
    run = f"{change}; import sys, pytest; sys.exit(pytest.main({arguments}))"
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, env=os.environ | {"CI": ci}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "apt-get install openjdk-17-jre-headless" in done.stdout
    assert re.search(rf"^\d+ {outcome} in", done.stdout, re.M), done.stdout
