"""Which gRPC calls give way, and which do not."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from kmq.broker.stats import Incidents, Strangers
from kmq.config.settings import load
from kmq.gateway.core import answers
from kmq.gateway.core.answers import Budget
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.grpc import calls
from kmq.gateway.grpc.calls import Calls, GrpcCall

PATIENCE_S = 100.0


def within(coroutine):
    async def run():
        async with asyncio.timeout(PATIENCE_S):
            await coroutine

    asyncio.run(run())


async def started(budget, nbytes, waits=True):
    """(call, its task): it holds so many bytes, and waits for its client where it is said so."""
    ready = asyncio.get_running_loop().create_future()

    async def run():
        call = GrpcCall()
        try:
            await budget.reserve(call, nbytes)
            call.since = time.monotonic() if waits else 0.0
            ready.set_result(call)
            await asyncio.Event().wait()
        finally:
            call.close()

    task = asyncio.create_task(run())
    return await ready, task


def test_the_call_that_has_waited_for_its_client_for_longest_gives_way():
    async def run():
        budget = Budget(100, 0.0)
        (first, first_task), (second, second_task) = await started(budget, 60), await started(budget, 40)
        third, third_task = await started(budget, 50)
        await asyncio.wait([first_task])
        assert first.why_ended and not second.why_ended and not third.why_ended
        assert budget.used == 90
        for task in (second_task, third_task):
            task.cancel()
        await asyncio.wait([second_task, third_task])
        assert budget.used == 0

    within(run())


def test_a_call_that_waits_for_us_does_not_give_way(monkeypatch):
    monkeypatch.setattr(answers, "_LONGEST_WAIT_S", 0.0)

    async def run():
        budget = Budget(100, 0.0)
        first, task = await started(budget, 60, waits=False)
        with pytest.raises(RequestRefused) as refused:
            await budget.reserve(GrpcCall(), 50)
        assert refused.value.code == "too_many" and not first.why_ended
        task.cancel()
        await asyncio.wait([task])
        await budget.reserve(GrpcCall(), 50)
        assert budget.used == 50

    within(run())


def test_one_call_may_hold_more_than_there_is_where_it_is_alone():
    async def run():
        budget, call = Budget(100, 0.0), GrpcCall()
        await budget.reserve(call, 500)
        await budget.reserve(call, 300)
        assert budget.used == 300

    within(run())


def test_a_call_whose_request_is_read_does_not_give_way_to_another_request(monkeypatch):
    monkeypatch.setattr(answers, "_LONGEST_WAIT_S", 0.0)

    async def run():
        strangers = Strangers(SimpleNamespace(), Incidents(lambda *_, **__: None))
        made, read = Calls(load({}, "/nonexistent.toml"), strangers), asyncio.get_running_loop().create_future()
        read.set_result(b"a request")
        call, other = GrpcCall(), GrpcCall()
        await made.read(call, SimpleNamespace(read=lambda: read))
        call.since = time.monotonic() - PATIENCE_S  # its client does not read the response
        await made.receiving.reserve(other, made.receiving.most)
        with pytest.raises(RequestRefused):
            await made.receiving.reserve(GrpcCall(), 1)
        assert not call.why_ended

    within(run())


def test_a_call_that_is_late_ends_with_its_connection_and_a_patient_one_does_not():
    async def run():
        row = SimpleNamespace(cut_off=0, turned_away=0)
        settings = load({"KMQ_LINE_DEADLINE": "1s"}, "/nonexistent.toml")
        all_calls = Calls(settings, Strangers(row, Incidents(print)))
        closed, relays = [], {}
        for name in ("late", "patient"):
            relay = SimpleNamespace(calls=set(), force_close=lambda name=name: closed.append(name), idle_since=0.0)
            relays[name] = relay
        all_calls.fronts.append(SimpleNamespace(find=relays.get))

        async def serve(name):
            async with all_calls.begin(SimpleNamespace(peer=lambda: name)) as call:
                call.is_patient, call.since = name == "patient", 1e-9
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(serve(name)) for name in relays]
        while not all(relay.calls for relay in relays.values()):
            await asyncio.sleep(0)
        all_calls.sweep()
        await asyncio.wait(tasks[:1])
        assert closed == ["late"] and row.cut_off == 1 and not tasks[1].done()
        assert not relays["late"].calls and relays["patient"].calls
        tasks[1].cancel()
        await asyncio.wait(tasks)

    within(run())


class Served:
    """Bystanders in service, each on a connection of its own; `closed`: whose connections were closed."""

    def __init__(self):
        row = SimpleNamespace(cut_off=0, turned_away=0)
        self.all = Calls(load({}, "/nonexistent.toml"), Strangers(row, Incidents(print)))
        self.closed, self.refused, self.relays = [], [], {}
        self.all.fronts.append(SimpleNamespace(find=self.relays.get))
        self.calls, self.tasks, self.reads = {}, {}, {}

    async def begin(self, name, reads=True):
        """A bystander that gets a response, which its client reads at once or when `reads[name]` is set."""
        self.reads[name] = asyncio.Event()
        if reads:
            self.reads[name].set()
        self.relays[name] = SimpleNamespace(calls=set(), force_close=lambda: self.closed.append(name), idle_since=0.0)
        self.tasks[name] = asyncio.create_task(self._serve(name))
        while name not in self.calls or (reads and self.calls[name].since):
            await asyncio.sleep(0)

    async def _serve(self, name):
        async def abort(_code, text, _trailers):
            self.refused.append(name)
            raise RuntimeError(text)

        context = SimpleNamespace(peer=lambda: name, abort=abort, write=lambda _: self.reads[name].wait())
        async with self.all.begin(context) as call:
            self.all.stand_by(call)
            self.calls[name] = call
            await self.all.write(call, context, b"")
            await asyncio.Event().wait()

    async def end(self):
        for task in self.tasks.values():
            task.cancel()
        await asyncio.wait(self.tasks.values())


def test_an_evicted_bystander_ends_with_a_status_when_its_client_has_read(monkeypatch):
    monkeypatch.setattr(calls, "_BYSTANDERS", 1)

    async def run():
        served = Served()
        await served.begin("reads later", reads=False)
        await served.begin("reads")
        assert not served.refused
        served.reads["reads later"].set()
        await asyncio.wait([served.tasks["reads later"]])
        await served.begin("newest")
        await asyncio.wait([served.tasks["reads"]])
        assert served.refused == ["reads later", "reads"] and not served.closed
        await served.end()

    within(run())


def test_evicted_bystanders_that_do_not_read_are_closed_when_many_or_late(monkeypatch):
    monkeypatch.setattr(calls, "_BYSTANDERS", 1)
    monkeypatch.setattr(calls, "_LEAVING", 2)

    async def run():
        served = Served()
        for number in range(4):
            await served.begin(number, reads=False)
        assert served.closed == [0] and not served.tasks[1].done()
        served.all.sweep()
        assert served.closed == [0]
        served.calls[2].since -= 1.0
        served.all.sweep()
        assert served.closed == [0, 2] and not served.refused
        await served.end()

    within(run())
