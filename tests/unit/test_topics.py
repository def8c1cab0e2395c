"""topic.toml: what is declared is what is read, and limits of its own outlive the router's pen."""

import pytest
from fake_logger import FakeLogger
from made_up import no_room

from kmq.errors import ConfigError
from kmq.log import topics
from kmq.log.segment import LIMITS, Limits
from kmq.log.topics import Declaration
from kmq.router.queues import Queues

OWN = {"segment_bytes": "1 MiB", "segment_age": "1d", "retention_age": "30d", "retention_bytes": "1073741824"}


@pytest.mark.parametrize(
    "declared",
    [
        Declaration(1),
        Declaration(7, 12),
        Declaration(3, None, OWN),
        Declaration(3, 9, {"retention_age": "never"}),
    ],
)
def test_a_declaration_is_read_as_it_was_written(data, declared):
    (path := topics_dir(data, "t") / "topic.toml").write_bytes(declared.text())
    found = topics.read(data, "t")
    assert (found.partitions, found.from_seq, found.limits) == (declared.partitions, declared.from_seq, declared.limits)
    assert topics.load(data, "t") == (declared.partitions, declared.from_seq)
    assert path.read_bytes() == found.text()


def topics_dir(data, name):
    import pathlib

    path = pathlib.Path(data) / "topics" / name
    path.mkdir()
    return path


@pytest.mark.parametrize("text", [b"", b"partit", b"from_seq = 5\n", b"partitions = x\n"])
def test_a_file_without_its_text_is_made_good_from_the_partitions_there(data, text):
    directory = topics_dir(data, "t")
    (directory / "topic.toml").write_bytes(text)
    assert topics.load(data, "t") == (1, 1)
    for number in range(3):
        (directory / str(number)).mkdir()
    assert topics.load(data, "t") == (3, 1)


def adopt(data, log=None):
    made = Queues(data, no_room, log or FakeLogger())
    made.recover(0)
    return made


def test_the_router_keeps_and_follows_a_topics_own_limits_when_it_writes_its_seq(data):
    topics.declare(data, "t", 2, OWN)
    for _ in range(2):  # adopted, then read at a start
        made = adopt(data)
        limits = made.in_force.limits_of("t")
        own, others = [1 << 20, 86400, 30 * 86400, 1 << 30], ["delete", 86400, 0, "CreateTime", "", "off"]
        assert [getattr(limits, name) for name in LIMITS] == own + others + own[
            2:
        ]  # what stays on the disk: as the whole
        assert topics.read(data, "t").limits == OWN and topics.load(data, "t") == (2, 1)
        made.close()


def test_an_invalid_limit_is_refused_at_the_declaration_and_skipped_by_the_router(data):
    with pytest.raises(ConfigError, match="retention_age = 'soon'"):
        topics.declare(data, "t", 1, {"retention_age": "soon"})
    assert topics.names(data) == []
    (topics_dir(data, "t") / "topic.toml").write_text('partitions = 1\nretention_age = "soon"\n')
    logger = FakeLogger()
    made = adopt(data, logger)
    assert not made.in_force.has_own_limits("t") and logger.names == ["topic_limits_ignored", "topic_adopted"]
    assert "retention_age = 'soon'" in str(logger.events[0][1]["reason"])
    made.close()


def test_whose_time_a_message_has_is_a_limit_of_a_topic():
    assert Limits().message_timestamp_type == "CreateTime"
    own = {"message_timestamp_type": "LogAppendTime"}
    assert Limits().with_changes(own).message_timestamp_type == "LogAppendTime"
    with pytest.raises(ConfigError, match="must be CreateTime or LogAppendTime"):
        Limits().with_changes({"message_timestamp_type": "logappendtime"})


def test_a_number_of_deliveries_is_a_limit_of_a_topic():
    assert Limits().max_deliveries == 0
    assert [Limits().with_changes({"max_deliveries": text}).max_deliveries for text in ("5", "none")] == [5, 0]
    for text in ("0", "-1", "five", "1" * 10):
        with pytest.raises(ConfigError, match="must be 1 to 999999999, or none"):
            Limits().with_changes({"max_deliveries": text})
