"""Elections of a shard, its promises and identities: the real code on a simulated Consul, in any order."""

import shutil

import pytest
from shard_mutants import MUTANTS, RECOVERIES, attempt, find, walk
from shard_world import BROKERS, Broken, World, load

from kmq.errors import BusyError

KINDS = ["", "volume", "consul", "emptied"]


@pytest.fixture
def world(tmp_path):
    """A shard that works."""
    world = World(load(), tmp_path, 0)
    world.begin()
    world.heal()
    return world


def lose(world, broker):
    """Kill a process, and let its session end."""
    process = world.running[broker]
    world.kill(broker)
    world.expire(process)
    return process.replica.files.identity.id


def test_three_brokers_elect_promise_and_grow_the_isr(world):
    assert world.register.epoch == 1 and world.running["a"].replica.role == "leading"
    assert [world.running[broker].replica.role for broker in ("b", "c")] == ["following", "following"]


def test_a_lost_leader_is_followed_by_one_of_the_isr(world):
    lost = lose(world, "a")
    world.until("another leader", lambda: world.register.epoch == 2, ["b", "c"])
    assert world.register.leader != lost and lost not in world.register.isr
    world.heal()


def test_with_one_broker_left_the_isr_keeps_min_insync_members(world):
    lost = {lose(world, "a"), lose(world, "b")}
    world.until("another leader", lambda: world.register.epoch == 2, ["c"])
    assert len(world.register.isr) == 2 and len(lost & {*world.register.isr}) == 1


def test_a_leader_that_was_started_anew_hands_its_epoch_over(world):
    world.kill("a")
    world.start("a")
    world.until("another epoch", lambda: world.register.epoch == 2)
    world.until("a shard that works", world.works)


def test_a_broker_that_is_away_leaves_the_isr_and_comes_back(world):
    lost = lose(world, "c")
    world.until("an ISR of two", lambda: len(world.register.isr) == 2, ["a", "b"])
    assert lost not in world.register.isr and world.register.epoch == 1
    world.heal()
    assert lost in world.register.isr


def test_where_consul_is_emptied_all_keep_their_promise_and_their_id(world):
    ids, register = dict(world.ids), world.register
    empty = world.consul.snapshot()
    empty.pairs.clear()
    world.restore_consul(empty)
    world.calm()
    replicas = {broker: process.replica for broker, process in world.running.items()}
    assert {one.problem for one in replicas.values()} == {world.code.replica.WENT_BACK}
    assert {broker: one.files.identity.id for broker, one in replicas.items()} == ids
    assert all(one.files.promised == register for one in replicas.values()) and world.register is None


def test_a_register_that_is_there_again_ends_the_trouble_by_itself(world):
    full, empty = world.consul.snapshot(), world.consul.snapshot()
    empty.pairs.clear()
    world.restore_consul(empty)
    world.calm()
    world.restore_consul(full)
    world.until("a shard that works", world.works)


def test_a_leader_whose_hw_stands_lets_another_one_lead(world):
    world.running["a"].replica._work.stands = lambda: True
    world.until("another leader", lambda: world.register.epoch == 2)
    assert world.register.leader in (world.running[broker].replica.files.identity.id for broker in ("b", "c"))


@pytest.mark.parametrize("heard", ["", "b"])
def test_a_leader_that_hears_nobody_lets_nobody_leave_the_isr(world, heard):
    """Without an answer of anybody it may be the leader that is cut off. It can go on with those only that it hears."""
    ids = {broker: process.replica.files.identity.id for broker, process in world.running.items()}
    work, turns = world.running["a"].replica._work, iter(range(60))
    work.may_join = lambda replica: False
    work.hears = lambda replica: replica == ids.get(heard)
    work.is_behind = lambda replica: replica != ids.get(heard)
    world.until("some turns", lambda: next(turns, None) is None)
    assert {broker for broker, id in ids.items() if id in world.register.isr} == ({"a", "b"} if heard else {*"abc"})


@pytest.mark.parametrize("slow", ["b", "bc"])
def test_a_slow_member_leaves_the_isr_as_long_as_enough_remain(world, slow):
    ids = {broker: process.replica.files.identity.id for broker, process in world.running.items()}
    work, turns = world.running["a"].replica._work, iter(range(60))
    may_join, are_slow = work.may_join, {ids[broker] for broker in slow}
    work.may_join = lambda replica: replica not in are_slow and may_join(replica)
    work.hears = lambda replica: True
    work.is_slow = lambda replica: replica in are_slow
    world.until("some turns", lambda: next(turns, None) is None)
    assert len(world.register.isr) == 2 and ids["a"] in world.register.isr
    are_slow.clear()
    world.until("the whole ISR", lambda: {*world.register.isr} == {*ids.values()})


def test_resign_lets_another_member_lead(world):
    assert world.run(world.code.shard.resign(world.keys, "b")) is None
    successor = world.run(world.code.shard.resign(world.keys, "a"))
    assert successor in ("b", "c")
    world.until("a shard that works", world.works)
    assert world.running[successor].replica.role == "leading"


def test_resign_of_the_last_living_member_is_refused(world):
    lose(world, "b"), lose(world, "c")
    with pytest.raises(world.code.shard.RetryError, match="no other member of the ISR is alive; a goes on leading"):
        world.run(world.code.shard.resign(world.keys, "a"))


def test_init_refuses_a_shard_that_is_there_and_one_whose_brokers_are_not(world, tmp_path):
    init = world.code.shard.init
    with pytest.raises(world.code.shard.ConfigError, match="is there already; see: kmq cluster status"):
        world.run(init(world.keys, [*BROKERS], None, False))
    del world.consul.state.pairs[world.keys.register]
    with pytest.raises(
        world.code.shard.ConfigError, match=r"has promised version [0-9] of a register that is not there"
    ):
        world.run(init(world.keys, [*BROKERS], None, False))
    new = World(load(), tmp_path / "new", 1)
    new.root.mkdir()
    new.start("a")
    with pytest.raises(new.code.shard.RetryError, match="not there: a, b, c"):
        new.run(init(new.keys, [*BROKERS], None, False))


def test_a_replica_that_lost_its_session_between_a_cut_and_its_note_keeps_its_id(world):
    world.ends.update(a=3, b=3, c=3)
    replica = world.running["c"].replica
    for broker in BROKERS:
        world.running[broker].replica._noted_at = -100.0
    world.until("a note of c", lambda: replica._note is not None and replica._note.end == 3)
    ids, start = dict(world.ids), replica._start
    world.ends.update(a=2, b=2, c=2)  # a leader that lacks the last record, which was not committed
    world.expire(world.running["c"])
    world.until("another start of c", lambda: replica._start != start)
    assert world.ids == ids


def test_a_replica_between_two_sessions_when_consul_was_restored_ends_its_former_one(world):
    """Consul has that one again, and its check passes for some minutes. The process knows that it is its own."""
    replica, snapshot = world.running["c"].replica, world.consul.snapshot()
    former, start = replica._presence.session, replica._start
    world.expire(world.running["c"])
    world.until("another session of c", lambda: replica._presence.session not in ("", former))
    world.consul.restore(snapshot)
    world.beats |= dict.fromkeys(world.consul.state.sessions[former].checks, world.now + 1000.0)
    world.until("another start of c", lambda: replica._start != start)
    world.heal()


def await_refusal(world, *brokers):
    """Let these go on until one ends, and return why."""
    with pytest.raises(Broken, match="has ended"):
        world.until("an end", lambda: False, brokers)
    [error] = world.failed
    assert isinstance(error, BusyError)
    return str(error)


def test_a_second_machine_with_the_name_of_a_broker_ends_and_changes_nothing(world):
    register, id = world.register, world.ids["b"]
    world.start("b2")
    said = await_refusal(world, *BROKERS, "b2")
    assert f"broker b of the shard s runs already (replica {id}, at b:5677)" in said
    assert world.running.keys() == {*BROKERS} and world.register == register
    view = world.run(world.code.shard.read_shard(world.keys))
    assert world.code.shard.document("s", "a", view)["brokers"]["b"]["replica"] == id


def test_of_two_machines_that_begin_under_one_name_at_once_one_enters(world):
    lose(world, "c")
    world.start("c1"), world.start("c2")
    said = await_refusal(world, "a", "b", "c1", "c2")
    [left] = {"c1", "c2"} & world.running.keys()
    assert f"(replica {world.ids[left]}, at {left}:5677)" in said
    world.until("its place in the ISR", lambda: world.ids[left] in world.register.isr, ["a", "b", left])


def test_a_broker_whose_disk_was_wiped_enters_when_its_former_session_is_over(world):
    former = world.ids["b"]
    world.kill("b")
    shutil.rmtree(world.root / "b")
    world.restored.add("b")
    world.start("b")
    world.heal()
    assert world.ids["b"] != former and former not in world.register.isr


def test_a_replica_that_takes_a_new_id_in_its_life_ends_its_own_session(world):
    replica, former = world.running["b"].replica, world.ids["b"]
    went_back = iter([True])
    replica._work.went_back = lambda: next(went_back, False)
    world.restored.add("b")
    world.until("a new replica in the ISR", lambda: world.ids["b"] != former and world.ids["b"] in world.register.isr)
    assert former not in world.register.isr
    assert "replica_own_session_found" in dict(world.running["b"].log.lines)


def test_two_living_replicas_of_a_broker_are_shown_by_the_one_in_the_isr(world):
    """A release before this one lets a second one in."""
    view = world.run(world.code.shard.read_shard(world.keys))
    true = view.members[world.ids["b"]]
    for id in ("0" * 16, "f" * 16):
        members = {**view.members, id: true._replace(id=id)}
        for ordered in (members, dict(reversed(members.items()))):
            shown = world.code.shard.document("s", "a", view._replace(members=ordered))
            assert shown["brokers"]["b"]["replica"] == true.id


def test_what_a_restored_consul_has_forgotten_is_noted_again_and_recovered(world):
    """The sessions are of before, and still good: nobody enters again."""
    snapshot, turns = world.consul.snapshot(), iter(range(60))
    lose(world, "c")
    world.until("an ISR of two", lambda: len(world.register.isr) == 2, ["a", "b"])
    newest = world.register.version
    world.until(
        "two promises", lambda: all(world.running[one].replica.files.promised.version == newest for one in "ab")
    )
    world.until("their notes", lambda: all(world.running[one].replica._note.version == newest for one in "ab"))
    world.consul.restore(snapshot)
    world.until("some turns", lambda: next(turns, None) is None, ["a", "b"])
    assert {world.running[one].replica.problem for one in "ab"} == {world.code.replica.WENT_BACK}
    assert attempt(world) in ("a", "b")
    world.until("a register that goes on", lambda: world.register.descends_from(newest), ["a", "b"])


@pytest.mark.parametrize(("opened", "role"), [(0, "starting"), (1, "leading"), (2, "leading")])
def test_a_leader_with_open_doors_is_leading_also_where_the_register_went_back(world, opened, role):
    view = world.run(world.code.shard.read_shard(world.keys))
    leader = view.members[view.register.leader]
    note = leader.note._replace(opened=opened)
    view = view._replace(members={**view.members, leader.id: leader._replace(note=note)})
    assert world.code.shard.document("s", "a", view)["brokers"]["a"]["role"] == role


@pytest.mark.parametrize("kind", KINDS)
def test_random_walks_keep_every_promise(tmp_path, kind):
    epochs = sum(walk((), tmp_path / str(seed), seed, kind).judge.registers[-1].epoch for seed in range(60))
    assert epochs > 60, "the walks elect nobody"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_thousands_of_random_walks_keep_every_promise(tmp_path, kind, first):
    for seed in range(first, first + 500):
        walk((), tmp_path / str(seed), seed, kind)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_without_one_of_its_guards_a_promise_is_broken(tmp_path, mutant):
    assert find(mutant, lambda seed: tmp_path / str(seed), 60) is not None


@pytest.mark.parametrize("kind", ["older", "copy"])
def test_a_volume_that_was_restored_joins_as_a_new_replica(tmp_path, kind):
    walk((), tmp_path / "w", 0, kind)


@pytest.mark.parametrize("kind", RECOVERIES)
@pytest.mark.parametrize("seed", range(3))
def test_recovery_loses_nothing_and_chooses_no_branch_by_itself(tmp_path, kind, seed):
    walk((), tmp_path / "w", seed, kind)


def test_a_mutant_that_the_code_has_outgrown_is_refused():
    with pytest.raises(ValueError, match="the mutant must follow"):
        load([("shard", "no such line", "")])
