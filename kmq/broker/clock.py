"""A clock that does not jump. Everything that is deleted or forgotten by age takes its age from this clock.

Invariant   A time of day is never trusted if it has just jumped by more than JUMP_S, or if at a start it is more than
            GAP_S after the last record. Until it has been steady for STEADY_S, or an operator confirms it, time
            continues evenly from the last trusted time. So a clock that was ahead for some seconds deletes nothing, and
            a machine that starts with a wrong date forgets no message id before its time.
State       The row of the stats page holds three times: the offset of the trusted time of day from the monotonic clock,
            since when the present time of day is not trusted, and when an operator last confirmed it. `kmq status`
            reads it there, and so does a restarted process.
Not covered Changes of less than JUMP_S at once. Limits by size, and a full disk, do not depend on age.
"""

import time

from kmq.broker.stats import Row

TYPE_CHECKING = False  # the probe, which judges clocks too, writes no log
if TYPE_CHECKING:
    from kmq.logfmt import Logger

JUMP_S, GAP_S, STEADY_S = 60, 86_400, 600
_BEHIND_S = 1.0  # a clock that is slewed, or corrected by a little, is behind by at most this much
_NS = 1_000_000_000
_ZERO = 1 << 62  # added to each offset in the page: there 0 means no offset, and a lost date makes an offset negative
ADVICE = "if the time of day is right now: kmq clock --trust"


class AgeClock:
    """The trusted time of one process."""

    def __init__(self, row: Row, last_record_us: int, log: "Logger") -> None:
        """`last_record_us`: recv_ts of the last record on disk in µs; 0: no record."""
        self._row, self._log = row, log
        now, mono = time.time_ns(), time.monotonic_ns()
        self._seen = now - mono  # offset of the present time of day while it is not trusted
        if row.clock_offset:
            return  # the offset of the predecessor stays in force
        is_gap = last_record_us > 0 and now > last_record_us * 1000 + GAP_S * _NS
        row.clock_offset = (last_record_us * 1000 if is_gap else now) - mono + _ZERO
        if is_gap:
            self._distrust(mono)

    def now_s(self) -> float:
        """Return seconds since the epoch. Ask at least every few seconds: a slow drift in between looks like a jump."""
        row, mono = self._row, time.monotonic_ns()
        offset = time.time_ns() - mono
        if row.clock_suspect:
            if abs(offset - self._seen) > JUMP_S * _NS:
                self._seen, row.clock_suspect = offset, mono
            elif mono - row.clock_suspect >= STEADY_S * _NS or row.clock_trust >= row.clock_suspect:
                self._log.info("clock_trusted", off_by_s=off_by_s(row))
                row.clock_suspect = 0
        elif abs(offset + _ZERO - row.clock_offset) > JUMP_S * _NS:
            self._seen = offset
            self._distrust(mono)
        if not row.clock_suspect:
            row.clock_offset = offset + _ZERO
        return (mono + row.clock_offset - _ZERO) / _NS

    def _distrust(self, mono: int) -> None:
        self._row.clock_suspect = mono
        effect = f"nothing is deleted or forgotten by age until it has been steady for {STEADY_S // 60} min; {ADVICE}"
        self._log.warn("clock_not_trusted", off_by_s=off_by_s(self._row), effect=effect)


class HeldTimes:
    """Logs once that recv_ts stands still because the time of day is behind it, and once that it rises again."""

    def __init__(self, row: Row, log: "Logger") -> None:
        self._row, self._log, self._is_held = row, log, False

    def look(self, last_us: int) -> None:
        """`last_us`: recv_ts of the last record, in µs. Call about once a second, not for each record."""
        behind_s = (last_us * 1000 - time.time_ns()) / _NS
        self._row.clock_behind = max(0, round(behind_s))
        if not self._is_held and behind_s > _BEHIND_S:
            effect = f"recv_ts stays at {last_us / 1_000_000:.6f} until the clock has caught up"
            self._log.warn("clock_behind", behind_s=round(behind_s), effect=effect)
            self._is_held = True
        elif self._is_held and behind_s <= 0:
            self._log.info("clock_caught_up", effect="recv_ts is the time of day again")
            self._is_held = False


def suspicion(row: Row) -> str:
    """Return why the time of day is not trusted, and how long that will last."""
    off = off_by_s(row)
    return (
        f"the time of day is {abs(off):,} s {'ahead' if off > 0 else 'behind'} of what it was: nothing is deleted or"
        f" forgotten by age until it has been steady for another {steady_in_s(row)} s"
    )


def off_by_s(row: Row) -> int:
    """Return how far the time of day is ahead of the trusted time; negative: behind."""
    return round((time.time_ns() - time.monotonic_ns() + _ZERO - row.clock_offset) / _NS)


def steady_in_s(row: Row) -> int:
    """Return how many seconds the time of day must still be steady; 0: it is trusted."""
    return max(1, STEADY_S - (time.monotonic_ns() - row.clock_suspect) // _NS) if row.clock_suspect else 0


def trust(row: Row) -> None:
    """Confirm for an operator that the time of day is right."""
    row.clock_trust = time.monotonic_ns()
