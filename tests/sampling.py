"""A part of what takes long in a run of `make test` or `make unit`, another part with the next commit, all in `make soak`.

    @pytest.mark.sampled(5)                    5 of the 14 cases of this test
    @pytest.mark.sampled(0.5)                  half of them; of a test without cases: it is in every second run
    @pytest.mark.sampled(2, group="trials")    2 of all the cases of this file that name this group
    SAMPLE_SEED=4f2a… pytest tests/…           what a run with this seed had; without SAMPLE_SEED, all

Both take the commit as their seed, so that lanes and the second look at what failed choose the same, and print it.
"""

import os
import random
from collections import defaultdict

import pytest

_SEED = os.environ.get("SAMPLE_SEED", "")


def pytest_report_header() -> str:
    return f"sampled cases: SAMPLE_SEED={_SEED}" if _SEED else "sampled cases: all"


@pytest.hookimpl(trylast=True)  # what `-m` leaves out is out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _SEED:
        return
    groups: dict[tuple[str, str], list[tuple[pytest.Item, float]]] = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            group = marker.kwargs.get("group", getattr(item, "originalname", item.name))
            groups[str(item.path), group].append((item, *marker.args))
    left_out: set[pytest.Item] = set()
    for (_, group), found in groups.items():
        chance = random.Random(f"{_SEED} {group}")
        wanted = found[0][1] if found[0][1] >= 1 else found[0][1] * len(found)
        count = int(wanted) + (chance.random() < wanted % 1)
        left_out |= {item for item, _ in chance.sample(found, max(0, len(found) - count))}
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
