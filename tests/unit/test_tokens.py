"""Who may come in: tokens, the file of their hashes, and what happens when it changes."""

import os
import stat

import pytest
from fake_logger import FakeLogger

from kmq.access import tokens
from kmq.config.settings import load
from kmq.errors import ConfigError
from kmq.files import Watch


@pytest.fixture
def settings(tmp_path):
    return load({"KMQ_TOKENS": str(tmp_path / "tokens"), "KMQ_PIPES": str(tmp_path)}, "/nonexistent.toml")


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    """Files are looked at on each use instead of once a second."""
    monkeypatch.setattr("kmq.files._LOOK_S", 0.0)


def opened(settings):
    logger = FakeLogger()
    return tokens.Tokens(settings, logger.warn), logger.events


def test_a_token_is_good_and_no_other_is(settings):
    good = tokens.new(settings.tokens, "orders")
    checked, _ = opened(settings)
    assert checked.check(good.encode()) == "orders"
    other = good[:-1] + ("A" if good[-1] != "A" else "B")
    for bad in (other, good[:-1], good + "x", "orders.", "orders", "", ".", "nobody." + good.partition(".")[2], "\xff"):
        assert checked.check(bad.encode("latin-1")) == "", bad


def test_the_token_is_not_in_the_file_and_the_file_is_for_its_owner_only(settings):
    token = tokens.new(settings.tokens, "orders")
    with open(settings.tokens) as file:
        text = file.read()
    assert text.startswith("orders:sha256$") and token.partition(".")[2] not in text
    assert stat.S_IMODE(os.stat(settings.tokens).st_mode) == 0o600


def test_equal_names_have_different_tokens_and_all_of_them_are_good(settings):
    """A token is replaced by adding the new one, handing it out, and then removing the old line."""
    old, new = tokens.new(settings.tokens, "orders"), tokens.new(settings.tokens, "orders")
    assert old != new
    checked, _ = opened(settings)
    assert checked.check(old.encode()) == checked.check(new.encode()) == "orders"
    with open(settings.tokens) as file:
        lines = file.readlines()
    with open(settings.tokens, "w") as file:
        file.write(lines[1])
    assert checked.check(old.encode()) == "" and checked.check(new.encode()) == "orders"


def test_comments_blank_lines_and_a_missing_last_newline_do_no_harm(settings):
    first = tokens.new(settings.tokens, "a")
    with open(settings.tokens, "r+") as file:
        text = file.read()
        file.seek(0)
        file.write("# those who may\n\n" + text.rstrip("\n"))
        file.truncate()
    second = tokens.new(settings.tokens, "b")
    checked, _ = opened(settings)
    assert checked.check(first.encode()) == "a" and checked.check(second.encode()) == "b"


@pytest.mark.parametrize(
    "line", ["orders", "orders:plaintext", "or ders:sha256$" + "0" * 32 + "$" + "0" * 64, "a:sha256$0$0"]
)
def test_a_file_that_is_not_understood_stops_the_start_and_names_the_line(settings, line):
    tokens.new(settings.tokens, "a")
    with open(settings.tokens, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        opened(settings)


def test_a_missing_file_stops_the_start_and_says_how_to_make_one(settings):
    with pytest.raises(ConfigError, match=r"No such file.*kmq token new"):
        opened(settings)


def test_a_change_that_is_not_understood_keeps_the_old_tokens_and_says_so_once(settings):
    token = tokens.new(settings.tokens, "a")
    checked, warnings = opened(settings)
    with open(settings.tokens, "a") as file:
        file.write("nonsense\n")
    for _ in range(3):
        assert checked.check(token.encode()) == "a"
    assert [event for event, _ in warnings] == ["tokens_kept"]
    os.unlink(settings.tokens)
    assert checked.check(token.encode()) == "a" and len(warnings) == 2
    newer = tokens.new(settings.tokens, "b")
    assert checked.check(newer.encode()) == "b" and checked.check(token.encode()) == ""


def test_programs_of_the_pod_have_a_token_of_their_own_that_survives_restarts(settings):
    tokens.new(settings.tokens, "a")
    checked, _ = opened(settings)
    token = tokens.local(settings)
    again, _ = opened(settings)
    assert checked.check(token.encode()) == again.check(token.encode()) == "local"
    assert checked.check(b"local.") == checked.check(b"local") == ""
    assert stat.S_IMODE(os.stat(f"{settings.pipes}/local.token").st_mode) == 0o640
    assert [name for name in os.listdir(settings.pipes) if name.startswith("local")] == ["local.token"]


def test_without_tokens_nobody_needs_one(tmp_path):
    settings = load({"KMQ_PIPES": str(tmp_path)}, "/nonexistent.toml")
    assert tokens.open_tokens(settings, print) is None and tokens.local(settings) == ""
    assert not os.listdir(tmp_path)


def test_the_local_token_is_missed_where_no_broker_has_been(settings):
    with pytest.raises(ConfigError, match="is the broker up"):
        tokens.local(settings)


@pytest.mark.parametrize("name", ["", "a.b", "a:b", "a b", "x" * 65, "local", "é"])
def test_a_name_that_would_not_be_found_again_is_refused(settings, name):
    with pytest.raises(ConfigError, match="must be"):
        tokens.new(settings.tokens, name)
    assert not os.path.exists(settings.tokens)


def test_a_header_is_bearer_and_nothing_else(settings):
    token = tokens.new(settings.tokens, "a")
    checked, _ = opened(settings)
    assert checked.find_header(f"Bearer {token}").name == checked.find_header(f"bearer  {token} ").name == "a"
    for bad in ("", token, f"Basic {token}", f"Bearer{token}", "Bearer", "Bearer "):
        assert checked.find_header(bad) is None, bad


def test_a_watch_sees_each_kind_of_change_and_no_other(tmp_path):
    target, link = tmp_path / "1", tmp_path / "link"
    target.write_text("one")
    link.symlink_to(target)
    watch = Watch(str(link))
    assert not watch.changed()
    target.write_text("two!")  # in place
    assert watch.changed() and not watch.changed()
    os.utime(target, ns=(1, 1))  # the same length, another time
    assert watch.changed() and not watch.changed()
    (tmp_path / "2").write_text("two!")
    os.utime(tmp_path / "2", ns=(1, 1))
    (tmp_path / "new").symlink_to(tmp_path / "2")
    os.rename(tmp_path / "new", link)  # as Kubernetes does: only the inode differs
    assert watch.changed() and not watch.changed()
    link.unlink()
    assert watch.changed() and not watch.changed()
    link.symlink_to(target)
    assert watch.changed()


def test_a_watch_looks_once_a_second_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr("kmq.files._LOOK_S", 1.0)
    now = [100.0]
    monkeypatch.setattr("kmq.files.time.monotonic", lambda: now[0])
    path = tmp_path / "file"
    path.write_text("one")
    watch = Watch(str(path))
    path.write_text("two!")
    now[0] += 0.9
    assert not watch.changed()
    now[0] += 0.2
    assert watch.changed()


@pytest.mark.parametrize(
    "shown", ["Bearer \udcff", "Bearer orders.\udcff\udc80", "Bearer \ud800", "Bearer é", "bearer"]
)
def test_a_header_that_is_no_text_is_a_token_of_nobody(settings, shown):
    """aiohttp hands over the bytes of a header that are not UTF-8 as lone surrogates."""
    tokens.new(settings.tokens, "orders")
    checked, _ = opened(settings)
    assert checked.find_header(shown) is None
