"""`python scripts/bench …`: the benchmark of the broker (broker.py), and the processes that it starts to send messages."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this folder is the package `bench`

from kmq.errors import EXIT_OK  # noqa: E402


def main() -> int:
    role, arguments = "".join(sys.argv[1:2]), sys.argv[2:]
    if role == "_send":
        from bench import sending

        sending.send(arguments[0], arguments[1], arguments[2:])
        return EXIT_OK
    if role == "_produce":
        from bench import producing

        producing.produce(arguments[0], int(arguments[1]), arguments[2:])
        return EXIT_OK
    if role == "_request":
        from bench import requests

        requests.request(arguments[0], arguments[1], int(arguments[2]), list(map(float, arguments[3:])))
        return EXIT_OK
    from bench import broker

    return broker.main()


if __name__ == "__main__":
    sys.exit(main())
