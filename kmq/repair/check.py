"""`kmq verify`: check, heal if asked to, print the findings, and return the exit code."""

import json
from collections.abc import Callable

from kmq.errors import EXIT_CORRUPT, EXIT_FAILED, EXIT_OK, ConfigError
from kmq.files import QUARANTINE
from kmq.links.ownership import FileLock, describe
from kmq.log import identity, topics
from kmq.repair import rebuild, verify


class Checked:
    """What a check has left: how many places are damaged, and whether it has looked at everything."""

    __slots__ = ("code", "damage", "is_complete")

    def __init__(self, code: int, damage: int, is_complete: bool) -> None:
        self.code, self.damage, self.is_complete = code, damage, is_complete


def run(
    data: str, only: list[str], heal: bool, as_json: bool, progress: Callable[[int], None], ring_bytes: int
) -> Checked:
    """Check everything, or only some topics. The code is 0 if all is good, 1 if not, 65 if something cannot be healed."""
    unknown = set(only) - {"append", *topics.names(data)}
    if unknown:
        raise ConfigError(f"unknown topic {', '.join(sorted(unknown))}; kmq topics list shows all topics")
    if heal and only:
        raise ConfigError("--repair: takes no topics, because it heals each copy from the other; leave them out")
    if identity.is_unknown(data):  # by other rules good records are damage, and a repair would lead them elsewhere
        text, what = identity.read(data, "format"), "repair" if heal else "check"
        raise ConfigError(f"{data}/format: {text!r} is of another release; {what} it with that release")
    if heal:
        return _heal(data, as_json, progress, ring_bytes)
    damage = _look(data, only, as_json, progress, ring_bytes)
    return Checked(EXIT_FAILED if damage else EXIT_OK, damage, not only)


def _look(data: str, only: list[str], as_json: bool, progress: Callable[[int], None], ring_bytes: int) -> int:
    """Print the findings; return how many are damage."""
    is_live = any(FileLock(f"{data}/{name}/.owner").is_held() for name in ("append", "topics"))
    count = 0
    for finding in verify.Verifier(data, is_live, progress, ring_bytes).findings(only):
        count += finding.is_damage
        text = f"{'damage' if finding.is_damage else 'note'}: {finding}"
        print(json.dumps(finding._asdict()) if as_json else text, flush=True)
    if not as_json:
        print(f"{count} damaged places; kmq verify --repair heals them" if count else "no damage")
    return count


def _heal(data: str, as_json: bool, progress: Callable[[int], None], ring_bytes: int) -> Checked:
    locks = [(name, FileLock(f"{data}/{name}/.owner")) for name in ("append", "topics")]
    for name, lock in locks:
        lock.acquire(f"{data}/{name}: the broker must be down for a repair; it", describe("repair", data))
    try:
        done = rebuild.Repair(data, progress, ring_bytes).run()
        found = verify.Verifier(data, False, progress, ring_bytes).findings()
        left = [finding for finding in found if finding.is_damage]
    finally:
        for _, lock in locks:
            lock.release()
    for healed in done:
        seqs = "".join(f"; lost: seq {first} to {last}" for first, last in healed.lost)
        seqs += "".join(
            f"; not confirmed by a second copy: seq {first} to {last}" for first, last in healed.unwitnessed
        )
        where = f", kept in {QUARANTINE}/" if healed.lost else ""
        print(json.dumps(healed._asdict()) if as_json else f"{healed.path}: {healed.what}{seqs}{where}")
    for finding in left:
        print(json.dumps(finding._asdict()) if as_json else f"still damaged: {finding}")
    if not as_json:
        print(f"{len(done)} file{'s' if len(done) != 1 else ''} healed" if done else "nothing to heal")
    is_lost = left or any(healed.lost for healed in done)
    return Checked(EXIT_CORRUPT if is_lost else EXIT_OK, len(left), is_complete=True)
