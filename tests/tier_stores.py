"""Stores for the tests of the tier: a directory, S3 servers as processes, and stores that lie.

with tier_stores.s3("moto", path) as url: open_store(url)
with tier_stores.s3_behind_proxy("moto", path) as (url, proxy): ...
"""

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from consuls import free_ports
from s3_proxy import LyingProxy
from waiting import until

from kmq.tier.store import DirectoryStore, MissingError, ObjectStore, StoreError

SERVERS = ("moto", "localbucket")


@contextmanager
def s3(server: str, path: Path) -> Iterator[str]:
    """Run an S3 server with an empty bucket, and yield its URL. The environment says where it is."""
    path.mkdir(parents=True, exist_ok=True)
    log = path / "log"
    (port,) = free_ports(1)
    commands = {
        "moto": ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        "localbucket": ["-m", "localbucket", "--port", str(port), str(path / "buckets")],
    }
    (path / "buckets" / "bucket").mkdir(parents=True)
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, *commands[server]], stdout=file, stderr=file)
    patch, endpoint = pytest.MonkeyPatch(), f"http://127.0.0.1:{port}"
    try:
        until(lambda: _listens(port), "the S3 server listens", log.read_text, process=process)
        if server == "moto":
            header = {"Authorization": "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request"}
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT", headers=header)).close()
        given = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1"}
        for name, text in given.items():
            patch.setenv(f"AWS_{name}", text)
        yield "s3://bucket/kmq"
    finally:
        patch.undo()
        process.kill()
        process.wait()


@contextmanager
def s3_behind_proxy(server: str, path: Path) -> Iterator[tuple[str, LyingProxy]]:
    """The same behind a proxy, which lies as it is told. A call without an answer ends after seconds."""
    patch = pytest.MonkeyPatch()
    patch.setattr("kmq.tier.store._DEADLINE_S", 3.0)
    patch.setattr("kmq.tier.store._BYTES_PER_S", 100_000_000)  # a get does not know how much will come
    try:
        with s3(server, path) as url, LyingProxy.before(os.environ["AWS_ENDPOINT_URL"].rpartition("/")[2]) as proxy:
            yield url, proxy
    finally:
        patch.undo()


class ProxiedStore(ObjectStore):
    """A bucket behind a proxy, for a world that decides when the proxy lies."""

    def __init__(self, url: str, proxy: LyingProxy) -> None:
        super().__init__(url)
        self._proxy = proxy
        proxy.is_calm = True

    @property
    def is_calm(self) -> bool:
        return self._proxy.is_calm

    @is_calm.setter
    def is_calm(self, is_calm: bool) -> None:
        self._proxy.is_calm = is_calm

    def deliver(self) -> None:
        self._proxy.deliver()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class LyingStore(DirectoryStore):
    """A directory whose calls go wrong as `plan` says, one word a call of create; then all is well.

    lost      nothing was carried out, and the answer is an error
    done      it was carried out, and the answer is an error
    late      the answer is an error; it is carried out by `deliver`
    altered   another content is stored, and the answer is a success
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.plan: list[str] = []
        self.made: list[str] = []
        self._late: list[tuple[str, bytes]] = []
        self.is_away = False

    def create(self, key: str, content: bytes) -> bool:
        fate = self.plan.pop(0) if self.plan else ""
        if self.is_away or fate == "lost":
            raise StoreError("the store is away")
        if fate == "late":
            self._late.append((key, content))
            raise StoreError("no answer")
        is_made = super().create(key, bytes(reversed(content)) if fate == "altered" else content)
        self.made.append(key)
        if fate == "done":
            raise StoreError("500 Internal Server Error")
        return is_made

    def get(self, key: str) -> Iterator[bytes]:
        if self.is_away:
            raise StoreError("the store is away")
        yield from super().get(key)

    def deliver(self) -> None:
        for key, content in self._late:
            super().create(key, content)
        self._late.clear()


class OverwritingStore:
    """A store that ignores the condition, in memory."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def create(self, key: str, content: bytes) -> bool:
        self.keys[key] = content
        return True

    def get(self, key: str) -> Iterator[bytes]:
        if key not in self.keys:
            raise MissingError(key)
        yield self.keys[key]

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        yield from sorted(key for key in self.keys if key.startswith(prefix) and key > after)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.keys.pop(key, None)
