"""Hypothesis as these tests use it: a seed that is printed and can be given, a fixed number of examples, no files."""

import os
import random
from collections.abc import Callable
from typing import Any

import hypothesis

SEED = int(os.environ.get("MODEL_SEED", random.SystemRandom().randrange(1 << 32)))


def limits(max_examples: int, **more: Any) -> hypothesis.settings:
    """Settings that depend on nothing but the seed. Shrinking is bounded by the library: five minutes."""
    checks = list(hypothesis.HealthCheck)
    return hypothesis.settings(
        max_examples=max_examples, deadline=None, database=None, suppress_health_check=checks, print_blob=True, **more
    )


def seeded(test: Any) -> Any:
    """Return a test, or a class of a state machine, that begins with the seed of this run."""
    print(f"MODEL_SEED={SEED}")
    seed: Any = hypothesis.seed
    return seed(SEED)(test)


def examples(max_examples: int, *strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test of pytest with so many examples of what the strategies give, from the seed of this run."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run() -> None:  # without the arguments of the test, which pytest would take for fixtures
            given: Any = hypothesis.given(*strategies)
            limits(max_examples)(seeded(given(test)))()

        return run

    return decorate
