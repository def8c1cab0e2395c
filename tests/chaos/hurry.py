"""A pod in a hurry: what each of its processes runs at its start, as the PYTHONPATH that makes it do so."""

import os
from pathlib import Path

# Checkpoints and index notes after every group, where due: what is made now and then is made all the time.
_HURRIED = """
from kmq.framing import dedupe
from kmq.router import queues, recovery

def route(self, blocks, route=queues.Queues.route):
    written = route(self, blocks)
    self.tick()
    return written

dedupe.CHECKPOINT_BYTES = recovery.CHECKPOINT_BYTES = 1 << 20
recovery.CHECKPOINT_NS = 1_000_000_000
queues.Queues.route = route
"""


_BRISK = """
from kmq.broker import stage

stage.DRAIN_S = 1.0
"""


_SAVING = """
from kmq.framing import dedupe

dedupe.CHECKPOINT_S = 1.0
"""


_RESTLESS = """
import sys

if "kmq.gateway" in sys.orig_argv:
    from kmq.gateway.groups import protocol
    from kmq.gateway.http import schema

    protocol.SESSION_S = (1.0, 300.0)
    schema.SCHEMAS["JoinGroup"]["properties"]["sessionMs"]["minimum"] = 1000
"""


def hurried(directory: Path) -> str:
    """Whatever is seldom on disk for a moment is there so often that a fault meets it."""
    return _site(directory, _HURRIED)


def brisk(directory: Path) -> str:
    """A stage that is told to stop, while those in front of it go on, does not drain for ten seconds."""
    return _site(directory, _BRISK)


def saving(directory: Path) -> str:
    """The dedupe table is saved each second, not each half minute: only then does retention take what it covers of the WAL."""
    return _site(directory, _SAVING)


def restless(directory: Path) -> str:
    """Members of groups may have sessions of a second, so that one which is stopped has lost its partitions soon."""
    return _site(directory, _RESTLESS)


def _site(directory: Path, text: str) -> str:
    (directory / "sitecustomize.py").write_text(text)
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
