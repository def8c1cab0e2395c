"""Patterns of topics that clients of Kafka subscribe to: what is taken, and how long a match may take."""

import time

import pytest

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.kafka.groups848 import pattern_of
from kmq.gateway.kafka.wire import INVALID_REGULAR_EXPRESSION

NAME = "a" * 199 + "-"  # as long as a name can be, and no pattern below matches it


@pytest.mark.parametrize(
    "text",
    [
        "orders",
        "orders-.*",
        ".*-dlq|audit.*",
        "(eu|us|ap)-orders-[0-9]+",
        "(" + "|".join("abcdefghijklmnopqrstuvwxyz") + ")[a-z]*",
        ".*a.*",
        "a?b?c?".replace("a", "[a]").replace("b", "[b]").replace("c", "[c]"),
        "((a|b)|(c|d))",
    ],
)
def test_what_people_write_is_taken_and_quickly_matched(text):
    pattern, began = pattern_of(text), time.process_time()
    for _ in range(5):
        pattern.fullmatch(NAME)
    assert (time.process_time() - began) / 5 < 0.2


@pytest.mark.parametrize(
    "text",
    ["(a|a)" * 17 + "b", ".?" * 17 + "b", ".*.*.*", "(.*|a)" * 3, "((a|a)(a|a)|(a|a)(a|a))" * 6, "(.*a|.*b).*.?.?"],
)
def test_what_may_take_long_is_refused(text):
    with pytest.raises(RequestRefused) as refused:
        pattern_of(text)
    assert refused.value.error == INVALID_REGULAR_EXPRESSION


@pytest.mark.parametrize("text", ["(a", "a)", "a))((", "(?:a)", "(a+)+", "a{2}", "\\d", "a" * 501])
def test_what_is_no_safe_pattern_is_refused(text):
    with pytest.raises(RequestRefused):
        pattern_of(text)
