"""What a session passes on of the stderr of its JVM and of the JVM's Python workers."""

from itertools import chain, zip_longest

import pytest

from kmq.spark.sessions import MAX_LINES, without_disconnects, without_overflows

RUNNER = b"""Traceback (most recent call last):
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
  File "/x/pyspark/daemon.py", line 80, in worker
BrokenPipeError: [Errno 32] Broken pipe
"""
OF_A_JOB = b"""Traceback (most recent call last):
  File "/home/me/job.py", line 3, in send
BrokenPipeError: [Errno 32] Broken pipe
"""
OTHERS = b"""Traceback (most recent call last):
  File "/home/me/job.py", line 3, in send
BrokenPipeError: [Errno 32] Broken pipe
Traceback (most recent call last):
  File "/x/pyspark/daemon.py", line 264, in manager
MemoryError
"""
OF_A_WORKER = b"""Traceback (most recent call last):
  File "/x/pyspark/daemon.py", line 264, in manager
  File "/home/me/job.py", line 3, in send
kmq.errors.KmqError: the disk is full
"""


def passed_on(text):
    return b"".join(without_disconnects(text.splitlines(keepends=True)))


def by_turns(*texts, skip=0):
    """Interleave texts line by line; every one but the first begins `skip` lines later than the one before."""
    late = ([b""] * skip * number + text.splitlines(keepends=True) for number, text in enumerate(texts))
    return b"".join(chain.from_iterable(zip_longest(*late, fillvalue=b"")))


def test_tracebacks_of_closed_connections_are_removed_and_all_else_is_passed_on():
    assert passed_on(b"before\n" + RUNNER + DAEMON + b"after\n") == b"before\nafter\n"
    assert passed_on(OTHERS) == OTHERS
    own = DAEMON.replace(b"/x/pyspark/", b"/home/me/")
    assert passed_on(own) == own
    assert passed_on(b"a\n\n" + OTHERS + b"\nb\n" + DAEMON) == b"a\n\n" + OTHERS + b"\nb\n"
    assert (
        passed_on(b"Traceback (most recent call last):\n  cut off\n")
        == b"Traceback (most recent call last):\n  cut off\n"
    )


@pytest.mark.parametrize("skip", range(12))
@pytest.mark.parametrize("texts", [(DAEMON, DAEMON), (RUNNER, RUNNER), (RUNNER, DAEMON), (DAEMON, RUNNER, DAEMON)])
def test_interleaved_tracebacks_of_closed_connections_are_removed(texts, skip):
    assert passed_on(b"before\n" + by_turns(*texts, skip=skip) + b"after\n") == b"before\nafter\n"


def test_a_line_of_the_jvm_within_a_removed_traceback_is_passed_on():
    log = b"26/11/22 10:00:00 ERROR Executor: task 3 failed\n"
    assert passed_on(by_turns(DAEMON, log, skip=2)) == log
    assert passed_on(by_turns(RUNNER, DAEMON, log, skip=1)) == log


@pytest.mark.parametrize("skip", range(12))
@pytest.mark.parametrize("real", [OF_A_JOB, OF_A_WORKER, OTHERS])
@pytest.mark.parametrize("closed", [DAEMON, RUNNER])
def test_a_real_error_interleaved_with_a_closed_connection_is_passed_on_in_full(real, closed, skip):
    for mixed in (by_turns(closed, real, skip=skip), by_turns(real, closed, skip=skip)):
        passed = iter(passed_on(mixed + b"after\n").splitlines(keepends=True))
        assert all(line in passed for line in [*real.splitlines(keepends=True), b"after\n"])


def test_lines_of_real_errors_are_not_taken_for_a_later_closed_connection():
    two = by_turns(OF_A_WORKER, OF_A_JOB.replace(b"in send\n", b"in send\n    one()\n    two()\n    three()\n"))
    assert passed_on(by_turns(two, DAEMON, skip=6)).count(b"    three()\n") == 1


def test_a_real_error_behind_a_cut_off_traceback_is_passed_on_as_soon_as_it_ends():
    cut = b'Traceback (most recent call last):\n  File "/x/pyspark/daemon.py", line 264, in manager\n'
    lines = iter((cut + DAEMON + OF_A_WORKER).splitlines(keepends=True))
    passed = without_disconnects(lines)
    assert b"".join(next(passed) for _ in range(len((cut + DAEMON + OF_A_WORKER).splitlines()))).endswith(OF_A_WORKER)


def test_lines_held_back_are_limited():
    endless = (line for line in [b"Traceback (most recent call last):\n", *[b"  more\n"] * MAX_LINES])
    assert next(without_disconnects(endless)).startswith(b"Traceback")
    assert list(endless)


# --- an overflow in a pattern ----------------------------------------------------------------------------------------

OVERFLOW = b'Exception in thread "stream execution thread for a [id = 1, runId = 2]" java.lang.StackOverflowError\n'
INNERMOST = b"\tat java.base/java.util.regex.IntHashSet.contains(IntHashSet.java:47)\n"
IN_REGEX = b"\tat java.base/java.util.regex.Pattern$GroupTail.match(Pattern.java:4863)\n"


def test_the_overflow_of_sparks_own_pattern_is_removed():
    text = b"before\n" + OVERFLOW + INNERMOST + 1023 * IN_REGEX + b"after\n" + IN_REGEX + OVERFLOW + IN_REGEX
    assert b"".join(without_overflows(text.splitlines(keepends=True))) == b"before\nafter\n" + IN_REGEX


@pytest.mark.parametrize(
    "text",
    [
        OVERFLOW + b"\tat org.apache.spark.sql.catalyst.trees.TreeNode.foreach(TreeNode.scala:1)\n" + IN_REGEX,
        OVERFLOW + OVERFLOW,
        OVERFLOW + 1024 * INNERMOST,
        OVERFLOW.replace(b"stream execution thread for a", b"main") + IN_REGEX,
        OVERFLOW.replace(b"StackOverflow", b"OutOfMemory") + IN_REGEX,
        IN_REGEX,
    ],
)
def test_other_overflows_are_passed_on(text):
    assert b"".join(without_overflows(text.splitlines(keepends=True))) == text
