"""The guards of consumer groups, each taken out of a copy of the code, and the story that must notice.

python tests/model/groups_mutants.py     how each mutant breaks its story
"""

import sys
from typing import NamedTuple

import groups_stories as stories
import groups_stories_of_bounds as bounds
from groups_code import Edit, load
from groups_stage import Story, tell


class Mutant(NamedTuple):
    """What is wrong with it, who notices, and what is changed."""

    name: str
    story: Story
    edit: Edit


MUTANTS = [
    Mutant(
        "what is owned is given to another at once",
        stories.what_moves_is_read_by_the_new_member_only_after_the_old_one_gave_it_up,
        ("group", "            if partition not in self.owners:\n", "            if True:\n"),
    ),
    Mutant(
        "to know an assignment is to give up what it lacks",
        stories.what_moves_is_read_by_the_new_member_only_after_the_old_one_gave_it_up,
        (
            "coordinator",
            "        entry.answer(found.fence(entry, generation), now)\n",
            "        found.give_up(entry, found.fence(entry, generation), now)\n"
            "        entry.answer(found.fence(entry, generation), now)\n",
        ),
    ),
    Mutant(
        "a step does not begin a generation",
        stories.what_moves_is_read_by_the_new_member_only_after_the_old_one_gave_it_up,
        ("group", "max(self.generation, self.least) + 1", "max(self.generation, self.least, 1)"),
    ),
    Mutant(
        "an eager assignor asks only for what moves",
        stories.an_eager_assignor_gives_only_when_everything_was_given_up,
        ("group", "not self._is_cooperative() and bool(ownership.owners)", "False"),
    ),
    Mutant(
        "an eager assignor gives before all have answered",
        stories.an_eager_assignor_gives_only_when_everything_was_given_up,
        ("group", "self._is_cooperative() or not self._ownership.revoking", "True"),
    ),
    Mutant(
        "the first member decides on the assignor",
        stories.members_that_offer_several_assignors_vote,
        ("group", "            self.assignor = self._vote()\n", "            pass\n"),
    ),
    Mutant(
        "an assignor that not all offer is voted for",
        stories.members_that_offer_several_assignors_vote,
        ("group", "if count == len(self.members)}", "if count}"),
    ),
    Mutant(
        "a member that joins again has to agree with its former self",
        stories.members_that_offer_several_assignors_vote,
        ("group", " - (name in former) == others", " == len(self.members)"),
    ),
    Mutant(
        "cooperative-sticky asks for everything",
        stories.members_that_keep_theirs_go_on_while_others_move,
        ("group", "(is_all or self.target.get(partition) != owner)", "True"),
    ),
    Mutant(
        "an old generation is heard",
        stories.a_commit_in_an_old_generation_is_refused,
        ("group", "if not member.generation <= generation <= self.generation:", "if generation > self.generation:"),
    ),
    Mutant(
        "a generation to come is heard",
        stories.a_commit_in_an_old_generation_is_refused,
        ("group", "if not member.generation <= generation <= self.generation:", "if generation < member.generation:"),
    ),
    Mutant(
        "a member may commit what another reads",
        stories.a_commit_for_a_partition_of_another_is_refused,
        (
            "group",
            "            since = member.owned.get(partition)\n",
            "            since = member.owned.get(partition, 0)\n",
        ),
    ),
    Mutant(
        "a partition that is not there may be committed",
        stories.a_commit_for_a_partition_of_another_is_refused,
        ("coordinator", "return 0 <= partition.partition <", "return partition.partition <"),
    ),
    Mutant(
        "anybody may commit while there are members",
        stories.a_commit_for_a_partition_of_another_is_refused,
        (
            "coordinator",
            "            if found and found.members:\n                text",
            "            if False:\n                text",
        ),
    ),
    Mutant(
        "what is asked for may not be committed any more",
        stories.what_was_asked_for_may_be_committed_until_it_is_given_up,
        (
            "group",
            "            since = member.owned.get(partition)\n",
            "            since = None if partition in member.revoking else member.owned.get(partition)\n",
        ),
    ),
    Mutant(
        "a commit is believed to mean the partition of today",
        stories.a_partition_that_came_back_takes_no_commit_from_before,
        ("group", "if generation < since:", "if False:"),
    ),
    Mutant(
        "a topic declared anew is the old one",
        stories.a_partition_that_came_back_takes_no_commit_from_before,
        ("coordinator", "lambda partition: partition.topic not in reborn and registry", "lambda partition: registry"),
    ),
    Mutant(
        "an answer counts for what was asked later, too",
        stories.an_answer_counts_for_what_was_asked_up_to_its_generation,
        ("group", " if since <= generation]", "]"),
    ),
    Mutant(
        "who is silent stays",
        stories.who_is_silent_for_its_session_is_ended,
        ("group", "            self.last_beat + self.options.session_s,\n", ""),
    ),
    Mutant(
        "an alarm is set once only",
        stories.who_is_silent_for_its_session_is_ended,
        ("coordinator", "        else:\n            self.watch(group, member)\n", ""),
    ),
    Mutant(
        "a beat is not heard",
        stories.every_word_of_a_member_is_a_sign_of_life,
        ("coordinator", "        entry.last_beat = now\n        if polled:", "        if polled:"),
    ),
    Mutant(
        "void alarms are kept",
        bounds.what_members_leave_behind_does_not_grow,
        ("group", "if len(self._heap) > 2 * len(self._at) + 64:", "if False:"),
    ),
    Mutant(
        "a beat counts as asking for records",
        stories.who_asks_for_no_records_is_ended_although_it_beats,
        (
            "coordinator",
            "        if polled:\n            entry.last_poll",
            "        if True:\n            entry.last_poll",
        ),
    ),
    Mutant(
        "who gives nothing up stays",
        stories.who_does_not_give_up_what_moves_is_ended,
        ("group", "            self.revoke_by,\n        )", "        )"),
    ),
    Mutant(
        "each new generation prolongs the time to take it",
        stories.who_never_takes_its_assignment_is_ended,
        (
            "group",
            "self.sync_by = min(self.sync_by, now + self.options.rebalance_s)",
            "self.sync_by = now + self.options.rebalance_s",
        ),
    ),
    Mutant(
        "a generation without news has to be answered",
        stories.who_keeps_what_it_has_need_not_answer,
        ("group", "        if self.has_news:\n            self.changed", "        if True:\n            self.changed"),
    ),
    Mutant(
        "what is given is no news",
        stories.who_does_not_take_what_it_is_given_later_is_ended,
        ("group", "        self.has_news = True\n        self.owned[", "        self.owned["),
    ),
    Mutant(
        "what is gone is no news",
        stories.who_is_not_told_that_a_topic_is_gone_is_ended,
        ("group", "        self.has_news |= self.revoking", "        self.has_news &= self.revoking"),
    ),
    Mutant(
        "an older member of the same name stays",
        stories.a_newer_member_of_the_same_name_takes_the_place_of_the_older,
        ("coordinator", "    return None if holder == member else holder\n", "    return None\n"),
    ),
    Mutant(
        "a newer member of the same name begins with nothing",
        stories.a_static_member_keeps_its_place_under_an_eager_assignor_too,
        ("group", "        self._ownership.rename(old, member.id)\n", "        self._is_stale = True\n"),
    ),
    Mutant(
        "an earlier attempt of a run takes the place of a later one",
        stories.an_earlier_attempt_of_a_run_takes_no_place,
        ("coordinator", "this.is_before(last)", "False"),
    ),
    Mutant(
        "a program that is started again is refused",
        stories.an_earlier_attempt_of_a_run_takes_no_place,
        ("coordinator", "this.is_before(last)", "last.number > this.number"),
    ),
    Mutant(
        "an older member of the same name comes back",
        stories.a_newer_member_of_the_same_name_takes_the_place_of_the_older,
        ("coordinator", "and holder != member and not takes_name:", "and False:"),
    ),
    Mutant(
        "who joins again has to give everything up",
        stories.who_asks_for_the_same_again_moves_nothing,
        ("group", "        if owned is not None:\n", "        if True:\n            owned = owned or ()\n"),
    ),
    Mutant(
        "what a member that joins again does not name stays its own",
        stories.who_joins_again_without_a_partition_has_given_it_up,
        ("group", "        if owned is not None:\n", "        if False:\n"),
    ),
    Mutant(
        "what is gone is asked for",
        stories.a_topic_that_is_deleted_is_read_by_nobody,
        ("group", "        self._ownership.drop_gone(exists)\n", ""),
    ),
    Mutant(
        "a topic is not watched once nobody subscribes to it",
        stories.a_topic_that_is_unsubscribed_and_deleted_is_read_by_nobody,
        (
            "coordinator",
            "        if not group.members:\n            self._watch_only(group, set())\n",
            "        self._watch_only(group, set(group.topics))\n",
        ),
    ),
    Mutant(
        "all lives have the same generations",
        stories.each_life_has_generations_and_ids_of_its_own,
        ("coordinator", "starts * GENERATIONS", "0"),
    ),
    Mutant(
        "a member's memory is not believed",
        stories.a_member_that_comes_back_tells_its_generation,
        ("coordinator", "found.least = max(found.least, resume.generation + UNSEEN)", "pass"),
    ),
    Mutant(
        "the records' generation is used again",
        stories.restored_groups_wait_for_their_members,
        ("coordinator", "max(found.least, generation + UNSEEN)", "found.least"),
    ),
    Mutant(
        "a group that was deleted begins anew",
        stories.a_group_that_was_deleted_begins_above_its_former_self,
        ("coordinator", "max(self._least_generation, group.generation, group.least)", "self._least_generation"),
    ),
    Mutant(
        "a group with members is deleted",
        stories.a_group_that_was_deleted_begins_above_its_former_self,
        (
            "coordinator",
            "        self.check_empty(group)\n        self._registry.forget",
            "        self._registry.forget",
        ),
    ),
    Mutant(
        "a commit does not keep a group",
        stories.a_group_without_members_and_commits_is_forgotten,
        (
            "coordinator",
            "found.has_commits, found.active = True, now\n        self._registry.changed(found)\n\n    def restore",
            "found.has_commits = True\n        self._registry.changed(found)\n\n    def restore",
        ),
    ),
    Mutant(
        "a refused join leaves a group behind",
        bounds.names_and_times_beyond_the_bounds_are_refused,
        (
            "coordinator",
            "        self._check_join(group, member, options, resume)\n",
            "        self._registry.make(group, now)\n        self._check_join(group, member, options, resume)\n",
        ),
    ),
    Mutant(
        "a full house takes the last place of each group",
        bounds.members_beyond_the_bounds_are_refused,
        ("coordinator", " and count >= self.limits.own_members:", ":"),
    ),
    Mutant(
        "who leaves is counted for ever",
        bounds.all_groups_together_have_a_bound_too,
        ("coordinator", "        self.changed(group, -1)\n", "        self.changed(group)\n"),
    ),
    Mutant(
        "subscriptions of who left are counted for ever",
        bounds.all_subscriptions_together_have_a_bound,
        ("coordinator", "topics - group.counted", "max(0, topics - group.counted)"),
    ),
    Mutant(
        "a group with commits makes room for another",
        bounds.a_group_that_was_never_used_makes_room,
        ("coordinator", "if group.members or group.has_commits:", "if group.members:"),
    ),
    Mutant(
        "one tick does everything that is due",
        bounds.many_groups_that_are_due_at_once_let_others_have_their_turn,
        ("coordinator", "while work < WORK and (key", "while (key"),
    ),
    Mutant(
        "each join is a rebalance",
        stories.many_who_join_at_once_cause_one_rebalance,
        ("coordinator", "min(MAX_PACE_S, PACE_S * len(group.members))", "0.0"),
    ),
]


def breaks(mutant: Mutant) -> str:
    """Return how the mutant breaks its story; "" if it does not. Raises ValueError if the code has changed."""
    code = load([mutant.edit])
    try:
        tell(mutant.story, code)
    except Exception as error:  # also one that the mutant itself runs into
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def main() -> int:
    left = 0
    for mutant in MUTANTS:
        broken = breaks(mutant)
        left += not broken
        print(f"{mutant.name}: {broken or 'NOT NOTICED'}", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
