"""What a session passes on of what its JVM and the Python workers of that say."""

from kmq.spark.sessions import _without_partings

PARTED = b"""Traceback (most recent call last):
  File "/x/pyspark/sql/streaming/python_streaming_source_runner.py", line 265, in main
EOFError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/pyspark/sql/streaming/python_streaming_source_runner.py", line 299, in main
    return self._sock.send(b)
           ^^^^^^^^^^^^^^^^^^
BrokenPipeError: [Errno 32] Broken pipe
"""
DAEMON = b"""Traceback (most recent call last):
  File "/x/pyspark/daemon.py", line 264, in manager
BrokenPipeError: [Errno 32] Broken pipe
"""
OTHERS = b"""Traceback (most recent call last):
  File "/home/me/job.py", line 3, in send
BrokenPipeError: [Errno 32] Broken pipe
Traceback (most recent call last):
  File "/x/pyspark/daemon.py", line 264, in manager
MemoryError
"""


def passed_on(text):
    return b"".join(_without_partings(text.splitlines(keepends=True)))


def test_the_parting_words_of_workers_are_not_passed_on_and_all_else_is():
    assert passed_on(b"before\n" + PARTED + DAEMON + b"after\n") == b"before\nafter\n"
    assert passed_on(OTHERS) == OTHERS
    assert passed_on(b"a\n\n" + OTHERS + b"\nb\n" + DAEMON) == b"a\n\n" + OTHERS + b"\nb\n"
    assert (
        passed_on(b"Traceback (most recent call last):\n  cut off\n")
        == b"Traceback (most recent call last):\n  cut off\n"
    )
