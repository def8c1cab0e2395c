"""Where the files of a table are: a directory, or a prefix in an S3 object store.

Both adopt the files of a sealed batch. That can be repeated until it succeeds, with the same result: each file is there
once, complete, under its name in the manifest. A directory renames the file. S3 stores the same bytes under the same
key again, and an object becomes visible only when all of it is stored. The sealed batch stays on disk, in the stream's
checkpoint, until the table has all of it.

S3          Keys and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN (or
            a role of the machine), AWS_REGION, AWS_ENDPOINT_URL. They are passed to the libraries and never written.
Price       The bytes pass through the driver's machine, WORKERS files at a time, and use its disk until they are
            stored.
"""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kmq.errors import ConfigError, KmqError, RetryError
from kmq.files import replace_file, sync_directory
from kmq.spark.tables import disk

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

SCHEME = "s3://"
WORKERS = 8
_CHUNK = 8 << 20
_OWNER, _WRITER = "_kmq/owner.json", "_kmq/writer.json"  # readers ignore names with an underscore
_TRANSIENT = ("NETWORK_CONNECTION", "SLOW_DOWN", "SERVICE_UNAVAILABLE", "REQUEST_TIMEOUT", "curlCode")


class Place(Protocol):
    """Where a table's files are; see the module. Names are relative to the table."""

    url: str

    def has(self, directory: str) -> bool:
        """Return True if the directory exists, or in a store holds anything."""
        ...

    def adopt(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        """Move the files of the manifest from `sealed` to their places, so that they survive a power cut."""
        ...

    def local_path(self, sealed: str, file: Mapping[str, Any]) -> str:
        """Return the path on this machine where an adopted file can be read."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Replace the content of a small file, all of it or nothing."""
        ...


class Directory:
    """A directory on this machine or on a shared volume."""

    def __init__(self, path: str) -> None:
        self.path, self.url = path, f"file://{path}"

    def has(self, directory: str) -> bool:
        return os.path.isdir(f"{self.path}/{directory}")

    def adopt(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        for file in files:
            place, waiting = f"{self.path}/{file['to']}", f"{sealed}/{file['from']}"
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.exists(waiting):
                os.rename(waiting, place)
        for directory in {os.path.dirname(file["to"]) for file in files}:
            disk.sync_up(self.path, directory)

    def local_path(self, sealed: str, file: Mapping[str, Any]) -> str:
        return f"{self.path}/{file['to']}"

    def replace(self, name: str, content: bytes) -> None:
        path = f"{self.path}/{name}"
        replace_file(path, content)
        sync_directory(os.path.dirname(path))


class S3:
    """A prefix of a bucket."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._prefix = self.url.removeprefix(SCHEME)
        if not all(self._prefix.split("/")) or "/" not in self._prefix:
            raise ConfigError(f"--to {url!r}: must be s3://bucket/prefix")

    @cached_property
    def _fs(self) -> "S3FileSystem":
        from pyarrow.fs import S3FileSystem

        return S3FileSystem(
            endpoint_override=endpoint() or None, region=region() or None, connect_timeout=10, request_timeout=60
        )

    def owner(self) -> str:
        """Return the id of the stream whose rows are here; "" for none. Raises KmqError if the store cannot be read."""
        return str(self.note(_OWNER).get("query", ""))

    def note(self, name: str) -> dict[str, Any]:
        """Return what a small file of JSON says; empty if there is none. Raises KmqError if it cannot be read."""
        try:
            with self._fs.open_input_stream(f"{self._prefix}/{name}") as file:
                return dict(json.loads(file.read()))
        except FileNotFoundError:
            return {}
        except OSError as err:
            raise self._explained(err) from err

    def own(self, query: str) -> None:
        """Note the stream whose rows are here."""
        self.replace(_OWNER, json.dumps({"query": query}).encode())

    def check(self) -> None:
        """Prove that files can be stored here, with a note that names this process."""
        self.replace(_WRITER, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())

    def has(self, directory: str) -> bool:
        from pyarrow.fs import FileSelector

        try:
            return bool(self._fs.get_file_info(FileSelector(f"{self._prefix}/{directory}", allow_not_found=True)))
        except OSError as err:
            raise self._explained(err) from err

    def adopt(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            for done in [pool.submit(self._store, f"{sealed}/{file['from']}", file["to"]) for file in files]:
                done.result()

    def _store(self, path: str, name: str) -> None:
        try:
            with open(path, "rb") as file, self._fs.open_output_stream(f"{self._prefix}/{name}") as out:
                while chunk := file.read(_CHUNK):
                    out.write(chunk)
        except OSError as err:
            raise self._explained(err) from err

    def local_path(self, sealed: str, file: Mapping[str, Any]) -> str:
        return f"{sealed}/{file['from']}"

    def replace(self, name: str, content: bytes) -> None:
        try:
            with self._fs.open_output_stream(f"{self._prefix}/{name}") as out:
                out.write(content)
        except OSError as err:
            raise self._explained(err) from err

    def _explained(self, err: OSError) -> KmqError:
        text = " ".join(str(err).split())[:300]
        if any(sign in text for sign in _TRANSIENT):
            return RetryError(f"--to {self.url}: {text}; run again when the store is reachable, nothing is lost")
        return ConfigError(f"--to {self.url}: {text}; see AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL")


def endpoint() -> str:
    """Return the URL of an object store other than Amazon's; "" for Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def region() -> str:
    """Return the store's region from the environment; "" if it names none."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "")
