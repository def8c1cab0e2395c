"""The size of the measurements."""


class Scale:
    """The size of every measurement: full, or --quick."""

    def __init__(self, quick: bool) -> None:
        self.bursts = 3 if quick else 10
        self.sustained_s = 3.0 if quick else 20.0
        self.latency_s = 2.0 if quick else 10.0
        self.rounds = 2 if quick else 4  # of the plain and the acknowledged paths in turns
        self.acked_s = 1.0 if quick else 4.0
        self.peer_s = 1.5 if quick else 10.0
        self.idle_s = 3.0 if quick else 10.0
        self.records = 500_000 if quick else 10_000_000
        self.topics = 500 if quick else 10_000
        self.starts = 3 if quick else 5  # the median of them counts
        self.load_s = 1.0 if quick else 5.0  # of full load before everything is killed
