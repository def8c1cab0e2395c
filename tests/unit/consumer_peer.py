"""The other end of the consumer port for tests of a client: partitions in memory, and faults at will.

It answers to the letter of the protocol, and never waits: an empty `!fetch` is answered at once.
"""

import contextlib
import socket
import threading

from kmq.wire import replies, requests
from kmq.wire.requests import TopicPartition

EU, US = TopicPartition("orders", 0), TopicPartition("orders", 1)


def stored(seq: int, payload: bytes) -> bytes:
    return b"%d|1712345678.%06d|orders|1.5|%d|%b\n" % (seq, seq, seq, payload)


class Peer:
    """The broker: what is stored and committed, and who has which partitions."""

    def __init__(self, counts: dict[TopicPartition, int]) -> None:
        self.records = {place: [b"%d" % n for n in range(count)] for place, count in counts.items()}
        self.starts = dict.fromkeys(counts, 0)
        self.committed: dict[TopicPartition, int] = {}
        self.shares: dict[str, list[TopicPartition]] = {}  # member → partitions; others get all
        self.generation = 1
        self.members: list[str] = []  # as they came
        self.asked: list[requests.Request] = []
        self.refuses: dict[str, str] = {}  # request → code and text of the next answer

    def text(self, place: TopicPartition, offset: int) -> bytes:
        payload = self.records[place][offset]
        return b"\n" if payload is None else stored(1 + offset * 10 + place.partition, payload)

    def resolve(self, place: TopicPartition, at: requests.Position) -> int:
        start, end = self.starts[place], len(self.records[place])
        return {"earliest": start, "latest": end}.get(at.kind, min(max(at.value, start), end))


class Session:
    """One connection: bytes in, bytes out. `is_over`: the broker closes it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.is_over = False
        self.next: dict[TopicPartition, int] = {}
        self.member = ""
        self._unfinished = b""
        self._is_open = False
        self._turn = 0
        self._later: dict[TopicPartition, int] | None = None  # the assignment behind a revocation

    def feed(self, data: bytes) -> bytes:
        *whole, self._unfinished = (self._unfinished + data).split(b"\n")
        return b"".join(self._answer(line) for line in whole)

    def rebalance(self, places: list[TopicPartition]) -> bytes:
        """Give this member these partitions instead: what must go is revoked first."""
        self.peer.generation += 1
        self._later = {place: self.next.get(place, self.peer.committed.get(place, 0)) for place in places}
        gone = tuple(place for place in self.next if place not in places)
        return replies.Revoke(gone).encode() if gone else self._assign()

    def _assign(self) -> bytes:
        assert self._later is not None
        self.next, self._later = self._later, None
        return replies.Assigned(self.peer.generation, tuple(self.next.items())).encode()

    def _open(self, line: bytes) -> bytes:
        self._is_open, opening = True, requests.opening(line)
        peer = self.peer
        if isinstance(opening, requests.Consume):
            self.is_over = True
            return b"".join(
                replies.Started(place, peer.resolve(place, opening.first)).encode() for place in peer.records
            )
        if isinstance(opening, requests.Group):
            self.member = opening.member
            peer.members.append(opening.member)
            places = peer.shares.get(opening.member, list(peer.records))
            self._later = {place: peer.committed.get(place, peer.starts[place]) for place in places}
        else:
            self._later = {place: peer.resolve(place, at or requests.EARLIEST) for place, at in opening.partitions}
        return self._assign()

    def _answer(self, line: bytes) -> bytes:
        if not self._is_open:
            return self._open(line)
        request, peer = requests.request(line), self.peer
        peer.asked.append(request)
        name = line.split()[0].decode()[1:]
        if name in peer.refuses:
            return f"!err {name} {peer.refuses.pop(name)}\n".encode()
        if isinstance(request, requests.Fetch):
            return self._fetch(request)
        if isinstance(request, requests.Seek):
            self.next[request.place] = peer.resolve(request.place, request.position)
            return replies.Sought(request.place, self.next[request.place]).encode()
        if isinstance(request, requests.Offsets):
            rows = [
                replies.PartitionOffsets(p, peer.starts[p], len(peer.records[p]), self.next[p], peer.committed.get(p))
                for p in request.partitions or self.next
            ]
            return replies.OffsetsReply(tuple(rows)).encode()
        if isinstance(request, requests.Commit):
            if any(place not in self.next for place, _ in request.offsets):
                return replies.Failed("commit", "fenced", "not yours").encode()
            peer.committed.update(request.offsets)
            return replies.Committed(request.offsets).encode()
        if request == requests.REVOKED:
            return self._assign()
        self.is_over = request == requests.LEAVE
        return b""

    def _fetch(self, fetch: requests.Fetch) -> bytes:
        """A batch of the partition whose turn it is, at least one record, no more bytes than asked for."""
        places = list(fetch.partitions or self.next)
        self._turn += 1
        for n in range(len(places)):
            place = places[(self._turn + n) % len(places)]
            first = max(self.next[place], self.peer.starts[place])
            body, count = b"", 0
            while first + count < len(self.peer.records[place]):
                text = self.peer.text(place, first + count)
                if body and len(body) + len(text) > fetch.max_bytes:
                    break
                body, count = body + text, count + 1
            if count:
                self.next[place] = first + count
                return replies.Batch(place, first, count, len(body)).encode() + body
        return replies.NO_RECORDS.encode()


class Server:
    """A Peer behind a port, for consumers with sockets."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.drops = b""  # requests that begin so get no answer, as at a leader that is cut off
        self.sessions: list[tuple[Session, socket.socket]] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._door.accept()
                self.sessions.append((Session(self.peer), sock))
                thread = threading.Thread(target=self._serve, args=self.sessions[-1], daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, session: Session, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            while not session.is_over and (data := sock.recv(1 << 16)):
                lines = [line for line in data.splitlines(True) if not (self.drops and line.startswith(self.drops))]
                sock.sendall(session.feed(b"".join(lines)))

    def say(self, data: bytes) -> None:
        """Send something on the newest connection."""
        self.sessions[-1][1].sendall(data)

    def cut(self) -> None:
        """Break all connections."""
        for _, sock in self.sessions:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
