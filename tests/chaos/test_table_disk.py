"""Tables on a disk that is full, or that is mounted to be read: one line, and nothing of the table is touched."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.loopfs import LoopFs, disk_of
from kmq.errors import ConfigError, RetryError
from kmq.spark.tables import open_table

pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path: Path, cleanup: ExitStack) -> LoopFs:
    return disk_of("ext4", 16 << 20, tmp_path, cleanup)


def test_a_table_on_a_full_disk_says_so_and_goes_on_when_there_is_room(disk: LoopFs) -> None:
    to = str(disk.path / "t")
    with open_table(to, "parquet", []):
        pass
    ballast = disk.fill(0)
    with pytest.raises(RetryError, match=f"{to}/.kmq: the disk is full; run again when there is room"):
        open_table(to, "parquet", []).__enter__()
    ballast.unlink()
    with open_table(to, "parquet", []):
        pass


def test_a_table_on_a_disk_that_is_read_only_says_so(disk: LoopFs) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
    with pytest.raises(ConfigError, match=r"^--to .*: cannot be written: Read-only file system$"):
        open_table(str(disk.path / "t"), "parquet", []).__enter__()
