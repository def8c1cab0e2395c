"""/api/admin/topics: the topics, over HTTP. kmq/gateway/core/topics.py does the work."""

from typing import Any

from aiohttp import web

from kmq.gateway.core.broker import bad_field
from kmq.gateway.core.core import Core
from kmq.gateway.core.topics import OPTIONS, TopicState
from kmq.gateway.http.request import Bodies, Call, parse_json
from kmq.gateway.http.schema import SCHEMAS, check


class Topics:
    """The handlers, by the names of their operations."""

    def __init__(self, core: Core, bodies: Bodies) -> None:
        self._topics, self._bodies = core.topics, bodies
        self.handlers = {
            "createTopic": self.create,
            "listTopics": self.list_all,
            "describeTopic": self.describe,
            "changeTopic": self.change,
            "deleteTopic": self.delete,
        }

    async def create(self, call: Call) -> web.Response:
        body = await self._read(call, "NewTopic")
        if body.get("replicationFactor", 1) != 1:
            raise bad_field("replicationFactor", "must be 1, because one broker keeps one copy of each message")
        topic, is_made = await self._topics.create(
            body["name"], body.get("partitions", 1), _options(body), body.get("partitioner")
        )
        return await self._described(topic, 201 if is_made else 200)

    async def list_all(self, call: Call) -> web.Response:
        found = await self._topics.all(call.query["internal"])
        return web.json_response([_summary(topic) | {"partitions": topic.partitions} for topic in found])

    async def describe(self, call: Call) -> web.Response:
        return await self._described(await self._topics.describe(call.path["topic"]))

    async def change(self, call: Call) -> web.Response:
        body = await self._read(call, "TopicChanges")
        topic = await self._topics.change(
            call.path["topic"], _options(body), body.get("partitions"), body.get("force", False)
        )
        return await self._described(topic)

    async def delete(self, call: Call) -> web.Response:
        await self._topics.delete(call.path["topic"])
        return web.Response(status=204)

    async def _read(self, call: Call, schema: str) -> dict[str, Any]:
        async with self._bodies.read(call.request) as text:
            body: dict[str, Any] = await self._bodies.parse(text, parse_json)
        check(SCHEMAS[schema], body)
        return body

    async def _described(self, topic: TopicState, status: int = 200) -> web.Response:
        sizes = [
            {
                "partition": size.partition,
                "startOffset": size.first_offset,
                "endOffset": size.end_offset,
                "bytes": size.nbytes,
                "segments": size.segments,
            }
            for size in await self._topics.sizes(topic)
        ]
        return web.json_response(_summary(topic) | {"partitions": sizes}, status=status)


def _options(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name in OPTIONS}


def _summary(topic: TopicState) -> dict[str, Any]:
    fixed = {"name": topic.name, "fromSeq": topic.from_seq, "replicationFactor": 1}
    return fixed | {"partitioner": topic.partitioner} | topic.options
