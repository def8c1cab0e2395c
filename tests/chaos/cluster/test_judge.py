"""The judge of a shard: each claim fails for a fault that was planted, and no other one does; what is good passes."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.cluster.judge import judge, load_replica, main
from chaos.cluster.witness import Witness
from chaos.history import (
    OK,
    UNKNOWN,
    Answer,
    Assigned,
    Commit,
    Committed,
    Ends,
    Healed,
    Operation,
    Owners,
    Poll,
    Produce,
    encode,
)

BROKERS = ("a", "b", "c")
P = ("orders", 0)
SENT = ["w1", "w2", "w3", "w4"]  # w4 was never answered, and never stored


def record(seq: int, value: str, key: str = "orders") -> str:
    payload = value if key.startswith("__") else f"{value} xxx"
    return f"{seq}|1795276288.490144|{key}|0|{seq};p=w|{payload}"


def begins(seq: int, epoch: int, broker: str) -> str:
    return record(seq, f"epoch={epoch} mark=0c1d broker={broker} level=1", "__kmq.epoch")


class World(NamedTuple):
    """A shard that lived through one election, as its files: epoch 1 of a, with w1 and w2, epoch 2 of b, with w3."""

    root: Path
    history: list[Operation]
    healed_s: float = 10.0

    @property
    def witness(self) -> Path:
        return self.root / "witness"

    def wal(self, broker: str) -> Path:
        return self.root / broker / "append" / "1.log"

    def log(self, broker: str) -> Path:
        return self.root / broker / "topics" / "orders" / "0" / "0.log"

    def cut(self, broker: str) -> Path:
        return self.root / broker / "cut" / "4-1.log"

    def edit(self, path: Callable[[str], Path], brokers: str, *changes: tuple[str, str]) -> None:
        """Change texts in this file of these brokers; a text that is not there would plant nothing."""
        for broker in brokers:
            text = path(broker).read_text()
            for before, after in changes:
                assert text.count(before) == 1, (before, text)
                text = text.replace(before, after)
            path(broker).write_text(text)

    def found(self, *drained: str) -> dict[str, int]:
        replicas = [load_replica(broker, self.root / broker) for broker in BROKERS]
        return dict(judge(self.history, replicas, self.witness, drained, healed_s=self.healed_s).counts)


def lines(*records: str) -> str:
    return "".join(f"{each}\n" for each in records)


WAL = [begins(1, 1, "a"), record(2, "w1"), record(3, "w2"), begins(4, 2, "b"), record(5, "w3")]
CUT = [record(4, "w3"), record(5, "w4")]  # numbered by a in epoch 1, never committed


def good_history() -> list[Operation]:
    said: list[Operation] = [Produce("w", value, UNKNOWN, size=6) for value in SENT]
    said += [Answer("w", "w1", 2, 1, 2), Answer("w", "w2", 3, 1, 2), Answer("w", "w3", 5, 30, 35)]
    said += [Healed("split a from b and c", 29)]
    said += [Poll("r", "", P, 0, ("w1", "w2"), 3), Ends("r", P, 2, 20, 21), Poll("r", "", P, 2, ("w3",), 36)]
    said += [Assigned("m", "g", 1, (P,), (P,), 1, 2), Poll("m", "g", P, 0, ("w1", "w2"), 3)]
    said += [Commit("m", "g", {P: 2}, OK, 4, 5), Committed("g", {P: 2}, 6, 7)]
    said += [Assigned("n", "g", 2, (P,), (P,), 31, 32), Poll("n", "g", P, 2, ("w3",), 36)]
    return said


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, good_history())
    made.witness.mkdir()
    for broker in BROKERS:
        made.wal(broker).parent.mkdir(parents=True)
        made.log(broker).parent.mkdir(parents=True)
        made.wal(broker).write_text(lines(*WAL) + "6|1795276288.490144|ord")  # cut off in the middle of a write
        made.log(broker).write_text(lines(WAL[1], WAL[2], WAL[4]))
        (made.root / broker / "committed").write_text("5 0a1b2c3d\n")
        seen = WAL[:3] + CUT + ["forget"] * (broker == "c") + WAL[3:] if broker != "b" else WAL
        rows = [each if each == "forget" else f"{each.split('|')[0]} {zlib.crc32(each.encode())}" for each in seen]
        (made.witness / broker).write_text(lines(*rows))
    made.cut("a").parent.mkdir()
    made.cut("a").write_text(lines(*CUT))
    return made


def test_a_good_shard_is_found_good(world: World) -> None:
    assert not world.found("g")


def test_the_command_says_what_is_wrong(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (world.root / "histories").mkdir()
    (world.root / "histories" / "w").write_text(lines(*map(encode, world.history)))
    words = [str(world.root / "histories"), str(world.witness), *(f"{each}={world.root / each}" for each in BROKERS)]
    assert main(*words) == 0 and "clean=1" in capsys.readouterr().out
    (world.cut("a")).unlink()
    assert main(*words) == 1 and 'anomaly="cut unaccounted" what="a: seq 5 was' in capsys.readouterr().out


def lose_an_ack(world: World) -> None:
    world.history.append(Answer("w", "w4", 6, 1, 2))


def lose_an_ack_without_a_seq(world: World) -> None:
    world.history[3] = Produce("w", "w4", OK)


def store_another_under_the_answered_seq(world: World) -> None:
    world.history.remove(Answer("w", "w3", 5, 30, 35))
    world.history.append(Answer("w", "w3", 7, 30, 35))


def store_twice(world: World) -> None:
    world.edit(world.wal, "abc", ("6|1795276288.490144|ord", lines(record(6, "w1"))))
    world.edit(world.log, "abc", (WAL[4], f"{WAL[4]}\n{record(6, 'w1')}"))


def store_other_content(world: World) -> None:
    for path in (world.wal, world.log):
        world.edit(path, "abc", ("w2 xxx", "w2 xxy"))
    world.edit(lambda broker: world.witness / broker, "abc", *_seen_as("w2 xxx", "w2 xxy"))


def store_less_content(world: World) -> None:
    for path in (world.wal, world.log):
        world.edit(path, "abc", ("w2 xxx", "w2 xx"))
    world.edit(lambda broker: world.witness / broker, "abc", *_seen_as("w2 xxx", "w2 xx"))


def _seen_as(before: str, after: str) -> list[tuple[str, str]]:
    changed = WAL[2].replace(before, after)
    return [(f"3 {zlib.crc32(WAL[2].encode())}", f"3 {zlib.crc32(changed.encode())}")]


def invent(world: World) -> None:
    world.edit(world.wal, "abc", ("6|1795276288.490144|ord", lines(record(6, "w9"))))
    world.edit(world.log, "abc", (WAL[4], f"{WAL[4]}\n{record(6, 'w9')}"))


def answer_a_seq_twice(world: World) -> None:
    world.history.insert(5, Answer("w", "w1", 3, 1, 2))
    world.history.remove(Answer("w", "w1", 2, 1, 2))
    for path in (world.wal, world.log):  # both are stored, under other seqs than was said
        world.edit(path, "abc", ("w2 xxx", "w1 xxx"), (record(2, "w1"), record(2, "w2")))


def read_what_was_cut(world: World) -> None:
    world.history.append(Poll("s", "", P, 0, ("w1", "w2", "w3", "w4"), 8))


def read_at_another_offset(world: World) -> None:
    world.history.append(Poll("s", "", P, 0, ("w1", "w3"), 8))


def end_before_what_was_read(world: World) -> None:
    world.history.append(Ends("r", P, 2, 40, 41))


def lead_one_epoch_twice(world: World) -> None:
    world.cut("c").parent.mkdir()
    world.cut("c").write_text(lines(begins(4, 2, "c")))


def write_two_records_in_one_epoch(world: World) -> None:
    world.cut("c").parent.mkdir()
    world.cut("c").write_text(lines(WAL[3], record(5, "w4")))


def let_epochs_fall(world: World) -> None:
    for path in (world.wal,):
        world.edit(path, "abc", (WAL[0], WAL[0].replace("epoch=1", "epoch=3")))
    changed = zlib.crc32(WAL[0].replace("epoch=1", "epoch=3").encode())
    seen = (f"1 {zlib.crc32(WAL[0].encode())}", f"1 {changed}")
    world.edit(lambda broker: world.witness / broker, "abc", seen)


def leave_a_gap(world: World) -> None:
    world.edit(world.wal, "b", (f"{WAL[2]}\n", ""))
    seen = (f"3 {zlib.crc32(WAL[2].encode())}\n", "")
    world.edit(lambda broker: world.witness / broker, "b", seen)


def let_wals_differ(world: World) -> None:
    world.edit(world.wal, "c", ("1795276288.490144|orders|0|3", "1795276288.490145|orders|0|3"))
    (world.witness / "c").unlink()


def let_logs_differ(world: World) -> None:
    world.edit(world.log, "c", ("1795276288.490144|orders|0|3", "1795276288.490145|orders|0|3"))


def let_a_log_begin_elsewhere(world: World) -> None:
    world.log("b").rename(world.log("b").with_name("1.log"))


def leave_one_behind(world: World) -> None:
    world.edit(world.wal, "c", (f"{WAL[4]}\n", ""))
    world.edit(world.log, "c", (f"{WAL[4]}\n", ""))
    (world.witness / "c").unlink()


def lose_what_was_cut(world: World) -> None:
    world.edit(world.cut, "a", (f"{CUT[1]}\n", ""))


def heal_too_late(world: World) -> None:
    world.history.append(Healed("a killed", 24.9))


def never_heal(world: World) -> None:
    world.history.append(Healed("c killed", 31))


def go_back(world: World) -> None:
    world.history.append(Poll("r", "", P, 1, ("w2", "w3"), 37))


def go_on_before_the_commit(world: World) -> None:
    world.history.extend([Assigned("o", "g", 3, (P,), (P,), 40, 41), Poll("o", "g", P, 0, ("w1",), 42)])


def forget_a_commit(world: World) -> None:
    world.history.append(Committed("g", {P: 1}, 50, 51))


def let_the_group_go_back(world: World) -> None:
    world.history.append(Commit("n", "g", {P: 1}, OK, 50, 51))


def give_a_partition_to_two(world: World) -> None:
    world.history.append(Owners("g", 2, (("m", P),)))


def reorder(world: World) -> None:
    first, second = world.history[:2]
    world.history[:2] = [second, first]


@pytest.mark.parametrize(
    ("fault", "claims"),
    [
        (lose_an_ack, {"lost ack"}),
        (lose_an_ack_without_a_seq, {"lost ack"}),
        (store_another_under_the_answered_seq, {"lost ack"}),
        (store_twice, {"stored twice"}),
        (store_other_content, {"other content"}),
        (store_less_content, {"other content"}),
        (invent, {"invented"}),
        (read_what_was_cut, {"read what was cut"}),
        (read_at_another_offset, {"read what was cut"}),
        (end_before_what_was_read, {"end went back"}),
        (lead_one_epoch_twice, {"two leaders"}),
        (write_two_records_in_one_epoch, {"two leaders"}),
        (let_epochs_fall, {"epochs fall"}),
        (leave_a_gap, {"gap"}),
        (let_wals_differ, {"WALs differ", "two leaders"}),  # one seq is then two records of one epoch
        (let_logs_differ, {"logs differ"}),
        (let_a_log_begin_elsewhere, {"logs differ", "behind"}),  # it ends at a higher offset than the others
        (leave_one_behind, {"behind"}),
        (lose_what_was_cut, {"cut unaccounted"}),
        (heal_too_late, {"slow healing"}),
        (never_heal, {"slow healing"}),
        (go_back, {"non-monotonic poll"}),
        (go_on_before_the_commit, {"commit lost"}),
        (forget_a_commit, {"commit lost"}),
        (let_the_group_go_back, {"position against group"}),
        (give_a_partition_to_two, {"two owners"}),
        (reorder, {"reordered"}),
    ],
)
def test_a_planted_fault_breaks_its_claim_and_no_other(
    world: World, fault: Callable[[World], None], claims: set[str]
) -> None:
    fault(world)
    assert world.found().keys() == claims


def test_a_record_that_a_group_was_never_given_is_found_once_it_has_read_everything(world: World) -> None:
    world.history.remove(Poll("n", "g", P, 2, ("w3",), 36))
    assert not world.found() and world.found("g").keys() == {"unseen"}


def test_a_seq_that_was_answered_for_two_messages_is_found(world: World) -> None:
    """One of the two cannot be stored there, which is found too."""
    answer_a_seq_twice(world)
    assert "answered twice" in world.found("g")
    assert "answered twice" in World(world.root, [*good_history(), Answer("w", "w4", 3, 1, 2)]).found("g")


def test_what_a_replica_had_before_it_was_emptied_is_not_asked_for(world: World) -> None:
    seen = world.witness / "a"
    world.cut("a").unlink()
    assert world.found("g").keys() == {"cut unaccounted"}
    seen.write_text(seen.read_text() + "forget\n")
    assert not world.found("g")


def test_a_cut_that_the_broker_has_removed_since_is_counted_as_the_witness_kept_it(world: World) -> None:
    kept = world.witness / "a.cut"
    kept.mkdir()
    world.cut("a").rename(kept / "4-1.log")
    assert not world.found("g")


# --- the witness -----------------------------------------------------------------------------------------------------


def test_the_witness_sees_what_was_cut_and_what_came_in_its_place(tmp_path: Path) -> None:
    segment, sealed, cuts = (tmp_path / "a" / name for name in ("append/3.log", "append/1.log", "cut"))
    segment.parent.mkdir(parents=True)
    cuts.mkdir()
    sealed.write_text("1|x\n2|x\n")
    segment.write_text("3|x\n4|x\n5|wri")
    witness = Witness(tmp_path / "witness", {"a": tmp_path / "a"})
    witness.look()
    (cuts / "4-1.log").write_text("4|x\n")
    segment.write_text("3|x\n4|y\n5|y\n")  # longer than it was: only the seqs say that it was cut
    witness.look()
    (cuts / "4-1.log").unlink()
    segment.unlink()
    sealed.write_text("1|x\n")
    witness.look()
    sealed.write_text("1|x\n2|z\n3|z\n")
    witness.look()
    witness.forget("a")
    witness.finish()
    rows = ["1|x", "2|x", "3|x", "4|x", "4|y", "5|y", "2|z", "3|z"]
    expected = [f"{row[0]} {zlib.crc32(row.encode())}" for row in rows]
    assert (witness.root / "a").read_text().splitlines() == [*expected, "forget"]
    assert (witness.root / "a.cut" / "4-1.log").read_text() == "4|x\n"
