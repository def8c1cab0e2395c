"""Consumer groups over HTTP: members that consume, commit and beat by requests, and administration of groups.

    GET /api/topics/orders/consume?group=etl    → {"messages": […], "generation": 1, "assignment": […]}

Without `member=` all callers of a group are one member. A member beats by consuming.

Lost        An answer that breaks off, or that the client does not read within KMQ_LINE_DEADLINE, counts as not given:
            the member's next call begins with the same messages. If it is not known whether an answer has arrived
            (exchange.py), the next call continues after it. If a commit passes its messages, they are delivered again
            (polling.py). Messages that were not committed are delivered again when the member's session has ended.
"""

import json
import time
from typing import Any, NamedTuple

from aiohttp import web

from kmq.gateway.core.broker import RequestRefused, bad_field
from kmq.gateway.core.cold import refusal
from kmq.gateway.core.core import Core
from kmq.gateway.core.fetching import Cursor, Limit
from kmq.gateway.groups.admin import GroupAdmin
from kmq.gateway.groups.deliveries import Answer
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetCommit
from kmq.gateway.groups.polling import Move, Poller, Pollers
from kmq.gateway.groups.protocol import SHARED, Client, GroupView, MemberOptions
from kmq.gateway.groups.redelivery import DueMessage, Redelivery
from kmq.gateway.http.console import where_to
from kmq.gateway.http.exchange import exchange, time_limit
from kmq.gateway.http.messages import response
from kmq.gateway.http.request import Bodies, HttpCall
from kmq.gateway.http.schema import read_body
from kmq.message.message import Message
from kmq.wire.requests import TopicPartition

_BEAT_S = 2.0  # between two signs of life of a call that waits; a third of the shortest session
_ALONE = ("partition", "offset", "timestamp", "from")  # parameters of a call without a group


class _Batch(NamedTuple):
    """The messages for a member, and by how much its cursors moved. `again`: redelivered ones."""

    moves: list[Move]
    again: list[DueMessage]
    new: dict[tuple[str, int], list[int]]


class GroupCalls:
    """The handlers."""

    def __init__(self, core: Core, groups: Groups, bodies: Bodies) -> None:
        self._groups, self._fetching, self._bodies = groups, core.fetching, bodies
        self._topics, self._deadline_s = core.topics, core.settings.line_deadline
        self._redelivery = Redelivery(groups, core)
        self._pollers = Pollers(groups, core.fetching, self._redelivery)
        self._admin = GroupAdmin(groups, core.partitions, core.fetching)
        self.handlers = {
            "commit": self.commit,
            "nack": self.nack,
            "seek": self.seek,
            "listGroups": self.list_all,
            "describeGroup": self.describe,
            "deleteGroup": self.delete,
            "joinGroup": self.join,
            "heartbeat": self.heartbeat,
            "leaveGroup": self.leave,
        }

    async def close(self) -> None:
        await self._redelivery.close()

    # --- consuming ---------------------------------------------------------------------------------------------------

    async def consume(self, call: HttpCall) -> web.Response:
        """Give a member its next messages of a topic. It joins first if it is not a member."""
        query, topic = call.query, call.path["topic"]
        for name in _ALONE:
            if query[name] is not None:
                raise bad_field(name, "excludes group=, because the group decides on partitions and offsets")
        if not self._topics.exists(topic):
            raise RequestRefused("unknown_topic", f"topic {topic!r}: does not exist; a first message makes it")
        limit = Limit(query["maxMessages"], query["maxBytes"], query["timeoutMs"] / 1000)
        name = query["member"] or SHARED
        client = Client(name, call.request.remote or "")
        with exchange().polling(limit.wait_s):
            while True:
                poller = await self._pollers.member(query["group"], name, client, [topic], lambda options: options)
                try:
                    return await self._poll(call, poller, topic, limit)
                except RequestRefused:
                    if poller.ended in ("", "fenced", "unknown_member"):
                        raise  # otherwise the member's session has ended, and it joins again

    async def _poll(self, call: HttpCall, poller: Poller, topic: str, limit: Limit) -> web.Response:
        deadline = time.monotonic() + limit.wait_s
        await poller.first_assignment(limit.wait_s)
        async with poller.lock:
            await poller.finish_calls()
        current = exchange()
        watcher = current.interrupt
        poller.watchers.add(watcher)
        try:
            with poller.reader.watch(watcher):
                while True:
                    watcher.clear()
                    cursors, given, answer = await self._read(call, poller, topic, limit)
                    if given:
                        await self._send(call, answer, poller, given)
                        return answer
                    if time.monotonic() >= deadline:
                        if cold := next((each.cold for each in cursors if each.cold is not None), None):
                            raise refusal(cold)  # an empty answer would say that there is nothing more
                        break
                    # Look again in time for a message that becomes due, or for a sign of life.
                    due_s = poller.reader.wait_s(poller.reader.cursors.values())
                    until = min(deadline, time.monotonic() + min(_BEAT_S, due_s))
                    await self._fetching.wait(cursors, until, watcher, lambda: current.is_over)
                    if current.is_over or self._fetching.is_stopping:
                        break
                    if watcher.is_set():
                        poller.answer()
        finally:
            poller.watchers.discard(watcher)
        poller.sent([], Answer({}, ()))  # it shows positions
        for cursor in cursors:
            cursor.overtaken = range(0)
        return answer

    async def _read(
        self, call: HttpCall, poller: Poller, topic: str, limit: Limit
    ) -> tuple[list[Cursor], _Batch | None, web.Response]:
        """Return the cursors that may have new messages, the messages to deliver, if any, and the answer."""
        async with poller.lock:
            reader, cursors = poller.reader, {cursor.place: cursor for cursor in await poller.turn(topic)}
            # Before any other wait. What is revoked during a wait is in this answer, and the next call gives it up.
            more = f'"generation":{poller.generation},"assignment":{json.dumps(_places(poller.assigned))}'
            poller.rewind(cursors)
            before = {place: cursor.offset for place, cursor in cursors.items()}
            again, fresh = await reader.turn([*cursors.values()], limit, is_idle=True)
            for each in again:
                cursors[each.place].move(each.position)
            room = limit.messages - len(again), limit.nbytes - sum(each.message.size for each in again)
            wanted = fresh if min(room) > 0 else []
            unread = [cursor for cursor in cursors.values() if cursor not in wanted]

            def shape(found: list[Message]) -> tuple[dict[tuple[str, int], list[int]], web.Response]:
                for cursor in unread:
                    cursor.end = max(cursor.end, cursor.partition.end())
                new: dict[tuple[str, int], list[int]] = {}
                for message in found:
                    new.setdefault((topic, message.partition), []).append(message.offset)
                return new, response(call, found, [*cursors.values()], more, again)

            try:
                _, (new, answer) = await self._fetching.read(wanted, Limit(*room), shape)
                reader.report_overtaken(wanted)
            except RequestRefused as err:
                reader.requeue(again)
                if err.code == "unknown_topic":
                    poller.close(topic)  # the next call reads the topic that has its name now
                raise
            after = {place: cursor.offset for place, cursor in cursors.items()}
            reader.shown(again, after)
            reader.delivered({each: before[at] for at, each in cursors.items() if each.offset > before[at]})
            shown = {each.place for each in again}
            moves = [
                Move(place, cursor, before[place], cursor.offset, cursor.overtaken)
                for place, cursor in cursors.items()
                if cursor.offset > before[place] or place in shown
            ]
        return fresh, _Batch(moves, again, new) if new or again else None, answer

    async def _send(self, call: HttpCall, answer: web.Response, poller: Poller, given: _Batch) -> None:
        """Send an answer with messages. If the client has gone, its member's next call gets them again.

        They count as delivered only when they have arrived. Otherwise a parallel call would commit them unread.
        """
        sent = Answer(given.new, ((each.place, each.message.offset) for each in given.again))
        outcome = poller.sent(given.moves, sent, bool(call.query["autoCommit"]))
        try:
            async with time_limit(self._deadline_s):
                await exchange().send(call.request, answer, outcome)
        except (ConnectionError, TimeoutError):
            outcome(False)
            if call.request.transport is not None:
                call.request.transport.abort()

    # --- members -----------------------------------------------------------------------------------------------------

    async def join(self, call: HttpCall) -> web.Response:
        body = await read_body(self._bodies, call, "JoinGroup")

        def options(default: MemberOptions) -> MemberOptions:
            wanted = default._replace(keeps_topics=False)
            if "assignor" in body:
                wanted = wanted._replace(assignors=(body["assignor"],))
            return wanted._replace(session_s=body["sessionMs"] / 1000) if "sessionMs" in body else wanted

        name = body.get("member")
        client = Client(name or "http", call.request.remote or "")
        poller = await self._pollers.member(call.path["group"], name, client, body["topics"], options)
        await poller.first_assignment(0.0)
        async with poller.lock:
            poller.begin_anew()
            poller.answer()
        return _member(poller)

    async def heartbeat(self, call: HttpCall) -> web.Response:
        body = await read_body(self._bodies, call, "Heartbeat")
        poller = self._pollers.find(call.path["group"], call.path["member"])
        async with poller.lock:
            poller.beat(body["generation"])
        return _member(poller)

    async def leave(self, call: HttpCall) -> web.Response:
        await self._pollers.leave(call.path["group"], call.path["member"])
        return web.Response(status=204)

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def commit(self, call: HttpCall) -> web.Response:
        body, topic = await read_body(self._bodies, call, "Commit"), call.path["topic"]
        rows = {
            (topic, each["partition"]): OffsetCommit(each["offset"], each.get("metadata", ""))
            for each in body["offsets"]
        }
        await self._groups.commit(body["group"], body.get("member", SHARED), rows, body.get("generation"))
        return _offsets({number: row.offset for (_, number), row in rows.items()})

    async def nack(self, call: HttpCall) -> web.Response:
        body, topic = await read_body(self._bodies, call, "Nack"), call.path["topic"]
        group, partition = body["group"], body["partition"]
        place = TopicPartition(topic, partition)
        self._groups.check_redelivery(group, place)
        if "member" in body or "generation" in body:
            await self._groups.check_commit(group, body.get("member", SHARED), body.get("generation"), [place])
        delay_s = body.get("delayMs", 0) / 1000
        given = await self._redelivery.nack(
            group, topic, partition, body["offset"], reason=body.get("reason", ""), delay_s=delay_s
        )
        self._pollers.given_back(group, place)
        row = {"partition": partition, "offset": body["offset"], "deliveries": given.deliveries}
        if given.letter:
            return web.json_response(row | {"notBefore": None, "deadLetter": given.letter.partition("/")[0]})
        return web.json_response(row | {"notBefore": round((time.time() + given.due_s) * 1000), "deadLetter": None})

    async def seek(self, call: HttpCall) -> web.Response:
        body = await read_body(self._bodies, call, "Seek")
        return _offsets(await self._admin.seek(body["group"], call.path["topic"], where_to(body["to"])))

    # --- groups ------------------------------------------------------------------------------------------------------

    async def list_all(self, call: HttpCall) -> web.Response:
        rows = [
            _summary(view) | {"members": len(view.members), "committed": count} for view, count in self._admin.all()
        ]
        return web.json_response(rows)

    async def describe(self, call: HttpCall) -> web.Response:
        view, lags = await self._admin.describe(call.path["group"])
        members = [
            {"id": row.id, "client": row.name, "host": row.host, "assignment": _places(row.partitions)}
            for row in view.members
        ]
        partitions = [
            {
                "topic": row.topic,
                "partition": row.partition,
                "committed": row.committed,
                "end": row.end,
                "lag": row.lag,
                "lagSeconds": round(row.lag_s, 3),
                "nacked": row.nacked,
                "overtaken": row.overtaken,
            }
            for row in lags
        ]
        return web.json_response(_summary(view) | {"members": members, "partitions": partitions})

    async def delete(self, call: HttpCall) -> web.Response:
        await self._admin.delete(call.path["group"])
        return web.Response(status=204)


def _summary(view: GroupView) -> dict[str, Any]:
    return {"group": view.name, "state": view.state.value, "generation": view.generation, "protocol": view.protocol}


def _places(places: Any) -> list[dict[str, Any]]:
    return [{"topic": topic, "partition": number} for topic, number in places]


def _member(poller: Poller) -> web.Response:
    places = _places(poller.assigned)
    return web.json_response({"member": poller.id, "generation": poller.generation, "assignment": places})


def _offsets(offsets: dict[int, int]) -> web.Response:
    rows = [{"partition": number, "offset": offset} for number, offset in sorted(offsets.items())]
    return web.json_response({"offsets": rows})
