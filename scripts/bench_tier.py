#!/usr/bin/env python3
"""Speed of the copy off the machine, to a directory: `make bench-tier`, or ARGS="--mb 1024 --json".

    pack       CPU seconds for a GB of lines: read and checked, compressed, written, read back, committed (bar: 8)
    restore    CPU seconds for the same: read, unpacked, indexed, and every queue rebuilt by the router

Lines are JSON of about 100 bytes, in a data directory that is made without a broker. Ratios count, not seconds.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time

from kmq.config.settings import load
from kmq.files import give_up
from kmq.log import identity, wal
from kmq.log.wal import Wal
from kmq.logfmt import Logger
from kmq.message import record
from kmq.tier.restore import Restore, find_source
from kmq.tier.store import DirectoryStore
from kmq.tier.turn import Copier, TurnOptions

_GROUP = 2000
_FIRST_US = 1_700_000_000_000_000


class Quiet(Logger):
    """Writes nothing."""

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        pass


def write_wal(data: str, nbytes: int) -> int:
    """Write about so many bytes of lines; return the number of records."""
    identity.open_data(data)
    log, seq = Wal(data, give_up, 1 << 20), 1
    identity.raise_version(data, 1)
    while nbytes > 0:
        lines = [
            b'orders.k%d|%d|%d|{"user": "u%d", "amount": %d, "currency": "EUR", "at": "2026-11-30T06:00:00Z"}'
            % (n % 97, n, n, n * 7919 % 10_000, n * 31 % 1000)
            for n in range(seq, seq + _GROUP)
        ]
        text = b"".join(
            record.number([line], seq + at, record.format_ts(_FIRST_US + seq + at))[0] for at, line in enumerate(lines)
        )
        log.append([(text, seq, _GROUP, _FIRST_US + seq + _GROUP - 1)])
        seq, nbytes = seq + _GROUP, nbytes - len(text)
    log.sync()
    log.close()
    return seq - 1


def measure(nbytes: int) -> dict[str, float]:
    """Copy and restore, and return the figures."""
    root = tempfile.mkdtemp(prefix="kmq-bench-")
    try:
        data = f"{root}/data"
        count = write_wal(data, nbytes)
        size = sum(os.path.getsize(f"{data}/append/{name}") for name in os.listdir(f"{data}/append"))
        store, log = DirectoryStore(f"{root}/store"), Quiet("bench")
        options = TurnOptions(64 << 20, 0, lambda: wal.last_stored(data)[0])
        began = time.process_time()
        copier = Copier(data, store, log, options)
        copier.turn()
        copied = time.process_time()
        stored = sum(row.number("size") for row in copier.commits.state.rows())
        settings = load({"KMQ_DATA": f"{root}/again"}, "none.toml")
        source = find_source(store, "", "bench@here")
        assert source is not None
        Restore(store, source, settings, log, lambda nbytes: None).run(is_drill=True)
        restored = time.process_time()
        gb = size / 1e9
        return {
            "records": count,
            "gb": round(gb, 3),
            "pack_cpu_s_per_gb": round((copied - began) / gb, 2),
            "restore_cpu_s_per_gb": round((restored - copied) / gb, 2),
            "ratio": round(size / stored, 2),
        }
    finally:
        shutil.rmtree(root)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="make bench-tier", description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="megabytes of lines")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.mb * 1_000_000)
    print(json.dumps(found) if arguments.json else "\n".join(f"{name:22} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
