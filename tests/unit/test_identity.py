"""A directory becomes a data directory once, and says why where it cannot."""

import errno
import os

import pytest

from kmq.errors import ConfigError, RetryError
from kmq.log.identity import open_data, read


def test_a_data_directory_keeps_its_id(tmp_path):
    first = open_data(str(tmp_path / "data"))
    assert len(first) == 32
    assert open_data(str(tmp_path / "data")) == first != open_data(str(tmp_path / "other"))


def test_the_first_of_two_that_start_at_once_names_it(tmp_path, monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith(("/id", "/format")) and exists(path))
    first = open_data(str(tmp_path))
    assert open_data(str(tmp_path)) == first


def test_two_stages_that_start_at_once_as_the_first_process_of_their_containers_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    fsync, theirs = os.fsync, []

    def overtaken(fd):  # the other one does all of it while we write
        fsync(fd)
        if not theirs:
            theirs.append("")
            theirs.append(open_data(str(tmp_path)))

    monkeypatch.setattr(os, "fsync", overtaken)
    ours = open_data(str(tmp_path))
    assert theirs == ["", ours] and sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "format",
        "id",
    ]


def test_another_format_is_refused_by_name(tmp_path):
    open_data(str(tmp_path))
    (tmp_path / "format").write_text("2\n")
    with pytest.raises(ConfigError, match="format '2' is not the one this version writes"):
        open_data(str(tmp_path))
    assert read(str(tmp_path), "format") == "2"


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, ConfigError), (errno.EROFS, ConfigError), (errno.EIO, RetryError), (errno.ENOSPC, RetryError)],
)
def test_a_disk_at_fault_may_be_tried_again_a_path_may_not(tmp_path, monkeypatch, number, kind):
    def fail(path, exist_ok):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "makedirs", fail)
    with pytest.raises(kind, match="KMQ_DATA=.*cannot be written: " + os.strerror(number)):
        open_data(str(tmp_path / "data"))
