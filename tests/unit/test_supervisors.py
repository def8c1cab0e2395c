"""Who is recognised as the supervisor of a broker: by the words of its command line, of older releases too."""

import subprocess
import sys

import pytest

from kmq.broker.health import is_supervisor

WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        (["kmq.broker.supervisor"], True),
        (["kmq.broker.supervisor", "--no-gateway"], True),
        (["kmq.supervisor"], True),
        (["up", "--foreground"], True),
        (["stages.ingress", "--with", "1"], False),
        ([], False),
    ],
)
def test_a_supervisor_of_this_and_of_older_releases_is_recognised(words, is_one):
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"\n"
        assert is_supervisor(process.pid) is is_one
        process.stdin.close()


def test_a_process_that_is_gone_is_no_supervisor():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not is_supervisor(process.pid)
