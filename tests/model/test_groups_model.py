"""Consumer groups under whatever may happen in whatever order, with a second account beside them (groups_ghost)."""

import pytest
from groups_code import load
from groups_machine import machine
from hypothesis.stateful import run_state_machine_as_test
from seeded import limits, seeded


def run(examples, steps):
    run_state_machine_as_test(seeded(machine(load())), settings=limits(examples, stateful_step_count=steps))


def test_every_promise_of_groups_holds_on_random_walks():
    run(100, 50)


@pytest.mark.soak
def test_every_promise_of_groups_holds_on_thousands_of_walks():
    run(10_000, 60)
