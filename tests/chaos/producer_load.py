"""Load from kmq.Producer, and whether everything that it was told is stored."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import kmq
from chaos.load import TOPICS, Load


class ProducerLoad(Load):
    """A kmq.Producer that sends messages and lists of them, until told to stop; `sent` is what it was told about each."""

    def __init__(self, pipes: Path, name: str, seed: int, **options: Any) -> None:
        super().__init__(seed)
        self.prefix, self.count = name, 0
        self.sent: list[tuple[list[bytes], kmq.Delivery]] = []
        port_file = pipes / "ingress.port"
        self.producer = kmq.Producer(
            port=lambda: int(port_file.read_text() or 0), max_in_flight=self.rng.choice([50, 5000]), **options
        )

    def work(self) -> None:
        with self.producer:
            while not self.enough.is_set():
                topic = self.rng.choice(TOPICS).partition(".")[0]
                if self.rng.random() < 0.1:
                    payloads = self._payloads(self.rng.randrange(1, 50))
                    self.sent.append((payloads, self.producer.send_many(topic, payloads)))
                else:
                    payloads = self._payloads(1)
                    self.sent.append((payloads, self.producer.send(topic, payloads[0], key=str(self.count))))
                if self.rng.random() < 0.01:
                    self.sent[-1][1].result()
                    self.rest()

    def _payloads(self, count: int) -> list[bytes]:
        first, self.count = self.count, self.count + count
        filler = b"x" * self.rng.choice([0, 30, 30, 2000])
        return [b"%b-%d %b" % (self.prefix.encode(), n, filler) for n in range(first, self.count)]


def judge(data: Path, loads: list[ProducerLoad]) -> None:
    """Acked is stored where it was said; with a memory behind it once, else at least once. Nothing was given up."""
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    for path in sorted((data / "append").glob("*.log")):
        for line in path.read_bytes().splitlines():
            stored_seq, _, _, _, _, payload = line.split(b"|", 5)
            places[payload].append(int(stored_seq))
    for load in loads:
        assert load.sent, f"{load.prefix} sent nothing"
        lost, elsewhere, twice = list[object](), list[object](), list[object]()
        for payloads, delivery in load.sent:
            assert delivery.done and delivery.error is None, delivery.error
            for payload, seq in zip(payloads, delivery.seqs, strict=True):
                found = places[payload]
                if not found:
                    lost.append((payload, seq))
                elif seq not in found:
                    elsewhere.append((payload, seq, found))
                elif len(found) > 1 and load.prefix != "none":
                    twice.append((payload, found))
        assert not lost, f"{load.prefix}: {len(lost)} acked and not stored: {lost[:3]}"
        assert not elsewhere, f"{load.prefix}: {len(elsewhere)} not where the ack said: {elsewhere[:3]}"
        assert not twice, f"{load.prefix}: {len(twice)} stored twice: {twice[:3]}"
