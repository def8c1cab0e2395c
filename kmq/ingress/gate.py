"""Whether messages are accepted now: ingress measures disk and quota itself, and reads what durability waits for."""

from kmq.broker.admission import Admission
from kmq.broker.stage import Stage
from kmq.broker.stats import ADMISSIONS
from kmq.wire import refusals


class Gate:
    """The refusal that holds for all producers; b"" while messages are accepted."""

    def __init__(self, stage: Stage) -> None:
        self.refusal = b""  # code and reason
        self._row, self._log = stage.row, stage.log
        durability = self._durability = stage.page.rows["durability"]
        self._admission = Admission(stage.settings, lambda: durability.bytes)

    def publish(self) -> None:
        """Write the sizes that the last looks found into the stats page."""
        admission, row = self._admission, self._row
        disk = admission.disk
        if disk is not None:
            row.disk_free, row.disk_size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
            row.inodes_free, row.inodes_total = disk.f_favail, disk.f_files
        row.quota_used, row.quota_limit = admission.used, admission.quota

    def look(self) -> bool:
        """Look again, and return True if the refusal has changed."""
        code = self._admission.refusal() or self._durability.admission_name
        refusal = refusals.reason(code).encode() if code else b""
        if refusal == self.refusal:
            return False
        self.refusal = refusal
        self._row.admission = ADMISSIONS.index(code)
        if code:
            self._log.warn("refusing", reason=code, effect="acknowledged producers are told, others wait")
        else:
            self._log.info("accepting_resumed")
        return True
