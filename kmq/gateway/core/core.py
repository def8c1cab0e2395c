"""The core of the gateway, shared by all doors. One for the whole process."""

from collections.abc import Callable

from kmq.broker.admission import Admission
from kmq.broker.stats import StatsPage, Strangers
from kmq.config.settings import Settings
from kmq.gateway.core.answers import ANSWER_BYTES, Budget
from kmq.gateway.core.broker import Broker
from kmq.gateway.core.cold import ColdReads
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.fetching import Fetching, Waking
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.core.producing import Producing
from kmq.gateway.core.topics import TopicAdmin
from kmq.logfmt import Logger


class Core:
    """The broker's state, its topics, producing and fetching."""

    def __init__(
        self,
        settings: Settings,
        page: StatsPage,
        log: Logger,
        strangers: Strangers | None = None,
        is_unsure: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings, self.log = settings, log
        self.strangers = strangers
        self.broker = Broker(settings, page)
        self.watermark = Watermark(page)
        self.waking = Waking(self.watermark)
        self.partitions = Partitions(settings.data, is_unsure)
        self.topics = TopicAdmin(self.broker)
        self.producing = Producing(settings, self.watermark, log)
        self.answers = Budget(ANSWER_BYTES, strangers=strangers)
        self._admission = Admission(settings, lambda: page.rows["durability"].bytes) if settings.tier else None
        tier = settings.tier, max(settings.tier_cache, 4 * settings.tier_object)
        self.cold = ColdReads(settings.data, self.waking.wake, *tier, log, self._lacks_room)
        self.fetching = Fetching(settings.data, page, self.partitions, self.waking, self.answers, self.cold)

    def _lacks_room(self) -> bool:
        """Return True as early as segments are deleted for room: what lies in the cache goes too, not after them."""
        return self._admission is not None and self._admission.shortage() > 0

    def stop(self) -> None:
        """End waiting calls; what was accepted still gets its answer."""
        self.watermark.stop()
        self.fetching.stop()

    async def close(self) -> None:
        await self.producing.close()
        self.fetching.close()
        self.cold.close()
        self.waking.close()
