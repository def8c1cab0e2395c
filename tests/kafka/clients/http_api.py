"""The HTTP API of the gateway, in its form `base64`."""

import json
import sys
import urllib.request
from base64 import b64decode, b64encode
from typing import Any

import record_lines
from record_lines import PARTITIONS, PATIENCE_S, Row


def _ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=PATIENCE_S) as response:
        return json.load(response)


def _shown(value: bytes | None) -> str | None:
    return None if value is None else b64encode(value).decode()


def _meant(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


def produce(address: str, topics: dict[str, str]) -> None:
    messages = []
    for row in record_lines.read(sys.stdin):
        message: dict[str, Any] = {"partition": row.partition, "key": _shown(row.key), "value": _shown(row.value)}
        message["headers"] = [{"name": name, "value": _shown(value)} for name, value in row.headers]
        messages.append(message if row.timestamp is None else message | {"timestamp": row.timestamp})
    for topic in topics:
        found = _ask(f"http://{address}/api/topics/{topic}/produce?format=base64", {"messages": messages})
        refused = [each for each in found["results"] if "error" in each]
        assert not refused, refused[:3]


def consume(address: str, topics: dict[str, str]) -> None:
    for topic, count in topics.items():
        url, left = (
            f"http://{address}/api/topics/{topic}/consume?format=base64&timeoutMs={PATIENCE_S * 1000}",
            int(count),
        )
        for partition in PARTITIONS:
            offset = 0
            while True:
                found = _ask(f"{url}&partition={partition}&offset={offset}")
                sys.stdout.write(record_lines.write(_row(topic, each) for each in found["messages"]))
                left -= len(found["messages"])
                offset = found["positions"][0]["offset"]
                if offset == found["positions"][0]["endOffset"]:
                    break
        assert not left, f"{topic}: {left} are not read"


def _row(topic: str, message: dict[str, Any]) -> Row:
    headers = message["headers"]
    if isinstance(headers, dict):
        headers = [{"name": name, "value": value} for name, value in headers.items()]
    pairs = tuple((each["name"], _meant(each["value"])) for each in headers)
    key, value = _meant(message["key"]), _meant(message["value"])
    return Row(message["partition"], key, value, pairs, message["timestamp"], topic, message["offset"])


if __name__ == "__main__":
    asked = record_lines.asked()
    {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
