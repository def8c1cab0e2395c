"""The options of a producer, as a type checker sees them."""

from typing import get_type_hints

from kmq.client.options import Choices, Options


def test_a_producers_options_are_written_once_in_effect():
    assert get_type_hints(Choices) == get_type_hints(Options)
