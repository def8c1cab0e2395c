"""The topics that groups know: a second life of a name is told once, whichever moments the looks meet."""

import asyncio
import threading

from fake_logger import FakeLogger

from kmq.gateway.groups.membership import DeclaredTopics

PENDING = None


class Declarations:
    """In place of the partitions: topic → (partitions, from_seq), as the test says."""

    def __init__(self, data) -> None:
        self.data, self.rows = data, {}
        self.before_answering = lambda: None

    def set(self, **rows) -> None:
        self.rows = rows
        for name in rows:
            (self.data / "topics" / name).mkdir(parents=True, exist_ok=True)
            (self.data / "topics" / name / "topic.toml").write_text("partitions = 1\n")

    def declared_of(self, names):
        found = {name: self.rows[name] for name in names if name in self.rows}
        self.before_answering()
        return found

    def first_count(self, topic):
        return self.rows[topic][0]


def known(data):
    declarations, told = Declarations(data), []
    (data / "topics").mkdir()
    topics = DeclaredTopics(str(data), declarations, lambda change: told.append(change), FakeLogger())
    return topics, declarations, told


def test_a_second_life_is_told_also_if_a_look_met_it_before_the_router_did(tmp_path):
    topics, declarations, told = known(tmp_path)
    for since in (5, PENDING, 12):
        declarations.set(orders=(2, since))
        asyncio.run(topics.know(["orders"]))
    assert told[-1][:2] == ({"orders": 2}, ["orders"])
    assert [change.again for change in told].count(["orders"]) == 1


def test_a_look_at_one_topic_does_not_undo_what_a_look_at_all_has_found_meanwhile(tmp_path):
    topics, declarations, told = known(tmp_path)
    declarations.set(orders=(2, 5), tills=(1, 1))
    asyncio.run(topics.follow())

    async def both():
        is_looking, may_go_on = threading.Event(), threading.Event()
        declarations.before_answering = lambda: (is_looking.set(), may_go_on.wait(30))
        one = asyncio.create_task(topics.know(["tills"]))
        await asyncio.to_thread(is_looking.wait, 30)
        declarations.before_answering = lambda: None
        declarations.set(orders=(2, 12), tills=(1, 1))
        await topics.know(["orders"])
        may_go_on.set()
        await one

    asyncio.run(both())
    assert [change.again for change in told] == [[], ["orders"]]


def test_what_came_since_the_last_look_is_told_with_what_was_there_before(tmp_path):
    topics, declarations, told = known(tmp_path)
    for rows in ({"orders": (2, 5)}, {"orders": (4, 5)}, {"orders": (4, 9), "tills": (1, 10)}):
        declarations.set(**rows)
        asyncio.run(topics.follow())
        topics._at = 0.0
    assert [change.young for change in told] == [{}, {"orders": 2}, {"orders": 0, "tills": 0}]
