"""What a replica remembers on its disk: who it is, and what it has promised."""

import os

import pytest

from kmq.broker.door import PORTS
from kmq.cluster.register import begin
from kmq.config.settings import load
from kmq.errors import ConfigError, CorruptError
from kmq.links.role import RolePage, remove
from kmq.log import identity
from kmq.replica.files import STARTS, ReplicaFiles, new_identity
from kmq.replica.shard import Note, decode_note, encode_note

LINEAGE = "0123456789abcdef" * 2
A, B = "aaaaaaaaaaaaaaa1", "bbbbbbbbbbbbbbb2"


@pytest.fixture
def data(tmp_path):
    return str(tmp_path)


def register():
    return begin(LINEAGE, ["a", "b", "c"], None, A)


def test_a_new_directory_gets_an_id_that_stays(data):
    first = ReplicaFiles(data, "s")
    assert first.promised is None and not first.identity.starts
    assert ReplicaFiles(data, "s").identity == first.identity


def test_a_start_goes_on_with_the_mark_of_one_that_did_not_get_far(data):
    files = ReplicaFiles(data, "s")
    coming = files.identity.about_to_start()
    assert coming == files.identity and coming.knows(coming.coming)
    started = coming.started()
    files.save(started)
    again = ReplicaFiles(data, "s").identity
    assert again == started and again.knows(coming.coming) and not again.coming and not again.knows("")
    assert again.about_to_start().coming not in ("", coming.coming)


def test_the_last_thousand_starts_are_kept():
    found = new_identity("s")
    for _ in range(STARTS + 3):
        found = found.about_to_start().started()
    assert len(found.starts) == STARTS


def test_a_promise_is_read_again_and_never_goes_back(data):
    files, first = ReplicaFiles(data, "s"), register()
    second = first.with_isr([A, B])
    files.promise(first)
    files.promise(second)
    assert ReplicaFiles(data, "s").promised == second
    for other in (first, first.with_isr([A, B]), register()):
        with pytest.raises(ValueError, match="does not descend from the promised"):
            files.promise(other)
    assert ReplicaFiles(data, "s").promised == second


def test_a_new_id_has_no_promise_at_whatever_instant_it_is_killed(data):
    files = ReplicaFiles(data, "s")
    files.promise(register())
    files.save(new_identity("s"))
    assert files.promised is None and ReplicaFiles(data, "s").promised is None
    assert os.path.exists(f"{data}/register")
    files.promise(register())
    assert ReplicaFiles(data, "s").promised is not None


@pytest.mark.parametrize("name", ["replica", "register"])
def test_no_flipped_bit_is_taken_for_another_identity_or_promise(data, name):
    files = ReplicaFiles(data, "s")
    files.save(files.identity.about_to_start().started().about_to_start())
    files.promise(register())
    whole = (files.identity, files.promised)
    with open(f"{data}/{name}", "rb") as file:
        text = file.read()
    for at in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[at // 8] ^= 1 << at % 8
        with open(f"{data}/{name}", "wb") as file:
            file.write(flipped)
        with pytest.raises((CorruptError, ConfigError)):
            found = ReplicaFiles(data, "s")
            assert (found.identity, found.promised) == whole, flipped
            pytest.fail(f"{flipped} was accepted")


def test_a_promise_without_the_replica_that_gave_it_is_refused(data):
    ReplicaFiles(data, "s").promise(register())
    os.unlink(f"{data}/replica")
    with pytest.raises(CorruptError, match=r"register: is there without `replica`"):
        ReplicaFiles(data, "s")


def test_a_promise_of_a_later_level_is_refused(data):
    files = ReplicaFiles(data, "s")
    files.promise(register()._replace(lineage=LINEAGE))
    path = f"{data}/register"
    with open(path) as file:
        text = file.read().replace("level=3", "level=4").rpartition("crc32=")[0]
    import zlib

    with open(path, "w") as file:
        file.write(f"{text}crc32={zlib.crc32(text.encode())}\n")
    with pytest.raises(ConfigError, match="level 4; this release understands 3"):
        ReplicaFiles(data, "s")


def test_a_directory_of_a_shard_is_refused_on_its_own_and_to_another_shard(data):
    identity.open_data(data)
    ReplicaFiles(data, "s")
    assert identity.open_data(data, shard="s")
    with pytest.raises(ConfigError, match=r"KMQ_SHARD is not set: .* is a replica of the shard s") as alone:
        identity.open_data(data)
    with pytest.raises(ConfigError, match=r"KMQ_SHARD=t: .* is a replica of the shard s"):
        identity.open_data(data, shard="t")
    with pytest.raises(ConfigError, match=r"KMQ_SHARD=t: .* is a replica of the shard s"):
        ReplicaFiles(data, "t")
    assert alone.value.exit_code == 78


def test_a_directory_of_which_nobody_knows_whether_it_is_a_replica_is_refused(data):
    os.mkdir(f"{data}/replica")
    with pytest.raises(ConfigError, match=r"Is a directory \(.*/replica\); move it away"):
        identity.open_data(data)


SHARD = {"KMQ_SHARD": "s", "KMQ_CLUSTER": "dev", "KMQ_CONSUL": "127.0.0.1:8500", "KMQ_REPLICA_SECRET": "secret"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"KMQ_CLUSTER": ""}, "KMQ_CLUSTER is not set; KMQ_SHARD=s needs it"),
        ({"KMQ_CONSUL": ""}, "KMQ_CONSUL is not set; KMQ_SHARD=s needs it"),
        ({"KMQ_REPLICA_SECRET": ""}, "KMQ_REPLICA_SECRET is not set; KMQ_SHARD=s needs it"),
        ({"KMQ_FSYNC": "never"}, "KMQ_FSYNC=never: must be always in a shard"),
        ({"KMQ_FSYNC": "interval:5"}, "KMQ_FSYNC=interval:5: must be always in a shard"),
        ({"RB_OVERFLOW_POLICY": "drop_oldest"}, "RB_OVERFLOW_POLICY=drop_oldest: must be block in a shard"),
        ({"RB_OVERFLOW_POLICY_DURABLE": "drop_oldest"}, "RB_OVERFLOW_POLICY_DURABLE=drop_oldest: must be block"),
    ],
)
def test_settings_with_which_a_replica_could_lose_what_it_has_confirmed_are_refused(given, said):
    with pytest.raises(ConfigError) as refused:
        load(SHARD | given, "no such file")
    assert said in str(refused.value)
    assert load({**given, "KMQ_SHARD": ""}, "no such file").shard == ""


def test_a_shard_with_its_consul_is_accepted():
    assert load(SHARD, "no such file").replica_lag == 5.0


def test_a_note_gives_back_what_it_says_of_its_doors():
    note = Note("a", "5c1f", end=7, replica="pod-a:5677", doors=(("lines", "pod-a:5673"), ("http", "[::1]:8082")))
    assert decode_note(encode_note(note)) == note
    many = note._replace(doors=tuple((name, f"{'h' * 253}:65535") for name in PORTS))
    assert decode_note(encode_note(many)) == many


def test_a_role_page_has_room_for_all_ports_of_a_leader():
    leader = {"broker": "b" * 64} | dict.fromkeys(PORTS, f"{'h' * 253}:65535")
    instance = f"role-{os.getpid()}"
    page = RolePage.make(instance, "id")
    try:
        page.show_leader(leader)
        assert page.leader == leader and RolePage.find(instance, "id").leader == leader
    finally:
        remove(instance)
    assert decode_note(encode_note(Note("a", "5c1f"))) == Note("a", "5c1f")


def test_a_note_says_since_when_and_whom_it_follows_and_an_older_one_does_not():
    note = Note("a", "5c1f", follows=0, at=1795276288.49)
    assert decode_note(encode_note(note)) == note
    older = decode_note(b"broker=a start=5c1f epoch=8 end=7 level=1")
    assert (older.follows, older.at) == (None, None)
