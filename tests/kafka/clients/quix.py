"""Counts records by key with Quix Streams, exactly once: `quix.py <address> <in> <out> <directory> <records>`.

The counts are state with a changelog topic. The program ends after so many records.
"""

import sys
from typing import Any

from quixstreams import Application


def counted(value: Any, state: Any) -> dict[str, int]:
    count = state.get("count", 0) + 1
    state.set("count", count)
    return {"count": count}


def main() -> None:
    address, source, target, directory, records = sys.argv[1:]
    app = Application(
        broker_address=address,
        consumer_group=f"quix-{source}",
        auto_offset_reset="earliest",
        state_dir=directory,
        processing_guarantee="exactly-once",
        commit_every=10,
    )
    rows = app.dataframe(app.topic(source, key_deserializer="str", value_deserializer="str"))
    rows.apply(counted, stateful=True).to_topic(app.topic(target, value_serializer="json"))
    app.run(count=int(records), timeout=120)


main()
