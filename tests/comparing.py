"""What a comparison of replicas finds."""

import asyncio
from collections.abc import Mapping

from kmq.replica.compare import Ask, Compared, ReplicaComparison, directories

PATIENCE_S = 60.0


async def run(sides: Mapping[str, Ask]) -> tuple[dict[str, Compared], dict[str, Exception]]:
    """Return what was compared, by log, and which sides were lost."""
    comparison = ReplicaComparison(sides)
    async with asyncio.timeout(PATIENCE_S):
        return {each.log: each async for each in comparison.logs()}, comparison.lost


def compared(*paths: object) -> dict[str, Compared]:
    """Compare directories, of which none may be lost."""
    found, lost = asyncio.run(run(directories([*map(str, paths)])))
    assert not lost, lost
    return found
