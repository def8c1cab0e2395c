"""An S3 server on a loopback port: moto's, a process of its own. The environment of this process says where it is."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow.fs import S3FileSystem
from waiting import until


@contextmanager
def up(log: Path, bucket: str) -> Iterator[S3FileSystem]:
    """With an empty bucket. `log`: a file, because it says a line of each request and would wait for the reader of a pipe."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    patch = pytest.MonkeyPatch()
    try:
        ready = r"Running on (http://\S+)"
        said = until(lambda: re.search(ready, log.read_text()), ready, log.read_text, process=server)
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
