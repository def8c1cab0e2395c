"""Each guard of consumer groups is missed by the story that is named for it (groups_mutants)."""

import pytest
from groups_mutants import MUTANTS, breaks


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_story_notices(mutant):
    assert breaks(mutant)
