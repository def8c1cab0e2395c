"""A queue of kombu at its default settings: `kombu_queue.py <address> <queue> put|get <count>`.

`put` sends the messages 0 to count - 1, each a line of stdin. `get` prints so many messages, each acknowledged.
"""

import sys

from kombu import Connection


def main() -> None:
    address, name, action, count = sys.argv[1:]
    with Connection(f"confluentkafka://{address}") as connection, connection.SimpleQueue(name) as queue:
        if action == "put":
            for line in sys.stdin:
                queue.put({"line": line.removesuffix("\n")})
        for _ in range(int(count) if action == "get" else 0):
            message = queue.get(timeout=60)
            print(message.payload["line"])
            message.ack()


main()
