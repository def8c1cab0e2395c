"""Consumer groups, story by story (groups_stories, groups_stories_of_bounds)."""

import groups_stories
import groups_stories_of_bounds
import pytest
from groups_code import load
from groups_stage import tell

STORIES = [
    story
    for module in (groups_stories, groups_stories_of_bounds)
    for name, story in vars(module).items()
    if getattr(story, "__module__", "") == module.__name__
    and not name.startswith("_")
    and story.__code__.co_argcount == 1
]
STORIES.remove(groups_stories.kinds)
CODE = load()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_groups_keep_their_promises(story):
    tell(story, CODE)
