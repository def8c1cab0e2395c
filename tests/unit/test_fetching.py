"""Reading several partitions in one call, as members of groups over HTTP do: what was read is given out, or read again."""

import asyncio

import pytest
from log_server import up
from made_data import write_data

from kmq.broker.stats import STATES
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.fetching import Cursor, Fetching, Limit, Waking
from kmq.gateway.core.partitions import Partitions

ALL = Limit(1000, 1 << 20, 0.0)


def test_a_partition_that_is_refused_does_not_cost_what_was_read_of_another(tmp_path):
    """A cursor behind the end is refused while the router recovers; the one in front of it has moved by then."""
    data = write_data(tmp_path, [b"t|1|1|a", b"u|1|1|b"], {"t": 1, "u": 1})
    with up(data, synced=2) as found:
        found.page.rows["router"].state = STATES.index("recovering")

        async def scenario():
            partitions, waking = Partitions(data), Waking(Watermark(found.page))
            fetching = Fetching(data, found.page, partitions, waking)
            good, bad = Cursor(partitions.open("t", 0), 0), Cursor(partitions.open("u", 0), 9)
            count, values = await fetching.read([good, bad], ALL, lambda messages: [each.value for each in messages])
            assert (count, values, good.offset) == (1, [b"a"], 1)
            with pytest.raises(RequestRefused, match="router is down or recovers"):
                await fetching.read([good, bad], ALL, len)
            fetching.close()
            waking.close()

        asyncio.run(scenario())
