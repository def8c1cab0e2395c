"""The process that copies, alone beside a data directory: what it does, what it says, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from brokers import environment, remove_shared_memory
from made_data import write_data
from typer.testing import CliRunner
from waiting import until

from kmq.broker.stats import TIER, TIER_PROBLEMS, peek
from kmq.cli.app import app
from kmq.links.role import FOLLOWING, STARTING, RolePage
from kmq.log import identity, reader, wal
from kmq.tier.commits import CommitLog
from kmq.tier.store import DirectoryStore

LINES = [b"orders.k%d|0|%d|%s" % (n % 5, n, b"x" * 100) for n in range(1, 201)]


class CopyAlone:
    """`python -m kmq.tier` on a data directory without a broker. KMQ_FSYNC=never: then it asks no durability."""

    def __init__(self, path: Path) -> None:
        self.path, self.data, self.store = path, str(path / "data"), path / "store"
        self.instance = f"tier-{os.getpid()}"
        write_data(self.data, LINES, {"orders": 2})
        names = {"DATA": self.data, "PIPES": path / "pipes", "INSTANCE": self.instance, "FSYNC": "never"}
        names |= {"TIER": f"file://{self.store}", "TIER_EVERY": "50ms"}
        self.env = environment(**{f"KMQ_{name}": value for name, value in names.items()})
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        log = (self.path / "log").open("a")
        self.process = subprocess.Popen([sys.executable, "-m", "kmq.tier"], env=self.env, stderr=log, cwd=self.path)
        log.close()

    def log(self) -> str:
        return (self.path / "log").read_text()

    def row(self):
        page = peek(self.instance)
        return page.rows[TIER] if page is not None else None

    def is_copied(self) -> bool:
        row = self.row()
        return row is not None and row.seq == wal.last_stored(self.data)[0] and row.state_name == "ready"

    def end(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code = self.process.wait(60)
        assert time.monotonic() - began < 30
        self.process = None
        return code

    def kmq(self, *words: str):
        return CliRunner().invoke(app, [*words], env=self.env)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    made = CopyAlone(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()
    remove_shared_memory(made.instance)


def test_it_copies_says_so_and_ends_when_it_is_told(alone):
    alone.start()
    until(alone.is_copied, "all is copied", alone.log)
    until(lambda: "router.ckpt" in alone.kmq("tier", "ls", "--json").stdout, "the small files too", alone.log)
    shown = json.loads(alone.kmq("tier", "status", "--json").stdout)
    assert (shown["last_seq"], shown["problem"], shown["first_seq"]) == (200, "", 1)
    assert "wal" in alone.kmq("tier", "ls").stdout
    assert alone.kmq("tier", "verify", "--deep").exit_code == 0
    until(lambda: alone.row().create_ok > 5, "requests are counted", alone.log)
    row = alone.row()
    assert row.get_ok and row.get_missing and row.received > 1000 and not row.get_failed + row.create_failed
    assert alone.end() == 0 and alone.row().state_name == "stopped" and "event=stopped" in alone.log()
    next(alone.store.glob("*/wal/*.gz")).unlink()
    done = alone.kmq("tier", "verify")
    assert done.exit_code == 1 and "is missing" in done.stdout


def test_with_every_off_nothing_is_copied_and_nothing_is_behind(alone):
    alone.env["KMQ_TIER_EVERY"] = "off"
    alone.start()
    until(lambda: "event=tier_claimed" in alone.log(), "the claim", alone.log)
    assert alone.end() == 0
    assert json.loads(alone.kmq("tier", "ls", "--json").stdout) == [] and alone.row().oldest == 0


def test_a_store_that_is_away_is_waited_for(alone):
    alone.store.write_text("a file in the place of the directory")
    alone.start()
    until(lambda: "event=tier_store_away" in alone.log(), "it says so", alone.log)
    assert alone.row().failing_since and alone.process.poll() is None  # the log comes last
    assert (Path(alone.data) / "tier/status").read_text().startswith("away: ")
    until(lambda: alone.row().create_failed, "failed requests are counted", alone.log)
    assert peek(alone.instance).note_of(TIER).startswith("away: ")
    alone.store.unlink()
    until(alone.is_copied, "all is copied", alone.log)
    until(lambda: "event=tier_store_back" in alone.log() and not alone.row().failing_since, "it says so", alone.log)


def test_a_start_while_the_store_is_away_knows_what_was_copied(alone):
    alone.start()
    until(alone.is_copied, "all is copied", alone.log)
    until(lambda: wal.copied_seq(alone.data) == 200, "it is noted", alone.log)
    alone.end()
    alone.store.rename(alone.path / "away")
    alone.store.write_text("a file in the place of the directory")
    alone.start()
    until(lambda: "event=tier_store_away" in alone.log(), "it says so", alone.log)
    until(lambda: alone.row().create_failed, "a second look at what is behind", alone.log)
    assert (alone.row().seq, alone.row().oldest) == (200, 0)


def test_where_another_broker_has_the_claim_it_stays_and_writes_nothing_until_it_is_told(alone):
    alone.start()
    until(alone.is_copied, "all is copied", alone.log)
    alone.end()
    os.unlink(f"{alone.data}/tier/claim")  # as in a clone of a former state
    alone.start()
    until(lambda: "problem=fenced" in alone.log(), "it stands", alone.log)
    assert TIER_PROBLEMS[alone.row().standing] == "fenced"
    lineage = Path(alone.data, "lineage").read_text().strip()
    before = CommitLog(DirectoryStore(str(alone.store)), lineage, "r").read().number
    asked = alone.kmq("tier", "claim")
    assert asked.exit_code == 1 and "kmq tier claim --yes" in asked.stdout
    assert CommitLog(DirectoryStore(str(alone.store)), lineage, "r").read().number == before
    alone.end()
    assert alone.kmq("tier", "claim", "--yes").exit_code == 0
    alone.start()
    until(lambda: "event=tier_claimed" in alone.log().rpartition("problem=fenced")[2], "it goes on", alone.log)


def test_in_a_shard_it_waits_until_its_broker_leads_and_copies_what_is_committed(alone):
    (alone.path / "secret").write_text("x")
    shard = {"SHARD": "s", "CLUSTER": "c", "CONSUL": "127.0.0.1:1", "REPLICA_SECRET": alone.path / "secret"}
    alone.env |= {f"KMQ_{name}": str(value) for name, value in (shard | {"FSYNC": "always"}).items()}
    page = RolePage.make(alone.instance, identity.read(alone.data, "id"))
    page.enter(FOLLOWING, 2, 7, 200)
    page.show_leader({"broker": "b"})
    alone.start()
    until(lambda: "event=tier_follows" in alone.log(), "it follows", alone.log)
    assert "broker b leads the shard s" in alone.log() and list(alone.store.glob("*/commits/*")) == []
    assert alone.row().standing == 0 and alone.row().oldest == 0
    refused = alone.kmq("tier", "claim", "--yes")
    assert refused.exit_code and "broker b leads the shard s" in str(refused.exception)
    page.leave()
    page.enter(STARTING, 3, 7, 150)
    page.lead_until(1e9, 1e9)
    page.open_doors()
    until(lambda: alone.row().seq == 150, "what is committed is copied", alone.log)
    page.raise_hw(200)
    until(alone.is_copied, "all is copied", alone.log)
    page.leave()
    until(lambda: alone.log().count("event=tier_follows") == 2, "it follows again", alone.log)
    assert alone.end() == 0
    found = CommitLog(DirectoryStore(str(alone.store)), identity.lineage(alone.data), "r").read().claim
    assert found is not None and found.values == {"shard": "s", "epoch": "3"}


def test_the_directory_comes_back_by_commands(alone):
    alone.start()
    until(alone.is_copied, "all is copied", alone.log)
    alone.end()
    again = str(alone.path / "again")
    asked = alone.kmq("restore", "--data", again)
    assert asked.exit_code == 69 or "gone for good" in str(asked.exception)
    planned = alone.kmq("restore", "--data", again, "--dry-run")
    assert planned.exit_code == 0 and not os.path.exists(again)
    received = datetime.fromtimestamp(reader.wal(alone.data).stamp_of(200)[1] / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert f"up to seq 200, of {received}" in planned.stdout, "when the last message was received"
    done = alone.kmq("restore", "--data", again, "--yes")
    assert done.exit_code == 0 and f"restored up to seq 200, of {received}" in done.stdout, done.output
    full = alone.kmq("restore", "--data", again, "--yes")
    assert "is not empty" in str(full.exception)
    empty = alone.env | {"KMQ_DATA": str(alone.path / "third")}
    refused = CliRunner().invoke(app, ["restore", "--if-empty"], env=empty)
    assert "kmq restore --yes" in str(refused.exception) and not os.path.exists(alone.path / "third/id")
    fresh = empty | {"KMQ_TIER": f"file://{alone.path}/other"}
    assert CliRunner().invoke(app, ["restore", "--if-empty"], env=fresh).exit_code == 0
    assert os.path.exists(alone.path / "third/id")


def test_a_stage_makes_no_data_directory_where_the_setting_is(alone):
    env = alone.env | {"KMQ_DATA": str(alone.path / "empty")}
    done = subprocess.run([sys.executable, "-m", "kmq.tier"], env=env, capture_output=True, text=True, cwd=alone.path)
    assert done.returncode == 78 and "kmq restore --if-empty" in done.stderr
    assert not os.path.exists(alone.path / "empty/id")
