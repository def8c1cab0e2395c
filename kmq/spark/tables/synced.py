"""A PyArrowFileIO that writes Iceberg's metadata files so that they are on disk when they are closed.

The catalog's pointer to these files is durable, so the files must be durable before the pointer is written.
"""

import io
import os

from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from kmq.files import sync_directory


class SyncedIO(PyArrowFileIO):
    """The value of `py-io-impl` for a catalog whose tables are on this machine."""

    def new_output(self, location: str) -> PyArrowFile:
        """Return a local file that is synced when it is closed."""
        scheme, netloc, path = self.parse_location(location, self.properties)
        return _SyncedOutput(location, path, self.fs_by_scheme(scheme, netloc))


class _SyncedOutput(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        return _SyncedFile(self._path, "wb" if overwrite else "xb")


class _SyncedFile(io.FileIO):
    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
            super().close()
            sync_directory(os.path.dirname(str(self.name)))
