"""An S3 server on a loopback port: moto's, a process of its own. The environment of this process says where it is."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow.fs import S3FileSystem

PATIENCE_S = 60.0


@contextmanager
def up(log: Path, bucket: str) -> Iterator[S3FileSystem]:
    """With an empty bucket. `log`: a file, because it says a line of each request and would wait for the reader of a pipe."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    patch, deadline = pytest.MonkeyPatch(), time.monotonic() + PATIENCE_S
    try:
        while not (said := re.search(r"Running on (http://\S+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        given = {"ENDPOINT_URL": said[1], "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1"}
        for name, text in given.items():
            patch.setenv(f"AWS_{name}", text)
        store = S3FileSystem(endpoint_override=said[1], allow_bucket_creation=True)
        store.create_dir(bucket)
        yield store
    finally:
        patch.undo()
        server.kill()
        server.wait()
