"""Old records of topics: what goes up and when, what the router takes and deletes, and what a kill leaves."""

import gzip
import os
import shutil
from itertools import pairwise

import pytest
from made_up import FIRST_TS
from tiered import TieredBroker, lines

from kmq.errors import ConfigError
from kmq.log import dedupe_file, rows, segment, topic_changes, topics
from kmq.log.reader import LogReader
from kmq.log.segment import Limits
from kmq.tier import turn as turn_module
from kmq.tier.commits import AheadError, decode_state
from kmq.tier.store import StoreError, get

pytestmark = pytest.mark.usefixtures("small_blocks")

SEGMENT = 4096
ON = Limits(segment_bytes=SEGMENT, tier="on", local_retention_bytes=3 * SEGMENT)


@pytest.fixture
def made(tmp_path):
    broker = TieredBroker(tmp_path, ON, object_bytes=8192)
    yield broker
    broker.kill()


def stored_in_tier(broker, number=0):
    """The lines of the rows in force, as the store has them."""
    found = broker.state.logs[f"t/{number}", rows.of(broker.directory(number)).life].rows
    return b"".join(gzip.decompress(get(broker.store, f"{broker.copier.lineage}/{row.key}")) for row in found)


# --- what goes up ----------------------------------------------------------------------------------------------------


def test_what_fills_an_object_goes_up_and_the_rest_waits(made):
    made.send(*lines(150))
    made.turn()
    found = made.rows()
    assert found and found[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(found))
    end = found[-1][1]
    assert stored_in_tier(made) == b"".join(made.sent[:end]) and 90 < end < 150
    number = made.copier.commits.state.number
    made.turn()
    assert made.copier.commits.state.number == number


def test_an_object_that_ends_with_the_checkpoint_has_whole_lines_with_carriage_returns_in_them(tmp_path):
    made = TieredBroker(tmp_path, ON)
    made.send(*[b"t|1|%d|%b\r%b\r" % (n, b"x" * 60, b"y" * 60) for n in range(150)])
    made.checkpoint()
    made.send(*lines(30, 150))  # they are in the last block, and no checkpoint has them
    made.copier.turn()
    made.tick()
    [(begin, end)] = made.rows()
    assert (begin, end) == (0, 150) and stored_in_tier(made) == b"".join(made.sent[:150])
    made.kill()


def test_commits_say_where_a_partition_begins_inside_of_an_object(made):
    made.send(*lines(400))
    made.turn()
    log = made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0)
    for start in (made.rows()[1][0] + 7, made.rows()[1][0] + 9):
        made.queues.retention.begin_at([(log, start)])
        made.turn()
        made.turn()
        found = made.state.logs["t/0", 1]
        assert found.before == start and found.rows[0].base < start < found.rows[0].next
    state = made.state
    assert decode_state(state.encode(), state.number).encode() == state.encode()
    made.turn()
    assert made.state.number == state.number and made.begin() == start


def test_a_segment_that_is_missing_drops_no_row(made):
    """Retention and starts say what they delete, in router.ckpt or `tier`. A file that is not there says nothing."""
    made.send(*lines(300))
    made.turn()
    made.tick()
    found, end = made.rows(), made.rows()[-1][1]
    behind = next(first for first in made.local() if first >= end)
    made.send(*lines(300, 300))
    made.checkpoint()
    gone = [path for first, path in segment.listing(made.directory()) if first <= behind]
    for path in gone:
        os.rename(path, f"{path}.away")
    made.copier.turn()
    assert [(row.base, row.next) for row in made.state.logs["t/0", rows.of(made.directory()).life].rows] == found
    for path in gone:
        os.rename(f"{path}.away", path)
    made.send(*lines(1, 600))
    made.turn()
    assert made.rows()[: len(found)] == found and made.rows()[-1][1] > end


def test_a_topic_whose_file_is_wrong_has_the_usual_limits(made):
    with open(f"{made.data}/topics/t/topic.toml", "a") as file:
        file.write('local_retention_age = "soon"\n')
    made.send(*lines(200))
    made.turn()
    assert made.rows()


def test_segments_that_went_while_a_start_waited_for_room_are_not_counted_twice(made, monkeypatch):
    made.send(*lines(300))
    made.turn()
    at, tiering = ("t", 0), made.queues.tiering
    state = made.queues.logs.states[at]
    assert state.sealed

    def set_start(name, number, offset):
        state.retire(1)

    monkeypatch.setattr(tiering, "set_start", set_start)
    limits = Limits(segment_bytes=SEGMENT, tier="on", retention_bytes=SEGMENT)
    assert tiering.due(at, state, limits, made.now_s, 100) == 0


def test_a_long_backlog_is_not_searched_for_each_of_its_objects(made, monkeypatch):
    """It was: a topic of a terabyte took hours before its first object."""
    searched, cuts = [], LogReader.cuts
    monkeypatch.setattr(LogReader, "cuts", lambda *arguments: searched.append(1) or cuts(*arguments))
    made.send(*lines(2000))
    made.turn()
    assert len(made.state.logs["t/0", rows.of(made.directory()).life].rows) > 20 and len(searched) < 5


def test_idle_partitions_cost_nothing(made):
    made.send(*lines(5))
    for _ in range(3):
        made.turn()
    assert not made.rows() and not made.state.logs
    assert not os.path.exists(rows.path_of(made.directory()))


def test_what_local_limits_would_delete_is_behind_until_the_store_has_it(made):
    made.send(*lines(400))
    made.checkpoint()
    made.store.is_away = True
    with pytest.raises(StoreError):
        made.copier.turn()
    due = made.local()[:-3]  # three segments' bytes may stay, the active one's among them
    sizes = [part.size for part in segment.survey(made.directory())][: len(due)]
    found = made.copier.totals()
    assert (found.rows, found.local_limit) == (0, 3 * SEGMENT) and len(due) > 3
    assert sum(sizes[:-1]) <= found.behind_bytes <= sum(sizes)
    made.store.is_away = False
    made.turn()
    held = rows.of(made.directory()).rows
    assert made.copier.totals() == (len(held), sum(row.nbytes for row in held), 0, 3 * SEGMENT)


def test_a_new_process_knows_what_is_behind_though_the_store_is_away(made):
    made.send(*lines(400))
    made.turn()
    made.send(*lines(400, 400))
    made.checkpoint()
    before = made.copier.totals()
    made.kill_copier()
    made.store.is_away = True
    with pytest.raises(StoreError):
        made.copier.turn()
    assert made.copier.totals() == before and 0 < before.behind_bytes < 50_000 and before.rows > 3


def test_a_sealed_segment_that_is_due_goes_up_whatever_its_size_and_is_deleted_then(tmp_path):
    limits = Limits(segment_bytes=SEGMENT, tier="on", local_retention_bytes=SEGMENT)
    broker = TieredBroker(tmp_path, limits)
    broker.send(*lines(100))
    first = broker.local()
    broker.turn()
    assert broker.rows() == [(0, 100)] and len(first) == 4
    broker.tick()
    assert broker.local()[0] > 0 and broker.local()[0] <= broker.rows()[-1][1]
    assert broker.begin() == 0
    broker.stop()


def test_a_lower_local_limit_is_obeyed_although_no_message_comes(tmp_path):
    broker = TieredBroker(tmp_path, Limits(segment_bytes=SEGMENT, tier="on", local_retention_bytes=1 << 30))
    broker.send(*lines(400))
    broker.turn()
    assert not broker.rows()
    broker.limits = ON
    broker.queues.use_limits(ON)
    broker.turn()
    broker.tick()
    assert broker.rows() and broker.local()[0] > 0
    broker.kill()


def test_without_tier_on_nothing_goes_up(tmp_path):
    broker = TieredBroker(tmp_path, Limits(segment_bytes=SEGMENT, local_retention_bytes=SEGMENT), object_bytes=4096)
    broker.send(*lines(200))
    broker.turn()
    assert not broker.state.logs and broker.local()[0] == 0
    broker.stop()


def test_a_table_has_no_rows_and_says_so():
    with pytest.raises(ConfigError, match="tier"):
        Limits().with_changes({"tier": "on", "cleanup": "compact"})
    assert not Limits(tier="on").with_changes({"cleanup": "compact"}).is_tiered


@pytest.mark.parametrize("fate", ["lost", "done", "late"])
def test_whichever_request_goes_wrong_each_record_is_in_one_row(made, fate):
    made.send(*lines(300))
    made.turn()
    for at in range(8):
        made.send(*lines(40))
        made.kill_copier()
        made.store.plan = [""] * at + [fate]
        for _ in range(3):
            try:
                made.turn()
            except StoreError:
                made.store.deliver()
                continue
            break
    made.store.plan = []
    made.turn()
    assert stored_in_tier(made) == b"".join(made.sent[: made.rows()[-1][1]])


def test_the_state_of_all_commits_says_the_same(made):
    made.send(*lines(300))
    made.turn()
    state = made.state
    again = decode_state(state.encode(), state.number)
    assert again.encode() == state.encode() and list(map(str, again.rows())) == list(map(str, state.rows()))
    assert again.logs["t/0", rows.of(made.directory()).life].end == made.rows()[-1][1]


def test_a_damaged_block_ends_the_rows_of_its_partition_alone(made):
    made.send(*lines(100))
    with open(f"{made.directory()}/{0:020d}.log", "r+b") as file:
        file.seek(2000)
        file.write(b"\0\0\0")
    made.turn()
    made.turn()
    assert not made.rows() and [each for each in made.logger.events if "tier_partition_damaged" in str(each)]


def test_a_directory_that_went_on_elsewhere_adds_no_row(made, tmp_path):
    made.send(*lines(100))
    made.turn()
    end = made.rows()[-1][1]
    path = max(path for path in os.listdir(made.directory()) if path.endswith(".log") and int(path[:20]) < end)
    with open(f"{made.directory()}/{path}", "rb") as file:
        content = file.read()
    assert content
    made.kill_copier()
    made.copier.turn()
    known = made.copier.commits.state.logs["t/0", rows.of(made.directory()).life]
    known.rows[-1] = known.rows[-1]._replace(last=1)
    made.copier._partitions._compared.clear()
    made.send(*lines(100))
    made.checkpoint()
    with pytest.raises(AheadError):
        made.copier.turn()


# --- what the router takes -------------------------------------------------------------------------------------------


def test_a_lost_or_damaged_file_is_laid_out_again(made):
    made.send(*lines(200))
    made.turn()
    made.tick()
    found, path = made.rows(), rows.path_of(made.directory())
    made.stop()
    for harm in ("lost", "damaged"):
        if harm == "lost":
            os.unlink(path)
        else:
            with open(path, "r+b") as file:
                file.write(b"x")
        made.start()
        made.copier.turn()
        made.tick()
        assert made.rows() == found
        made.stop()
    made.start()


def test_lines_of_another_life_or_that_do_not_follow_are_not_taken(made):
    made.send(*lines(150))
    made.turn()
    found, outbox = made.rows(), f"{made.data}/topics/.tiered"
    with open(rows.path_of(made.directory())) as file:
        text = file.read()
    life = rows.of(made.directory()).life
    for wrong in (
        text.replace(f"life={life}", "life=999"),
        text.replace("base=0 ", "base=5000 ").replace("next=", "next=9"),
        text.replace("base=0 ", "base=\xff "),
    ):
        with open(f"{outbox}/t-0", "w", encoding="latin-1") as file:
            file.write(wrong)
        made.tick()
        assert made.rows() == found and not os.path.exists(f"{outbox}/t-0")


def test_lines_that_were_laid_out_before_a_fork_are_not_taken(made):
    """Their keys are those of the lineage before, in which the objects lie."""
    made.send(*lines(150))
    made.checkpoint()
    made.copier.turn()
    path = f"{made.data}/topics/.tiered/t-0"
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace(made.copier.lineage, "f" * 32))
    made.tick()
    assert made.rows() == [] and not os.path.exists(path)


def test_the_format_tells_older_releases_of_the_first_row(made):
    assert not (made.send(*lines(5)), made.turn(), made.rows())[2]
    with open(f"{made.data}/format") as file:
        assert not file.read().startswith("5")
    made.send(*lines(150))
    made.turn()
    with open(f"{made.data}/format") as file:
        assert file.read().startswith("5 ")


# --- what is deleted -------------------------------------------------------------------------------------------------


def test_local_limits_delete_only_what_the_file_on_disk_has(made):
    made.store.is_away = True
    made.send(*lines(400))
    for _ in range(3):
        with pytest.raises(StoreError):
            made.turn()
        made.tick()
    assert made.local()[0] == 0  # the store is away: nothing goes
    made.store.is_away = False
    made.turn()
    made.tick()
    assert 0 < made.local()[0] <= made.rows()[-1][1] and made.begin() == 0


def test_total_limits_win_and_what_they_took_is_never_copied(made):
    made.send(*lines(200))
    made.turn()
    made.store.is_away = True
    made.limits = Limits(segment_bytes=SEGMENT, tier="on", retention_bytes=3 * SEGMENT)
    made.queues.use_limits(made.limits)
    made.send(*lines(400))
    made.checkpoint()
    made.tick()
    first = made.local()[0]
    assert first > made.rows()[-1][1] and made.begin() == first
    made.store.is_away = False
    made.turn()
    made.send(*lines(100))
    made.turn()
    assert not [base for base, _ in made.rows() if base < first] and made.begin() >= first


def test_rows_age_before_segments_and_no_byte_counts_twice(made):
    made.send(*lines(400))
    made.turn()
    made.tick()
    total = sum(map(len, made.sent))
    made.limits = Limits(segment_bytes=SEGMENT, tier="on", retention_bytes=total, local_retention_bytes=3 * SEGMENT)
    made.queues.use_limits(made.limits)
    made.tick()
    assert made.begin() == 0  # rows and segments together are as large as the limit
    made.limits = Limits(
        segment_bytes=SEGMENT, tier="on", retention_bytes=total - 4096, local_retention_bytes=3 * SEGMENT
    )
    made.queues.use_limits(made.limits)
    local = made.local()
    made.tick()
    second = made.rows()[0][1] if made.rows()[0][0] == 0 else made.rows()[0][0]
    assert made.begin() == second and made.local() == local


def test_a_row_before_the_start_is_dropped_and_its_object_deleted_an_hour_later(made, monkeypatch):
    made.send(*lines(400))
    made.turn()
    made.tick()
    gone = made.rows()[0]
    key = rows.of(made.directory()).rows[0].key
    made.queues.retention.begin_at([(made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0), gone[1] + 1)])
    assert made.begin() == gone[1] + 1 and made.local()[0] > gone[1] + 1
    made.turn()
    assert made.rows()[0][0] == gone[1] and key in made.state.dropped
    get(made.store, f"{made.copier.lineage}/{key}")
    monkeypatch.setattr(turn_module, "_DELETE_S", 0.0)
    made.turn()
    with pytest.raises(StoreError):
        get(made.store, f"{made.copier.lineage}/{key}")
    assert key not in made.state.dropped


def test_a_new_start_beyond_the_rows_is_skipped(made):
    made.send(*lines(400))
    made.turn()
    end = made.rows()[-1][1]
    log = made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0)
    made.queues.retention.begin_at([(log, end + 5)])
    made.tick()
    assert made.begin() == end + 5
    made.send(*lines(200))
    made.turn()
    made.turn()
    assert made.rows()[0][0] == end + 5
    assert stored_in_tier(made) == b"".join(made.sent[end + 5 : made.rows()[-1][1]])


def test_a_start_beyond_the_end_of_then_deletes_nothing_that_came_later(made):
    """Its record is asked again at each start of the router: the end counts that the partition had then."""
    made.send(*lines(100))
    made.send(b"__kmq.start|1|;request=r|t incarnation=1 0=1000000")
    made.tick()
    assert made.begin() == 100
    made.send(*lines(400))
    for _ in range(3):
        made.turn()
    assert made.rows()[0][0] == 100 and made.local()[0] > 200
    made.stop()
    made.start()
    made.tick()
    assert made.begin() == 100


def test_a_deleted_topic_leaves_no_row_and_a_second_life_has_its_own(made):
    made.send(*lines(300))
    made.turn()
    life = rows.of(made.directory()).life
    topic_changes.delete(made.data, "t", life)
    made.queues.adopt_declarations()
    while made.queues.changes.sweep():
        pass
    made.turn()
    assert ("t/0", life) not in made.state.logs and made.state.dropped
    made.send(*lines(300))
    made.turn()
    [(_, later)] = made.state.logs
    assert later > life and made.rows()[0][0] == 300


def test_a_full_disk_deletes_what_the_store_has(made):
    made.limits = Limits(segment_bytes=SEGMENT, tier="on")
    made.queues.use_limits(made.limits)
    made.send(*lines(400))
    made.turn()
    assert made.local()[0] == 0
    made.shortage = 2 * SEGMENT
    before = made.local()
    made.queues.tick()
    made.queues.settle()
    assert made.local() == before[2:] and made.begin() == 0, "the oldest ones, and no more than are needed"
    [said] = made.logger.of("room_from_tier")
    assert (said["log"], said["segments"]) == ("topics", 2)
    made.shortage = 1 << 40
    made.tick()
    assert made.local()[-1] <= made.rows()[-1][1] + 40 and made.local()[0] <= made.rows()[-1][1]


def lose_the_first_wal_segment(made):
    """Retention has taken the local WAL up to here; the ids of producers are known up to the end."""
    made.limits = Limits(segment_bytes=SEGMENT, tier="on", retention_bytes=1, local_retention_bytes=3 * SEGMENT)
    made.wal.close()
    last = made.next_seq - 1
    with open(f"{made.data}/producers.ckpt", "wb") as file:
        file.write(b"%d|%d|2\n" % (last, dedupe_file.checksum(last, b"")))
    for name in os.listdir(f"{made.data}/append"):
        if name.endswith((".log", ".idx")) and int(name[:20]) == 1:
            os.unlink(f"{made.data}/append/{name}")
    made.kill_copier()
    made.checkpoint()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_objects_of_the_wal_stay_until_the_rows_have_their_records(made, is_damaged):
    for _ in range(2):
        made.send(*lines(30))
        made.turn()
        assert not made.rows()
    assert len(made.state.wal) == 2
    lose_the_first_wal_segment(made)
    assert 30 < segment.listing(f"{made.data}/append")[0][0] < 60
    if is_damaged:
        with open(f"{made.directory()}/{0:020d}.log", "r+b") as file:
            file.seek(100)
            file.write(b"\0\0\0")
    made.copier.turn()
    made.tick()
    if is_damaged:  # they are nowhere else
        assert not made.rows() and made.state.wal_first == 1
    else:
        assert made.rows() == [(0, 60)] and made.state.wal_first == 31


def test_a_partition_without_records_holds_no_object_of_the_wal(made):
    topics.declare(made.data, "empty", 2)
    made.stop()
    made.start()
    for _ in range(2):
        made.send(*lines(30))
        made.turn()
    lose_the_first_wal_segment(made)
    made.copier.turn()
    assert made.rows() == [] and made.state.wal_first == 31


# --- what a start finds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("loss", ["nothing", "partition", "first"])
def test_a_rebuild_begins_after_the_rows_and_gives_the_same_offsets(made, has_checkpoint, loss):
    made.send(*lines(400))
    made.turn()
    made.tick()
    local, end = made.local(), made.rows()[-1][1]
    made.stop()
    if not has_checkpoint:
        os.unlink(f"{made.data}/router.ckpt")
    names = [name for name in os.listdir(made.directory()) if name[:20].isdigit()]
    for name in names:
        if loss == "partition" or (loss == "first" and int(name[:20]) == local[0]):
            os.unlink(f"{made.directory()}/{name}")
    made.start()
    made.send(*lines(10))
    assert made.local()[0] == {"nothing": local[0], "partition": end, "first": min(end, local[1])}[loss]
    found = b""
    for base in made.local():
        with open(f"{made.directory()}/{base:020d}.log", "rb") as file:
            found += file.read()
    assert found == b"".join(made.sent[made.local()[0] :])
    assert made.begin() == 0


def test_a_kill_between_any_two_steps_loses_nothing(made, tmp_path):
    """The directory as it is after each step of a turn is started again."""
    made.send(*lines(400))
    made.checkpoint()
    copies = []

    def keep():
        copies.append(str(tmp_path / f"copy{len(copies)}"))
        shutil.copytree(made.data, copies[-1], symlinks=True)

    made.copier.turn()
    keep()
    made.queues.tiering.install()
    keep()
    for _ in range(4):
        made.queues.tick()
        made.queues.settle()
        keep()
    for copy in copies:
        found = rows.of(f"{copy}/topics/t/0")
        local = min(int(name[:20]) for name in os.listdir(f"{copy}/topics/t/0") if name.endswith(".log"))
        assert local == 0 or (found.end or 0) >= local
        assert found.begin(local) == 0


def test_ages_count_from_what_a_row_says(tmp_path):
    limits = Limits(segment_bytes=SEGMENT, tier="on", retention_age=1000.0, local_retention_age=0.0001)
    broker = TieredBroker(tmp_path, limits, object_bytes=8192)
    broker.send(*lines(300))
    broker.now_s += 1
    broker.turn()
    broker.turn()
    assert broker.local()[0] > 200 and broker.begin() == 0
    broker.now_s = (FIRST_TS + 150) / 1e6 + 1000.0
    broker.tick()
    assert broker.begin() == max(following for _, following in broker.rows() if following <= 151)
    broker.stop()
