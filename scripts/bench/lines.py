"""Messages as a producer of lines sends them, made before anything is measured."""

from collections.abc import Callable

BLOCK = 200_000  # bytes of one send
KEY = "test.probe"
MIXED = [f"{topic}.k{key}" for topic in ("test", "jobs", "orders", "audit", "metrics") for key in range(4)]


def line(key: str, number: int, nbytes: int) -> bytes:
    """Return a message of `nbytes` bytes, including its newline."""
    head = f"{key}|0|{number}|"
    return (head + "x" * (nbytes - len(head) - 1) + "\n").encode()


def json_line(key: str, number: int, nbytes: int) -> bytes:
    """Return the same with a JSON object of four fields as payload; its last field, a text, fills the wanted length."""
    head = f'{key}|0|{number}|{{"user":"u{number % 5000}","price":{number % 997 / 4},"n":{number % 1000},"t":"'
    return (head + "x" * (nbytes - len(head) - 3) + '"}\n').encode()


def blocks(keys: list[str], count: int, nbytes: int, make: Callable[[str, int, int], bytes] = line) -> list[bytes]:
    """Return `count` messages in blocks of about BLOCK bytes, the keys in turn."""
    per_block = max(1, BLOCK // nbytes)
    lines = [make(keys[n % len(keys)], n, nbytes) for n in range(count)]
    return [b"".join(lines[at : at + per_block]) for at in range(0, count, per_block)]
