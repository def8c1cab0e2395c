"""How many gateways have served groups in a data directory: no number comes twice."""

import pytest

from kmq.broker import data_directory
from kmq.gateway.groups import membership


def test_each_life_has_a_number_of_its_own(tmp_path):
    assert [membership.count_start(str(tmp_path)) for _ in range(3)] == [0, 1, 2]
    assert (tmp_path / data_directory.STARTS).read_bytes() == b"3\n"


@pytest.mark.parametrize("content", [b"", b"x\n", b"\0\0\0", b"9" * 30, b"-4\n"])
def test_a_damaged_file_counts_on_from_what_the_records_say(tmp_path, content):
    (tmp_path / data_directory.STARTS).write_bytes(content)
    assert [membership.count_start(str(tmp_path), least=7), membership.count_start(str(tmp_path), least=7)] == [7, 8]


def test_a_life_that_cannot_be_counted_does_not_begin(tmp_path):
    (tmp_path / f"{data_directory.STARTS}.new").mkdir()
    with pytest.raises(OSError):
        membership.count_start(str(tmp_path))
    assert not (tmp_path / data_directory.STARTS).exists()
