"""Holds a batch on its way into a table: written by Spark, sealed with a manifest, removed when its files are in place.

Invariant   A batch is sealed by one rename, and never before all its files and the manifest are synced. Readers of the
            table never see these directories.
Crash       Before the seal: the next start deletes `making/`. After it: the next start finds `sealed/` and resumes.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from kmq.files import replace_file, sync_directory, sync_file
from kmq.spark.tables import disk
from kmq.spark.tables.bound import Offsets

File = dict[str, Any]  # from, to, rows, size: see disk.describe


class Staging:
    """The directories `making` and `sealed` of a table's state."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._making = f"{state}/making"
        self.sealed = f"{state}/sealed"
        self._attempt = ""  # directory of the batch that is being written

    @property
    def is_sealed(self) -> bool:
        return os.path.isdir(self.sealed)

    def discard(self) -> None:
        """Delete batches that were not sealed."""
        shutil.rmtree(self._making, ignore_errors=True)

    def begin(self) -> str:
        """Return a new directory for a batch. Tasks that outlive their driver keep writing to an older directory."""
        self._attempt = f"{self._making}/{uuid4().hex[:12]}"
        return self._attempt

    def seal(
        self, batch_id: int, offsets: Offsets | None, place: Callable[[str], str], sync: Iterable[str]
    ) -> list[File]:
        """Seal the batch that was written; return all its files.

        `place`: maps a directory of the batch to the table's directory for its files.
        `sync`: paths of other files, synced before the batch is sealed.
        """
        files = [
            disk.describe(self._attempt, name, place(os.path.dirname(name)), f"{batch_id:010}-{number:04}")
            for number, name in enumerate(disk.parquet_files(self._attempt))
        ]
        for path in sync:
            sync_file(path)
        manifest = {"batch": batch_id, "files": [file for file in files if file["rows"]], "offsets": offsets}
        replace_file(f"{self._attempt}/manifest.json", json.dumps(manifest).encode())
        os.rename(self._attempt, self.sealed)  # the commit point
        sync_directory(self._state)
        return files

    def manifest(self) -> tuple[int, Offsets | None, list[File]]:
        """Return (number, offsets, files) of the sealed batch. Earlier releases have sealed it without offsets."""
        with open(f"{self.sealed}/manifest.json", "rb") as file:
            manifest = json.load(file)
        return manifest["batch"], manifest.get("offsets"), manifest["files"]

    def finish(self) -> None:
        """Remove the sealed batch as a whole: a rename first, so that a crash never leaves it half deleted."""
        os.makedirs(self._making, exist_ok=True)
        os.rename(self.sealed, f"{self._making}/done")
        shutil.rmtree(self._making)
