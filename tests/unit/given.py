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


def examples(max_examples: int, *strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test with so many examples of what the strategies give, from the seed of this run."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        seeded: Any = hypothesis.seed(SEED)  # type: ignore[no-untyped-call]
        given: Callable[..., None] = limits(max_examples)(seeded(hypothesis.given(*strategies)(test)))

        def run(*arguments: Any) -> None:
            print(f"MODEL_SEED={SEED}")
            given(*arguments)

        return run

    return decorate
