"""The guards of the Broadcast Queue, each taken out of a copy of the code, and what notices that.

python tests/model/bq_mutants.py [word …]     how each mutant breaks its story, and the first random walk that it breaks
"""

import sys
import time

from bq_code import load
from bq_explorer import Walk, walk
from bq_mutants_of_publishers import LOCK, PUBLISHER
from bq_mutants_of_subscribers import SUBSCRIBER
from bq_mutants_of_trimming import TRIMMING
from bq_stage import Mutant, tell

MUTANTS = [*LOCK, *PUBLISHER, *TRIMMING, *SUBSCRIBER]


def breaks(mutant: Mutant) -> str:
    """Return how the mutant breaks its story; "" if it does not."""
    code = load(mutant.edits)
    try:
        tell(mutant.story, code)
    except Exception as error:  # also one that the mutant itself runs into
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def find(mutant: Mutant, walks: int) -> tuple[int, str] | None:
    """Return the first walk that the mutant breaks, and how; None if it survives them all."""
    for seed in range(walks):
        code = load(mutant.edits)
        try:
            walk(code, Walk(seed))
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main(words: list[str]) -> int:
    left = 0
    for mutant in MUTANTS:
        if words and not any(word in mutant.name for word in words):
            continue
        begun = time.monotonic()
        told, found = breaks(mutant), find(mutant, 100)
        left += not told
        print(f"{time.monotonic() - begun:6.1f} s  {mutant.name}: {told or 'NOT NOTICED'}; {found}", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
