"""The Broadcast Queue under everything that may go wrong: its real code, step by step, on a simulated Consul.

`bq_explorer` decides what happens, `bq_ghost` says what must hold. `bq_mutants` takes one guard out at a time, and the
story of that guard must notice; the random walks look for what nobody has thought of.
"""

import random
from functools import partial

import bq_stories
import bq_stories_of_subscribers
import pytest
from bq_code import load
from bq_explorer import Bounds, Walk, every_schedule, walk
from bq_mutants import MUTANTS, breaks, find
from bq_stage import tell
from bq_world import World

STORIES = [
    story
    for module in (bq_stories, bq_stories_of_subscribers)
    for name, story in vars(module).items()
    if getattr(story, "__module__", "") == module.__name__ and not name.startswith("_")
]

EASY = {
    "the epoch is set, whatever it was",
    "a state key is set, whatever it was",
    "who marks need not hold the lock",
    "who deletes need not hold the lock",
    "what was processed is handed out again",
    "an outcome that is unknown is taken for a refusal",
    "the quickest broker decides what is deleted",
}


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_every_promise_of_the_queue_holds_on_random_walks(first):
    published = sum(len(walk(load(), Walk(seed)).ghost.links) for seed in range(first, first + 20))
    assert published > 200, "the walks lead nowhere"


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 21_000, 500))
def test_every_promise_of_the_queue_holds_on_thousands_of_walks(first):
    for seed in range(first, first + 500):
        walk(load(), Walk(seed, steps=1000))


def small_world(holds):
    """Two publishers with two messages each, and one subscriber."""
    world = World(load(), random.Random(0), mistakes=False, holds=holds)
    del world.ghost.brokers["b2"]
    world.publisher("p1", 2)
    world.publisher("p2", 2)
    world.subscriber("b1-1", "b1")
    return world


@pytest.mark.parametrize(("holds", "schedules"), [(True, 50), (False, 30)], ids=["held", "each-txn"])
@pytest.mark.parametrize("bounds", [Bounds(switches=1, faults=0), Bounds(switches=0, faults=1)], ids=str)
def test_every_schedule_with_a_switch_or_a_fault_keeps_every_promise(bounds, holds, schedules):
    assert every_schedule(partial(small_world, holds), bounds) > schedules


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("holds", [True, False], ids=["held", "each-txn"])
@pytest.mark.parametrize("bounds", [Bounds(2, 0), Bounds(1, 1), Bounds(2, 1)], ids=str)
def test_every_schedule_within_wider_bounds_keeps_every_promise(bounds, holds):
    assert every_schedule(partial(small_world, holds), bounds) > 1000


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_every_promise_holds_in_the_story_of(story):
    tell(story, load())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_story_finds_a_queue_without_one_of_its_guards(mutant):
    assert breaks(mutant)


def test_each_story_is_that_of_a_guard():
    assert {story.__name__ for story in STORIES} == {mutant.story.__name__ for mutant in MUTANTS}


def test_a_mutant_that_the_code_has_outgrown_is_refused():
    with pytest.raises(ValueError, match="the mutant must follow the code"):
        load([("publisher", "no such line", "")])


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.name in EASY], ids=lambda mutant: mutant.name)
def test_random_walks_find_what_needs_no_story(mutant):
    assert find(mutant, 30) is not None


def test_what_is_easy_to_find_is_a_mutant():
    assert {mutant.name for mutant in MUTANTS} >= EASY


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_forty_walks_find_many_of_the_guards_by_themselves():
    assert sum(find(mutant, 40) is not None for mutant in MUTANTS) > 25
