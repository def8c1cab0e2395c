"""The options of a stream that follows topics into a table or a topic."""

from collections.abc import Mapping

BATCH_BYTES = "64m"  # of lines in a micro-batch


def starting(where: Mapping[str, str], batch_bytes: str = BATCH_BYTES) -> dict[str, str]:
    """Return the options of a stream from the first record on. A pattern matches no dead letters.

    `batch_bytes`: of lines in a micro-batch.
    """
    lower = {name.lower(): text for name, text in where.items()}
    options = dict(where)
    if "subscribepattern" in lower:
        options = {name: text for name, text in where.items() if name.lower() != "subscribepattern"}
        options["subscribePattern"] = rf"(?!.*\.dlq$)(?:{lower['subscribepattern']})"
    if not {"startingoffsets", "startingtimestamp"} & lower.keys():
        options["startingOffsets"] = "earliest"
    if not {"maxbytespertrigger", "maxoffsetspertrigger"} & lower.keys():
        options["maxBytesPerTrigger"] = batch_bytes
    return options
