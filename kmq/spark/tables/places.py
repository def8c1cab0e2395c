"""Where the files of a table are: a directory, or a prefix in an S3 object store.

Both take over the files of a sealed batch, again and again until it is through, and end with the same: each file is there once,
whole, under the name that the manifest gives it. A directory does it by renaming, S3 by storing the same bytes under the same key
again: an object is there when all of it is. The sealed batch stays on disk, in the stream's checkpoint, until the table has it.

S3          Keys and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN (or a role
            of the machine's), AWS_REGION, AWS_ENDPOINT_URL. They are handed on to the libraries and written nowhere.
Price       The bytes pass through the driver's machine, WORKERS files at a time, and for a moment take its disk.
"""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kmq.errors import ConfigError, KmqError, RetryError
from kmq.log.disk import replace_file, sync_directory
from kmq.spark.tables import disk

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

SCHEME = "s3://"
WORKERS = 8
_CHUNK = 8 << 20
_OWNER, _WRITER = "_kmq/owner.json", "_kmq/writer.json"  # readers ignore names with an underscore
_FOR_A_WHILE = ("NETWORK_CONNECTION", "SLOW_DOWN", "SERVICE_UNAVAILABLE", "REQUEST_TIMEOUT", "curlCode")


class Place(Protocol):
    """See the module. Names are relative to the table's."""

    url: str

    def has(self, directory: str) -> bool:
        """Return True if something is in there."""
        ...

    def take(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        """Give the files of the manifest their places; they survive a power cut."""
        ...

    def here(self, sealed: str, file: Mapping[str, Any]) -> str:
        """Where a file that was taken can be read on this machine."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Give a small file new content, whole or not at all."""
        ...


class Directory:
    """On this machine or on a shared volume."""

    def __init__(self, path: str) -> None:
        self.path, self.url = path, f"file://{path}"

    def has(self, directory: str) -> bool:
        return os.path.isdir(f"{self.path}/{directory}")

    def take(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
        for file in files:
            place, waiting = f"{self.path}/{file['to']}", f"{sealed}/{file['from']}"
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.exists(waiting):
                os.rename(waiting, place)
        for directory in {os.path.dirname(file["to"]) for file in files}:
            disk.sync_up(self.path, directory)

    def here(self, sealed: str, file: Mapping[str, Any]) -> str:
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
        """The id of the stream whose rows are here; empty for none. Raises an error where the place cannot be read."""
        try:
            with self._fs.open_input_stream(f"{self._prefix}/{_OWNER}") as file:
                return str(json.loads(file.read())["query"])
        except FileNotFoundError:
            return ""
        except OSError as err:
            raise self._explained(err) from err

    def own(self, query: str) -> None:
        """Say whose rows are here."""
        self.replace(_OWNER, json.dumps({"query": query}).encode())

    def check(self) -> None:
        """Prove that something can be stored here: say who does."""
        self.replace(_WRITER, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())

    def has(self, directory: str) -> bool:
        from pyarrow.fs import FileSelector

        try:
            return bool(self._fs.get_file_info(FileSelector(f"{self._prefix}/{directory}", allow_not_found=True)))
        except OSError as err:
            raise self._explained(err) from err

    def take(self, sealed: str, files: Iterable[Mapping[str, Any]]) -> None:
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

    def here(self, sealed: str, file: Mapping[str, Any]) -> str:
        return f"{sealed}/{file['from']}"

    def replace(self, name: str, content: bytes) -> None:
        try:
            with self._fs.open_output_stream(f"{self._prefix}/{name}") as out:
                out.write(content)
        except OSError as err:
            raise self._explained(err) from err

    def _explained(self, err: OSError) -> KmqError:
        text = " ".join(str(err).split())[:300]
        if any(sign in text for sign in _FOR_A_WHILE):
            return RetryError(f"--to {self.url}: {text}; run again when the store is there, nothing is lost")
        return ConfigError(f"--to {self.url}: {text}; see AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL")


def endpoint() -> str:
    """Of a store that is not Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def region() -> str:
    """As the environment has it."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "")
