"""`kmq verify`: looks, heals where it is told to, says what it found, and gives the exit code."""

import json
from collections.abc import Callable

from kmq.errors import EXIT_CORRUPT, EXIT_FAILED, EXIT_OK, ConfigError
from kmq.links.ownership import FileLock, describe
from kmq.log import topics
from kmq.log.disk import QUARANTINE
from kmq.repair import rebuild, verify


def run(data: str, only: list[str], heal: bool, as_json: bool, progress: Callable[[int], None]) -> int:
    """Check everything, or only some topics; 0 where all is good, 1 where it is not, 65 where it cannot be healed."""
    unknown = set(only) - {"append", *topics.names(data)}
    if unknown:
        raise ConfigError(f"no topic {', '.join(sorted(unknown))}; kmq topics list shows those that exist")
    if heal:
        if only:
            raise ConfigError("--repair heals everything: each copy from the other")
        return _heal(data, as_json, progress)
    return EXIT_FAILED if _look(data, only, as_json, progress) else EXIT_OK


def _look(data: str, only: list[str], as_json: bool, progress: Callable[[int], None]) -> int:
    """Print the findings; how many are damage."""
    is_live = any(FileLock(f"{data}/{name}/.owner").is_held() for name in ("append", "topics"))
    count = 0
    for each in verify.verify(verify.Directory(data, is_live, progress), only):
        count += each.is_damage
        print(
            json.dumps(each._asdict()) if as_json else f"{'damage' if each.is_damage else 'note'}: {each}", flush=True
        )
    if not as_json:
        print(f"{count} damaged places; kmq verify --repair heals them" if count else "no damage")
    return count


def _heal(data: str, as_json: bool, progress: Callable[[int], None]) -> int:
    locks = [(name, FileLock(f"{data}/{name}/.owner")) for name in ("append", "topics")]
    for name, lock in locks:
        lock.acquire(f"{data}/{name}: the broker must be down for a repair; it", describe("repair", data))
    try:
        done = rebuild.Repair(data, progress).run()
        left = [each for each in verify.verify(verify.Directory(data, False, progress), []) if each.is_damage]
    finally:
        for _, lock in locks:
            lock.release()
    for each in done:
        lost = "".join(f"; lost: seq {first} to {last}" for first, last in each.lost)
        lost += "".join(f"; no second witness: seq {first} to {last}" for first, last in each.unwitnessed)
        where = f", kept in {QUARANTINE}/" if each.lost else ""
        print(json.dumps(each._asdict()) if as_json else f"{each.path}: {each.what}{lost}{where}")
    for finding in left:
        print(json.dumps(finding._asdict()) if as_json else f"still damaged: {finding}")
    if not as_json:
        print(f"{len(done)} files healed" if done else "nothing to heal")
    return EXIT_CORRUPT if left or any(each.lost for each in done) else EXIT_OK
