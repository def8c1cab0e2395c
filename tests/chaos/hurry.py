"""A pod in which what is made now and then is made all the time, so that a fault meets it."""

import os
from pathlib import Path

# Run by every process of the pod at its start: checkpoints and index notes after every group, where due.
_SITE = """
from kmq.log import producers, queues

def route(self, blocks, route=queues.Queues.route):
    written = route(self, blocks)
    self.tick()
    return written

producers.CHECKPOINT_BYTES = queues.CHECKPOINT_BYTES = 1 << 20
queues.Queues.route = route
"""


def hurried(directory: Path) -> str:
    """The PYTHONPATH that does it."""
    (directory / "sitecustomize.py").write_text(_SITE)
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
