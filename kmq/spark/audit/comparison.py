"""What the comparisons of one task share: the WAL's range, the routing table, and the evidence that they add to."""

from kmq.spark.audit.evidence import Evidence
from kmq.spark.audit.findings import SeqRange
from kmq.spark.audit.reading import LogReader
from kmq.spark.audit.routes import Routes
from kmq.spark.audit.seqs import SeqRanges
from kmq.spark.audit.snapshot import Snapshot
from kmq.spark.audit.tasks import Task
from kmq.spark.source.broker import Broker
from kmq.spark.source.columns import Numbers


class Comparison:
    """The comparison of one task: the WAL's seqs low…high-1 with the offsets of all queues that belong to them."""

    def __init__(self, broker: Broker, snapshot: Snapshot, task: Task, evidence: Evidence) -> None:
        self.snapshot, self.task, self.evidence = snapshot, task, evidence
        self.low, self.high = task.low, task.high  # `low` grows if retention removes records during the audit
        self.reader = LogReader(broker, evidence)
        self.routes = Routes(snapshot)
        self.dropped = SeqRanges(snapshot.dropped["durable"])
        self.unreadable: list[SeqRange] = []  # of the WAL

    def is_inside(self, seqs: Numbers) -> Numbers:
        """Return for each seq whether the task covers it."""
        inside: Numbers = (seqs >= self.low) & (seqs < self.high)
        return inside
