"""The register of a shard: its text, who descends from whom, and what a write may do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeded import limits, seeded

from kmq.cluster.register import (
    MARKS,
    SIZES,
    Register,
    UnreadableRegister,
    Version,
    begin,
    check_size,
    decode,
    new_mark,
)
from kmq.errors import ConfigError

KEY = "kmq/dev/replicas/s/register"
A, B, C = "aaaaaaaaaaaaaaa1", "bbbbbbbbbbbbbbb2", "ccccccccccccccc3"
LINEAGE = "0123456789abcdef" * 2

FIRST = begin(LINEAGE, ["a", "b", "c"], None, A)


def full() -> Register:
    return FIRST.with_isr([A, B]).with_isr([A, B, C])


MARK = st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")


@st.composite
def registers(draw):
    size = draw(st.sampled_from(SIZES))
    brokers = draw(
        st.lists(
            st.from_regex(r"[a-z0-9_][a-zA-Z0-9_.-]{0,9}", fullmatch=True), min_size=size, max_size=size, unique=True
        )
    )
    isr = tuple(sorted(draw(st.sets(MARK, min_size=1, max_size=5))))
    first, marks = draw(st.integers(1, 10**9)), draw(st.lists(MARK, min_size=1, max_size=20))
    return Register(
        draw(st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")),
        tuple(brokers),
        draw(st.integers(size // 2 + 1, size)),
        draw(st.integers(1, 10**17)),
        draw(st.sampled_from(("", *isr))),  # "": a hold
        isr,
        tuple(Version(first + at, mark) for at, mark in enumerate(marks)),
    )


@seeded
@limits(200)
@given(registers())
def test_what_was_encoded_is_decoded_as_it_was(register):
    assert decode(register.encode(), KEY) == register


def is_refused_or_itself(text):
    """True if this text is refused, or is the one text of the register that it decodes to."""
    try:
        return decode(text, KEY).encode() == text
    except UnreadableRegister as error:
        return KEY in str(error) and repr(text[:40]) in str(error)


@pytest.mark.parametrize("register", [FIRST, full()], ids=["first", "full"])
def test_no_changed_byte_is_passed_over(register):
    text = register.encode()
    for at in range(len(text)):
        for byte in b"\0\t\n\r !*+,-./019:=AZ_afgz~\x80\xff":
            changed = text[:at] + bytes([byte]) + text[at + 1 :]
            assert is_refused_or_itself(changed), changed
            assert changed == text or not same_meaning(changed, register)


def same_meaning(text, register):
    try:
        return decode(text, KEY) == register
    except UnreadableRegister:
        return False


@pytest.mark.parametrize("register", [FIRST, full()], ids=["first", "full"])
def test_a_text_with_bytes_more_or_less_is_refused(register):
    text = register.encode()
    for at in range(len(text)):
        assert is_refused_or_itself(text[:at]) and not same_meaning(text[:at], register)
        for byte in b" \n0a,:=":
            longer = text[:at] + bytes([byte]) + text[at:]
            assert is_refused_or_itself(longer) and not same_meaning(longer, register)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("level=3", "level=02"),
        ("level=3", "level=0"),
        ("min_insync=2", "min_insync=1"),
        ("min_insync=2", "min_insync=4"),
        ("brokers=a,b,c", "brokers=a,b"),
        ("brokers=a,b,c", "brokers=a,b,b"),
        ("epoch=1", "epoch=0"),
        ("epoch=1", "epoch=\u00b2"),
        (f"isr={A},{B}", "isr="),
        (f"leader={A}", f"leader={C}"),
        (f"isr={A},{B}", f"isr={B},{A}"),
        (f"isr={A},{B}", f"isr={A},{A}"),
        ("marks=1:", "marks=2:"),
        ("marks=1:", "marks=0:"),
    ],
)
def test_a_register_that_kmq_would_not_write_is_refused(old, new):
    text = FIRST.with_isr([A, B]).encode().decode()
    assert old in text
    with pytest.raises(UnreadableRegister, match=r"KMQ did not write it"):
        decode(text.replace(old, new, 1).encode(), KEY)


def test_a_register_of_a_later_level_is_named_as_such_whatever_else_it_holds():
    text = FIRST.encode().replace(b"level=3 ", b"level=4 zones=x,y ")
    with pytest.raises(UnreadableRegister, match=r"level 4; this release understands 3"):
        decode(text, KEY)


def test_a_register_descends_from_each_version_it_has_and_from_no_other():
    second = FIRST.with_isr([A, B])
    other = FIRST.with_isr([A, C])  # the same number, as after a restored backup
    assert second.version.number == other.version.number == 2
    assert second.descends_from(FIRST.version) and second.descends_from(second.version)
    assert not FIRST.descends_from(second.version) and not other.descends_from(second.version)


def test_only_the_last_thousand_versions_are_kept():
    register = FIRST
    for _ in range(MARKS + 5):
        register = register.elect(A, [A])
    assert len(register.marks) == MARKS and register.version.number == MARKS + 6
    assert not register.descends_from(FIRST.version)
    assert decode(register.encode(), KEY) == register
    assert len(register.encode()) < 30_000


def test_an_election_raises_epoch_and_version_and_lets_the_dead_leave():
    register = full()
    after = register.elect(B, [B, C])
    assert (after.epoch, after.leader, after.isr) == (2, B, (B, C))
    assert after.version.number == register.version.number + 1 and after.marks[:-1] == register.marks


def test_the_dead_stay_where_the_isr_would_become_smaller_than_min_insync():
    assert full().elect(C, [C]).isr == (A, C)
    assert FIRST.with_isr([A, B]).elect(B, [B, C]).isr == (A, B)
    assert FIRST.elect(A, []).isr == (A,)


def test_who_is_not_in_the_isr_is_never_elected():
    with pytest.raises(ValueError, match="must be of the ISR"):
        FIRST.elect(B, [A, B, C])


@pytest.mark.parametrize("isr", [[A], [B, C], []])
def test_a_leader_never_shrinks_the_isr_below_min_insync_nor_leaves_it(isr):
    with pytest.raises(ValueError, match="must hold the leader and at least 2"):
        full().with_isr(isr)


@pytest.mark.parametrize(
    ("brokers", "min_insync", "said"),
    [
        ("a,b", None, "1, 3 or 5 brokers, not 2; with 2, one that fails stops the shard"),
        ("a,b,c,d", None, "1, 3 or 5 brokers, not 4; with 4, no more may fail than with 3"),
        ("a,b,c,d,e,f", None, "1, 3 or 5 brokers, not 6"),
        ("a,b,c", 1, "--min-insync 1: must be between 2 and 3 of 3"),
        ("a,b,c", 4, "--min-insync 4: must be between 2 and 3 of 3"),
        ("a,a,b", None, "names a broker twice"),
        ("a,,b", None, "'' must match"),
        ("a,b c,d", None, "'b c' must match"),
    ],
)
def test_a_shard_that_cannot_work_is_refused_with_the_reason(brokers, min_insync, said):
    with pytest.raises(ConfigError) as refused:
        check_size(brokers.split(","), min_insync)
    assert said in str(refused.value)


@pytest.mark.parametrize(("count", "majority"), [(1, 1), (3, 2), (5, 3)])
def test_min_insync_is_a_majority_unless_more_is_asked_for(count, majority):
    brokers = [f"b{number}" for number in range(count)]
    assert check_size(brokers, None) == majority
    assert [check_size(brokers, least) for least in range(majority, count + 1)] == [*range(majority, count + 1)]


def test_a_version_is_read_in_its_one_form():
    version = Version(31, new_mark())
    assert Version.parse(str(version)) == version
    assert not any(map(Version.parse, ["", "31", "31:", f"031:{new_mark()}", f"31:{new_mark()}0", f"-1:{new_mark()}"]))
