"""A file system of our own in a file, small enough to fill and able to lose its power. Needs root and loop mounts."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from waiting import attempts

_FS_IOC_SHUTDOWN = 0x8004587D
_NOLOGFLUSH = (2).to_bytes(4, "little")  # not even the journal's buffers reach the disk
MIN_BYTES = {"ext4": 16 << 20, "xfs": 300 << 20}  # what mkfs takes; the image is sparse


class LoopFs:
    """`path` is mounted from construction to close()."""

    def __init__(self, root: Path, kind: str, nbytes: int) -> None:
        self.kind, self.image, self.path = kind, root / f"{kind}.image", root / kind
        self.path.mkdir()
        with self.image.open("wb") as file:
            file.truncate(max(nbytes, MIN_BYTES[kind]))
        options = {"ext4": ["-F", "-m", "0"], "xfs": ["-f"]}[kind]
        _run(f"mkfs.{kind}", "-q", *options, str(self.image))
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-t", self.kind, "-o", "loop", str(self.image), str(self.path))

    def cut_power(self) -> None:
        """From now on nothing reaches the disk, and every write and sync fails. What was not synced is gone."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, _NOLOGFLUSH)
        finally:
            os.close(fd)

    def power_on(self) -> None:
        """Mount again what the disk has. Those who used it are gone, though the kernel may need a moment to notice.

        A container that starts has a copy of all mounts for a moment, ours too. Until it has dropped it, the loop device is
        there, and a mount would find the file system that was shut down.
        """
        tries = attempts(f"{self.path} is not in use")
        while os.path.ismount(self.path) or self._devices():
            next(tries)
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("umount", str(self.path))
        self._mount()

    def _devices(self) -> list[str]:
        """The loop devices that stand on the image."""
        return [line.partition(":")[0] for line in _run("losetup", "-j", str(self.image)).splitlines()]

    def free(self) -> int:
        return shutil.disk_usage(self.path).free

    def fill(self, left: int) -> Path:
        """Take all room but `left` bytes; returns the file to remove."""
        ballast, step = self.path / f"ballast-{time.monotonic_ns()}", 1 << 20
        with ballast.open("wb") as file:
            while (spare := self.free() - left) > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), min(spare, step))
                except OSError as err:  # what is left lies scattered, or the file needs some of it for itself
                    if err.errno != errno.ENOSPC or step < 4096:
                        break
                    step //= 2
        return ballast

    def close(self) -> None:
        """Nothing is left, whatever happened: also a mount that is in use, or a device whose mount failed."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("umount", "-l", str(self.path))
        with contextlib.suppress(subprocess.CalledProcessError):
            for device in self._devices():
                _run("losetup", "-d", device)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def disk_of(kind: str, nbytes: int, root: Path, cleanup: ExitStack) -> LoopFs:
    """One for this test; skips, or fails in CI, where it cannot be had."""
    reason = ""
    if os.geteuid() != 0:
        reason = "loop mounts need root"
    elif not shutil.which(f"mkfs.{kind}"):
        reason = f"mkfs.{kind} is not installed"
    if reason and os.environ.get("CI") == "true" and kind == "ext4":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    disk = LoopFs(root, kind, nbytes)
    cleanup.callback(disk.close)
    return disk


class FewInodes:
    """A file system in memory with room for so many files, mounted from construction to close()."""

    def __init__(self, root: Path, inodes: int) -> None:
        self.path = root / "few-inodes"
        self.path.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes},size=256m", "tmpfs", str(self.path))

    def free(self) -> int:
        return os.statvfs(self.path).f_favail

    def fill(self, left: int) -> Path:
        """Take all inodes but `left`; returns the directory to remove."""
        ballast = self.path / "ballast"
        ballast.mkdir()
        for number in range(self.free() - left):
            (ballast / str(number)).touch()
        return ballast

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("umount", "-l", str(self.path))


def few_inodes(inodes: int, root: Path, cleanup: ExitStack) -> FewInodes:
    """One for this test; skips where it cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    disk = FewInodes(root, inodes)
    cleanup.callback(disk.close)
    return disk
