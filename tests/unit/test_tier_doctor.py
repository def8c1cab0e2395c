"""`kmq doctor` tries the store of KMQ_TIER: it keeps create-if-absent, it answers, it has the same time."""

import json
import os

import pytest
from made_data import write_data
from tier_stores import LyingStore, OverwritingStore
from typer.testing import CliRunner

from kmq.cli import doctor as doctor_command
from kmq.cli.app import app
from kmq.tier import store
from kmq.tier.store import DirectoryStore


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The check of the store, as `kmq doctor --json` says it."""
    data = write_data(tmp_path / "data", [b"orders|0|1|x"])
    names = {"DATA": data, "PIPES": tmp_path / "pipes", "INSTANCE": f"doctor-{os.getpid()}"}
    names["TIER"] = f"file://{tmp_path}/store"
    for name, value in names.items():
        monkeypatch.setenv(f"KMQ_{name}", str(value))
    monkeypatch.setattr(doctor_command.machine, "speed", lambda settings: doctor_command.Check("disk", "ok", ""))

    def run():
        done = CliRunner().invoke(app, ["doctor", "--json"])
        (found,) = [each for each in json.loads(done.stdout)["checks"] if each["check"] == "tier"]
        return found

    return run


def test_a_good_store_is_said_to_be_good_and_keeps_nothing_of_it(check, tmp_path):
    found = check()
    assert found["level"] == "ok" and "keeps create-if-absent, and has the same time" in found["text"], found
    assert list(DirectoryStore(str(tmp_path / "store")).names("")) == []


def test_a_store_that_does_not_answer_is_a_warning_in_its_own_words(check, tmp_path):
    (tmp_path / "store").write_text("a file")
    found = check()
    assert found["level"] == "warning" and "Not a directory" in found["text"] and "credentials" in found["advice"]


def test_a_store_that_overwrites_is_an_error(check, monkeypatch):
    monkeypatch.setattr(store, "open_store", lambda url: OverwritingStore())
    found = check()
    assert found["level"] == "error" and "overwrites a key that is there" in found["text"]


def test_a_url_that_names_no_store_is_an_error(check, monkeypatch):
    monkeypatch.setenv("KMQ_TIER", "ftp://host/path")
    assert check()["level"] == "error"


@pytest.mark.parametrize(("offset", "word"), [(120, "ahead"), (-120, "behind")])
def test_a_clock_that_differs_by_minutes_is_a_warning(check, tmp_path, monkeypatch, offset, word):
    class LateStore(LyingStore):
        def written_at(self, key):
            return super().written_at(key) + offset

    monkeypatch.setattr(store, "open_store", lambda url: LateStore(str(tmp_path / "store")))
    found = check()
    assert found["level"] == "warning" and f" s {word}" in found["text"] and "set the clock" in found["advice"]
