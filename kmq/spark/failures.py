"""What went wrong in Spark, as one line: the cause, without the trace of the JVM around it.

A KmqError raised in a Python worker comes back as text in an exception of Spark's. It is recognised there by its class, and
keeps its exit code.
"""

import re
from importlib import import_module

from kmq.errors import KmqError, RetryError

# The last line of a Python traceback, anywhere in the text of Spark's exception.
_RAISED = re.compile(r"^((?:\w+\.)*)(\w+(?:Error|Exception|Exit|Interrupt)): (.+)$", re.MULTILINE)
_CALLED = re.compile(r"^An error occurred while calling \S+\s*: (?:\w+\.)+")  # py4j's preface, and the class's package
_LOST = re.compile(r"Job aborted due to .*?most recent failure: .*?\): (?:\w+\.)*", re.DOTALL)
_NO_WORKER = ("Python worker failed to connect back", "waiting for the Python worker to connect back")
_BUSY = (
    "no Python worker started within the 10 s that Spark waits, because this machine is busy; give it fewer tasks at once"
    " (--master 'local[1]'), give its container more CPU, or start again later; nothing that was done is lost"
)
_MOST = 600  # characters of a message that is not ours


def explain(error: Exception) -> KmqError | None:
    """Return the cause of an error of Spark's, as KmqError with the right exit code; None if `error` is not Spark's."""
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
    return _ours(text) or KmqError(_first(text))


def is_worker_timeout(error: BaseException) -> bool:
    """Return True if a new Python interpreter did not start in the 10 s that Spark waits: a retry may help."""
    text = str(error)
    return type(error).__module__.startswith(("pyspark", "py4j")) and any(said in text for said in _NO_WORKER)


def _ours(text: str) -> KmqError | None:
    """Return the error that a Python worker raised, if one did: a KmqError with its class, any other with its name."""
    raised = [match for match in _RAISED.findall(text) if not match[0].startswith(("org.", "java.", "py4j.", "scala."))]
    if not raised:
        return None
    module, name, message = next((match for match in reversed(raised) if match[0].startswith("kmq.")), raised[-1])
    if not module.startswith("kmq."):
        return KmqError(f"{name}: {message}")
    cause = KmqError(message)
    cause.exit_code = getattr(getattr(import_module(module[:-1]), name, None), "exit_code", cause.exit_code)
    return cause


def _first(text: str) -> str:
    """Return what Spark says itself, without its plan, its trace and its advice."""
    text = _LOST.sub("", _CALLED.sub("", text)).removeprefix("SparkException: ")
    text = re.split(r"\n\s*at |\n\n|; line \d+ pos|\.? SQLSTATE|\n'|Driver stacktrace", text.strip())[0]
    text = " ".join(text.split())[:_MOST].rstrip(" .;")
    return text + ("; more: --conf spark.driver.memory=1g" if "OutOfMemoryError" in text else "")
