"""A directory becomes a data directory once, and says why where it cannot."""

import errno
import os

import pytest

from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.log.identity import (
    FORMAT,
    LABELLED,
    NEVER,
    DataMissingError,
    format_text,
    is_newest,
    is_unknown,
    labelled_from,
    lineage,
    marks_from,
    mended,
    open_data,
    raise_version,
    read,
    version,
)


def test_a_data_directory_keeps_its_id(tmp_path):
    first = open_data(str(tmp_path / "data"))
    assert len(first) == 32
    assert open_data(str(tmp_path / "data")) == first != open_data(str(tmp_path / "other"))


def _is_away(path):
    pass


def _is_a_file(path):
    path.write_text("")


def _is_a_loop(path):
    path.symlink_to(path)


def _is_empty(path):
    path.mkdir()


def _is_another(path):
    open_data(str(path))


@pytest.mark.parametrize("put", [_is_away, _is_a_file, _is_a_loop, _is_empty, _is_another])
def test_where_a_known_data_directory_is_missing_nothing_is_made(tmp_path, put):
    path, away = tmp_path / "data", tmp_path / "away"
    known = open_data(str(path))
    path.rename(away)
    put(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        DataMissingError, match=r"runs, or has run until a few seconds ago: .*; put it back, or, .*kmq up"
    ):
        open_data(str(path), known)
    assert sorted(tmp_path.rglob("*")) == before
    assert open_data(str(away), known) == known


def test_a_known_data_directory_that_cannot_be_written_is_missing(tmp_path, monkeypatch):
    known = open_data(str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everything
    with pytest.raises(DataMissingError, match="cannot be read and written"):
        open_data(str(tmp_path), known)


def test_the_first_of_two_that_start_at_once_names_it(tmp_path, monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith(("/id", "/format")) and exists(path))
    first = open_data(str(tmp_path))
    assert open_data(str(tmp_path)) == first


def test_two_stages_that_start_at_once_as_first_processes_of_containers_agree(tmp_path, monkeypatch):
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
        "lineage",
    ]


def test_another_format_is_refused_by_name(tmp_path):
    open_data(str(tmp_path))
    (tmp_path / "format").write_text(f"{format_text(7, number=FORMAT + 1)}\n")
    with pytest.raises(ConfigError, match=r"unknown format '6 from_seq=7 crc32=.*'; this release reads 1 to 5"):
        open_data(str(tmp_path))
    assert is_unknown(str(tmp_path))


def test_a_damaged_format_is_no_version(tmp_path):
    data = str(tmp_path)
    open_data(data)
    text = (tmp_path / "format").read_text()
    assert version(data) == (LABELLED, 1)
    for at in range(len(text) - 1):
        (tmp_path / "format").write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        assert version(data) is None and not is_unknown(data), text


def test_a_directory_of_version_1_is_raised_once_from_the_next_seq_on(tmp_path):
    data = str(tmp_path)
    open_data(data)
    (tmp_path / "format").write_text("1\n")
    (tmp_path / "lineage").unlink()
    first = f"{data}/append/{1:020d}.log"
    assert open_data(data) and not is_newest(data) and labelled_from(first) > 10**18
    assert raise_version(data, 501) and is_newest(data) and not raise_version(data, 900)
    assert version(data) == (2, 501) and labelled_from(first) == 501
    assert lineage(data) == read(data, "id")


def test_marks_count_from_the_next_seq_on_in_a_directory_that_did_not_have_them(tmp_path):
    data = str(tmp_path)
    open_data(data)
    assert (marks_from(data), is_newest(data)) == (1, True)
    (tmp_path / "format").write_text(f"{format_text(30)}\n")  # an early version 2
    assert open_data(data) and version(data) == (LABELLED, 30) and marks_from(data) == NEVER and not is_newest(data)
    assert raise_version(data, 501) and is_newest(data) and not raise_version(data, 900)
    assert version(data) == (LABELLED, 30) and marks_from(data) == 501
    (tmp_path / "format").write_text("1\n")
    assert marks_from(data) == NEVER and raise_version(data, 7)
    assert (version(data), marks_from(data)) == ((LABELLED, 7), 7)


@pytest.mark.parametrize("number", [LABELLED, FORMAT])
def test_a_flipped_bit_of_format_is_mended_by_its_crc(tmp_path, number):
    data = str(tmp_path)
    text = format_text(30, 501, number)
    for bit in range(8 * len(text)):
        damaged = bytearray(text.encode())
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "format").write_bytes(bytes(damaged) + b"\n")
        assert version(data) is None and mended(data) == text
    for other in ("", "1 from_seq", format_text(30, 501, number=4), "\0" * 50):
        (tmp_path / "format").write_text(other)
        assert mended(data) == ""


def test_a_damaged_lineage_is_refused_with_its_remedy(tmp_path):
    open_data(str(tmp_path))
    (tmp_path / "lineage").write_text("nobody\n")
    with pytest.raises(CorruptError, match="lineage: must be 32 hex digits; run kmq verify --repair"):
        open_data(str(tmp_path))


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
