"""What one stranger can do with names and ids, against a pod that runs: attack(pod) returns where nobody else was harmed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from waiting import meanwhile

from chaos.by_hand import Client, message
from chaos.in_place_of_ingress import hand_over
from chaos.pod import Pod
from kmq.links.fifo import Sender
from kmq.probe import LIVE_S

NAMES = 10_000
_WATCH_S = 0.05


def fill_names(pod: Pod, names: int = NAMES) -> None:
    """So many producers store a message each; again where they have done so before."""
    line = message(1) + b"\n"
    hand_over(pod, ((Sender(b"1.%d" % n, b"p=filler-%d" % n), line, 1) for n in range(names)))
    pod.wait(lambda: (row := pod.row("framer")) and row.producers == names, "as many names as there may be")


@contextmanager
def longest_silence(pod: Pod, *names: str) -> Iterator[dict[str, float]]:
    """The longest time that each of these stages goes without a heartbeat meanwhile."""
    longest = dict.fromkeys(names, 0.0)

    def watch() -> None:
        for name in names:
            row = pod.row(name)
            longest[name] = max(longest[name], row.age_s if row is not None and row.heartbeat else 0.0)

    with meanwhile(watch, every_s=_WATCH_S):
        yield longest


def unknown_name(pod: Pod, lines: int = 9_000, others: Iterable[str] = ("producer=filler-0", "window=other")) -> None:
    """With a full table of names, so many short lines of one that is not in it: each is refused, and nobody else waits.

    What is measured is whether the kubelet would kill the framer, which then meets the same bytes again.
    """
    fill_names(pod)
    with longest_silence(pod, "framer") as longest, Client(pod, "producer=stranger") as stranger:
        stranger.sock.sendall(b"test||1|\n" * lines)
        for hello in others:
            with Client(pod, hello) as other:
                assert other.send(message(2))[0].split()[0] in ("ack", "dup")
        refused = [stranger.replies.readline().split()[:3] for _ in range(lines)]
        assert refused == [[b"!err", b"%d" % n, b"producers_full"] for n in range(1, lines + 1)]
    assert longest["framer"] < LIVE_S, longest
    row = pod.row("framer")
    assert row is not None and row.producers == NAMES


def attack(pod: Pod) -> None:
    """All of them, at full size."""
    unknown_name(pod, lines=100_000)
