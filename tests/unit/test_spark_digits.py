"""Decimal numbers parsed eight digits at a time: the same as int(), or nothing."""

import random

import pytest

np = pytest.importorskip("numpy")

from kmq.spark.source import columns  # noqa: E402


def parsed(texts):
    data = np.frombuffer(b"|".join(texts) + b"|" * 16, np.uint8)
    ends = np.cumsum([len(text) + 1 for text in texts]) - 1
    found = columns.parse_numbers(data, ends - [len(text) for text in texts], ends)
    return None if found is None else found.tolist()


@pytest.mark.parametrize("widths", [(1, 8), (8, 8), (9, 16), (10, 10), (16, 16), (6, 6)])
def test_numbers_are_what_int_makes_of_them(widths):
    rng = random.Random(widths[0])
    texts = [b"%0*d" % (width, rng.randrange(10**width)) for width in (rng.randint(*widths) for _ in range(500))]
    assert parsed([*texts, b"9" * widths[1], b"0" * widths[0]]) == [*map(int, texts), 10 ** widths[1] - 1, 0]


@pytest.mark.parametrize("width", [1, 5, 8, 9, 13, 16])
def test_one_byte_that_is_no_digit_is_found_wherever_it_is(width):
    for at in range(width):
        for byte in (*range(48), *range(58, 256)):
            bad = bytearray(b"7" * width)
            bad[at] = byte
            assert parsed([b"1" * width, bytes(bad)]) is None


@pytest.mark.parametrize("texts", [[], [b""], [b"1" * 17], [b"1" * 8, b"1" * 9], [b"+1"], [b"-1"], [b" 1"]])
def test_what_it_cannot_parse_is_left_to_the_caller(texts):
    assert parsed(texts) is None


def test_numbers_at_both_ends_of_a_buffer_are_parsed_or_left():
    data = np.frombuffer(b"12|1234567890|345", np.uint8)
    parse = lambda begin, end: columns.parse_numbers(data, np.array([begin]), np.array([end]))  # noqa: E731
    assert parse(0, 2).tolist() == [12] and parse(3, 13).tolist() == [1234567890]
    assert parse(14, 17) is None  # there are no eight bytes to look at
