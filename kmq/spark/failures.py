"""Reduces an error of Spark to one line: its cause, without the JVM's stack trace around it. Refuses an older pyspark.

A KmqError raised in a Python worker arrives as text within an exception of Spark. It is recognised by its class name,
so that the command still ends with its exit code.
"""

import re
from importlib import import_module

from kmq.errors import ConfigError, KmqError, RetryError

# The last line of a Python traceback, anywhere in the text of Spark's exception.
_RAISED = re.compile(r"^((?:\w+\.)*)(\w+(?:Error|Exception|Exit|Interrupt)): (.+)$", re.MULTILINE)
_CALLED = re.compile(r"^An error occurred while calling \S+\s*: (?:\w+\.)+")  # py4j's preface, and the class's package
_ABORTED = re.compile(r"Job aborted due to .*?most recent failure: .*?\): (?:\w+\.)*", re.DOTALL)
_NO_WORKER = ("Python worker failed to connect back", "waiting for the Python worker to connect back")
_BUSY = (
    "no Python worker started within the 10 s that Spark waits, because this machine is busy; give it fewer tasks at"
    " once (--master 'local[1]'), give its container more CPU, or start again later; nothing that was done is lost"
)
_MAX_CHARS = 600  # of a message of Spark

# The oldest pyspark: 4.0 has no filters and no Arrow writer of streams, 4.1 has no limits of a stream.
OLDEST, OLDEST_OF_STREAMS = (4, 1), (4, 2)


def require_pyspark(least: tuple[int, int] = OLDEST, what: str = "this") -> None:
    """Raise ConfigError if the pyspark here is older. `what`: the subject of the error."""
    from pyspark.version import __version__ as version

    here = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if here < least:
        wanted = ".".join(map(str, least))
        raise ConfigError(f"{what} needs pyspark {wanted}, {version} is here; pip install 'pyspark>={wanted}'")


def explain(error: Exception) -> KmqError | None:
    """Return the cause of a Spark error as a KmqError with its exit code; None if the error is not one of Spark."""
    if isinstance(error, KmqError):
        return error
    module = type(error).__module__
    if module.startswith("py4j") and type(error).__name__ in ("Py4JNetworkError", "Py4JError"):
        return RetryError("Spark's JVM has ended; more memory may help: --conf spark.driver.memory=1g")
    if not module.startswith(("pyspark", "py4j")):
        return None
    if is_worker_timeout(error):
        return RetryError(_BUSY)
    text = str(error)
    return _raised_in_worker(text) or KmqError(_summary(text))


def is_worker_timeout(error: BaseException) -> bool:
    """Return True if a new Python interpreter did not start in the 10 s that Spark waits, so that a retry may help."""
    text = str(error)
    return type(error).__module__.startswith(("pyspark", "py4j")) and any(phrase in text for phrase in _NO_WORKER)


def _raised_in_worker(text: str) -> KmqError | None:
    """Return the error that a Python worker raised, or None. A KmqError keeps its exit code, others are named."""
    raised = [match for match in _RAISED.findall(text) if not match[0].startswith(("org.", "java.", "py4j.", "scala."))]
    if not raised:
        return None
    module, name, message = next((match for match in reversed(raised) if match[0].startswith("kmq.")), raised[-1])
    if not module.startswith("kmq."):
        return KmqError(f"{name}: {message}")
    cause = KmqError(message)
    cause.exit_code = getattr(getattr(import_module(module[:-1]), name, None), "exit_code", cause.exit_code)
    return cause


def _summary(text: str) -> str:
    """Return Spark's own message without the query plan, the stack trace and its advice."""
    text = _ABORTED.sub("", _CALLED.sub("", text)).removeprefix("SparkException: ")
    text = re.split(r"\n\s*at |\n\n|; line \d+ pos|\.? SQLSTATE|\n'|Driver stacktrace", text.strip())[0]
    text = " ".join(text.split())[:_MAX_CHARS].rstrip(" .;")
    return text + ("; more: --conf spark.driver.memory=1g" if "OutOfMemoryError" in text else "")
