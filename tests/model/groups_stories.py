"""What consumer groups promise, each promise as a story. Topic t has four partitions, u has two."""

from groups_ghost import demand
from groups_stage import Stage

from kmq.wire.attempts import Attempt

T = [("t", number) for number in range(4)]
U = [("u", number) for number in range(2)]
EAGER = ("range", "roundrobin", "sticky")


def kinds(events: list[object]) -> list[str]:
    """`Assigned b-1`: what was sent to whom, in order."""
    return [f"{type(event).__name__} {getattr(event, 'member', '')}".strip() for event in events]


def pair(stage: Stage) -> tuple[str, str]:
    """Two members that share t evenly."""
    first = stage.join()
    stage.settle()
    second = stage.join()
    stage.settle()
    demand(len(stage.reads(first)) == len(stage.reads(second)) == 2, "they do not share")
    return first, second


# --- joining and leaving ----------------------------------------------------------------------------------------------


def a_member_alone_reads_every_partition_of_its_topics(stage: Stage) -> None:
    demand(stage.state() == "dead", "a group that nobody knows is dead")
    member = stage.join("t", "u")
    demand(stage.state() == "preparing", "the target is made by the next tick")
    demand(kinds(stage.tick()) == [f"Assigned {member}"], "it is told")
    demand(stage.state() == "completing", "it has not answered")
    demand(stage.sync(member, 1) == "" and stage.state() == "stable", "it has")
    demand(stage.reads(member) == T + U and stage.generation() == 1, "it reads everything")


def what_moves_is_read_by_the_new_member_only_after_the_old_one_gave_it_up(stage: Stage) -> None:
    first = stage.join()
    stage.settle()
    second = stage.join()
    events = stage.tick()
    demand(kinds(events) == [f"Revoke {first}", f"Assigned {first}", f"Assigned {second}"], f"{events}")
    moved = list(events[0].partitions)
    demand(len(moved) == 2 and stage.reads(second) == [], "two move, and not yet")
    stage.sync(second)
    stage.sync(first)
    demand(stage.state() == "completing", "knowing is not giving up")
    stage.forward(5.0)
    demand(stage.reads(second) == [], "not yet")
    stage.revoked(first)
    stage.tick()
    demand([*stage.reads(second)] == moved, "now")
    demand(stage.generation() == 3, "a generation for asking and one for giving")


def members_that_keep_theirs_go_on_while_others_move(stage: Stage) -> None:
    first = stage.join()
    stage.settle()
    stage.join()
    stage.tick()
    demand(len(stage.reads(first)) == 2, "half of it does not move")
    for partition in stage.reads(first):
        demand(stage.commit(first, partition, generation=1) == "", "it has not yet heard of generation 2")
        demand(stage.commit(first, partition, generation=2) == "", "it has")


def an_eager_assignor_gives_only_when_everything_was_given_up(stage: Stage) -> None:
    for assignor in EAGER:
        members = [stage.join(group=assignor, assignors=(assignor,)) for _ in range(2)]
        stage.settle(assignor)
        new = stage.join(group=assignor, assignors=(assignor,))
        events = stage.tick()
        demand(kinds(events)[:2] == [f"Revoke {member}" for member in sorted(members)], f"{events}")
        demand(stage.state(assignor) == "preparing", "it waits for both")
        stage.revoked(members[0], group=assignor)
        another = stage.join(group=assignor, assignors=(assignor,))
        stage.forward(1.0)
        demand(not any(stage.reads(member, assignor) for member in (*members, new)), "it still waits for one")
        stage.revoked(members[1], group=assignor)
        stage.tick()
        loads = [len(stage.reads(member, assignor)) for member in (*members, new, another)]
        demand(loads == [1, 1, 1, 1], f"{loads}")
        stage.settle(assignor)


def who_leaves_makes_room_at_once(stage: Stage) -> None:
    first, second = pair(stage)
    demand(stage.leave(second) == "", "it leaves")
    demand(kinds(stage.tick()) == [f"Assigned {first}"] and stage.reads(first) == T, "the other reads everything")
    demand(stage.leave(second) == "unknown_member", "it has left already")
    stage.leave(first)
    demand(stage.state() == "empty", "the last one has left")


def who_asks_for_the_same_again_moves_nothing(stage: Stage) -> None:
    first, second = pair(stage)
    generation = stage.generation()
    demand(stage.join(member=second) == second, "it is who it was")
    demand(stage.forward(1.0) == [] and stage.generation() == generation, "nothing happens")
    stage.join("u", member=second)
    stage.settle()
    demand(stage.reads(first) == T and stage.reads(second) == U, "it asked for something else")


def who_joins_again_without_a_partition_has_given_it_up(stage: Stage) -> None:
    first = stage.join()
    stage.settle()
    second = stage.join()
    stage.tick()
    kept = stage.reads(first)
    stage.join(member=first, resume=stage.code.protocol.Resume(owned=kept))
    stage.forward(0.1)
    demand(len(stage.reads(second)) == 2, "what it did not name has moved on")
    stage.join(member=first, resume=stage.code.protocol.Resume(owned=()))
    demand(stage.reads(first) == [] and stage.commit(first, kept[0]) == "fenced", "it reads nothing now")
    stage.settle()


def many_who_join_at_once_cause_one_rebalance(stage: Stage) -> None:
    for _ in range(50):
        stage.join()
    stage.forward(0.0)
    demand(stage.generation() == 1, "one for all of them")
    for _ in range(50):
        stage.join()
    stage.forward(0.049)
    demand(stage.generation() == 1, "fifty members rebalance once in fifty milliseconds")
    stage.forward(0.002)
    demand(stage.generation() == 2, "and then they do")


def the_callers_of_http_without_a_name_are_one_member(stage: Stage) -> None:
    shared = stage.code.protocol.SHARED
    demand(stage.commit(shared, T[0]) == "", "nobody is a member")
    demand(stage.join("t", member=shared, keeps_topics=True) == shared, "it has a fixed id")
    stage.settle()
    stage.join("u", member=shared, keeps_topics=True)
    stage.settle()
    demand(stage.reads(shared) == T + U, "each call names only its own topic")
    demand(stage.commit(shared, *T, *U) == "", "without a generation")


def members_agree_on_an_assignor(stage: Stage) -> None:
    first = stage.join()
    demand(stage.join(assignors=("range",)) == "!assignor_differs", "another one")
    demand(stage.join(assignors=("best",)) == stage.join(assignors=()) == "!unknown_assignor", "none")
    demand(stage.join(member=first, assignors=("range",)) == first, "alone it may change its mind")
    stage.settle()


def members_that_offer_several_assignors_vote(stage: Stage) -> None:
    stage.join(assignors=("range", "roundrobin", "sticky"))
    stage.settle()
    demand(stage.protocol() == "range", "alone it has what it prefers")
    for _ in range(2):
        stage.join(assignors=("roundrobin", "range", "sticky"))
    stage.settle()
    demand(stage.protocol() == "roundrobin", "two of three prefer it")
    demand(stage.join(assignors=("cooperative-sticky",)) == "!assignor_differs", "nobody offers that")
    last = stage.join(assignors=("cooperative-sticky", "sticky"))
    stage.settle()
    demand(stage.protocol() == "sticky", "the only one that all offer")
    demand(stage.join(assignors=("roundrobin",)) == "!assignor_differs", "the last one does not")
    demand(stage.join(member=last, assignors=("range",)) == last, "it need not agree with its former self")
    stage.settle()
    demand(stage.protocol() == "range", "now that is the only one")


def members_move_to_another_assignor_one_after_the_other(stage: Stage) -> None:
    """A double bounce: all restart with both, and once more with the new one alone. Nobody is refused, nothing is lost."""
    members = [stage.join(assignors=("range",)) for _ in range(3)]
    stage.settle()
    for assignors in (("cooperative-sticky", "range"), ("cooperative-sticky",)):
        for member in list(members):
            stage.leave(member)
            members.remove(member)
            stage.settle()
            members.append(stage.join(assignors=assignors))
            demand(not members[-1].startswith("!"), f"{assignors} is refused: {members[-1]}")
            stage.settle()
    demand(stage.protocol() == "cooperative-sticky", "all have moved")


def an_assignor_may_change_while_partitions_are_asked_for(stage: Stage) -> None:
    first = stage.join(assignors=("cooperative-sticky", "range"))
    stage.settle()
    second = stage.join(assignors=("range",))
    stage.tick()
    demand(stage.protocol() == "range" and stage.reads(first) == [], "everything is asked for")
    stage.leave(second)
    stage.join(assignors=("cooperative-sticky",))
    stage.settle()
    demand(
        stage.protocol() == "cooperative-sticky" and len(stage.reads(first)) == 2,
        "it has given up what it was asked for",
    )


# --- who may commit ---------------------------------------------------------------------------------------------------


def a_commit_in_an_old_generation_is_refused(stage: Stage) -> None:
    first, second = pair(stage)
    mine = stage.reads(first)[0]
    newest = stage.generation()
    demand(stage.commit(first, mine, generation=newest) == "", "the newest")
    demand(stage.commit(first, mine, generation=newest - 1) == "fenced", "it has shown the newest")
    demand(stage.commit(first, mine, generation=newest + 1) == "fenced", "there is none")
    demand(stage.beat(first, newest - 1) == stage.sync(first, newest - 1) == "fenced", "whatever it says")
    demand(stage.revoked(second, newest + 1) == "fenced", "whatever it says")


def a_commit_for_a_partition_of_another_is_refused(stage: Stage) -> None:
    first, second = pair(stage)
    mine, other = stage.reads(first)[0], stage.reads(second)[0]
    demand(stage.commit(first, other) == "fenced", "it reads another's")
    demand(stage.commit(first, mine, other) == "fenced", "all or none")
    demand(stage.commit(first, ("t", 4)) == stage.commit(first, ("v", 0)) == "unknown_partition", "there is none")
    demand(stage.commit(first, ("t", -1)) == "unknown_partition", "nor this one")
    demand(stage.commit("nobody", mine) == "unknown_member", "who?")
    demand(stage.commit(None, mine) == "unknown_member", "only members may")


def what_was_asked_for_may_be_committed_until_it_is_given_up(stage: Stage) -> None:
    first = stage.join()
    stage.settle()
    stage.join()
    asked = stage.tick()[0].partitions
    demand(
        stage.commit(first, *asked, generation=1) == stage.commit(first, *asked, generation=2) == "", "the last time"
    )
    stage.revoked(first)
    demand(stage.commit(first, asked[0]) == "fenced", "it gave that up")


def a_partition_that_came_back_takes_no_commit_from_before(stage: Stage) -> None:
    member = stage.join()
    stage.settle()
    stage.topics(again=("t",), t=4, u=2)
    stage.tick()
    demand(stage.reads(member) == T and stage.generation() == 2, "the topic was declared anew")
    demand(stage.commit(member, T[0], generation=1) == "fenced", "that is the offset of another topic")
    demand(stage.commit(member, T[0], generation=2) == "", "this is not")


def groups_without_members_take_commits_of_anybody(stage: Stage) -> None:
    demand(stage.commit(None, T[0]) == "" and stage.state() == "empty", "it is known now")
    demand(stage.commit(None, ("t", 4)) == "unknown_partition", "there is none")
    demand(stage.commit("somebody", T[0]) == "unknown_member", "nobody is that")


def an_answer_counts_for_what_was_asked_up_to_its_generation(stage: Stage) -> None:
    first = stage.join("t")
    stage.settle()
    stage.join("t")
    stage.tick()
    stage.forward(0.1)
    stage.join("t")
    stage.join("t")
    asked = stage.tick()[0].partitions
    demand(len(asked) == 1, "more is asked for")
    demand(stage.revoked(first, 2) == "" and stage.commit(first, *asked) == "", "that was not meant")
    stage.revoked(first, 3)
    demand(stage.commit(first, *asked) == "fenced", "now it was")
    stage.settle()


# --- time -------------------------------------------------------------------------------------------------------------


def who_is_silent_for_its_session_is_ended(stage: Stage) -> None:
    first = stage.join()
    stage.settle()
    second = stage.join(session_s=6.0)
    stage.settle()
    begun = stage.now
    demand(kinds(stage.forward(5.9)) == [], "not yet")
    stage.beat(second)
    demand(kinds(stage.forward(5.9)) == [], "it gave a sign of life")
    demand(kinds(stage.forward(0.2)) == [f"Ended {second}", f"Assigned {first}"], "now")
    demand(stage.reads(first) == T and stage.beat(second) == "unknown_member", "its partitions are read by the other")
    stage.sync(first)
    synced = stage.now
    stage.stay(40.0, first)
    demand(stage.state() == "stable" and stage.now - begun > 40.0 and synced > begun, "the other stays")


def every_word_of_a_member_is_a_sign_of_life(stage: Stage) -> None:
    member = stage.join(session_s=6.0)
    stage.settle()
    for word in (
        stage.beat,
        stage.sync,
        stage.revoked,
        lambda m: stage.commit(m, T[0]),
        lambda m: stage.join(member=m),
    ):
        stage.forward(5.0)
        word(member)
    stage.forward(5.0)
    demand(stage.state() == "stable", "it is there")


def who_asks_for_no_records_is_ended_although_it_beats(stage: Stage) -> None:
    member = stage.join(max_poll_s=20.0)
    stage.settle()
    stage.stay(30.0, member)
    demand(stage.state() == "stable", "it polls")
    stage.beat(member, polled=True)
    for _ in range(19):
        stage.forward(1.0)
        stage.beat(member)
    events = stage.forward(1.1)
    demand([event.code for event in events] == ["poll_timeout"] and stage.state() == "empty", f"{events}")


def who_does_not_give_up_what_moves_is_ended(stage: Stage) -> None:
    first = stage.join(rebalance_s=10.0)
    stage.settle()
    second = stage.join(rebalance_s=10.0)
    stage.tick()
    for _ in range(9):
        stage.forward(1.0)
        for member in (first, second):
            stage.sync(member)
        stage.join(rebalance_s=10.0)  # each asks again, and that prolongs nothing
    events = stage.forward(1.1)
    demand(
        ("Ended", first, "rebalance_timeout") in [(type(e).__name__, *e[1:]) for e in events if len(e) == 3],
        f"{events}",
    )
    demand(len(stage.reads(second)) > 0, "its partitions have moved")
    stage.settle()


def who_never_takes_its_assignment_is_ended(stage: Stage) -> None:
    first = stage.join(rebalance_s=10.0)
    for _ in range(9):
        stage.forward(1.0)
        stage.beat(first)
        stage.topics(t=5 + stage.generation(), u=2)  # each time it is given something, and that prolongs nothing
    events = stage.forward(1.1)
    demand("rebalance_timeout" in [getattr(event, "code", "") for event in events], f"{events}")


def who_does_not_take_what_it_is_given_later_is_ended(stage: Stage) -> None:
    member = stage.join(rebalance_s=5.0)
    stage.settle()
    stage.topics(t=5, u=2)
    stage.stay(6.0, member)
    demand(stage.state() in ("empty", "dead"), "nobody reads what is new")


def idle_members_cost_a_few_wake_ups_in_each_session(stage: Stage) -> None:
    members = []
    for _ in range(100):
        stage.forward(0.01)
        members.append(stage.join())
    stage.settle()
    ticks = 0
    for _ in range(60):
        for member in members:
            stage.coordinator.beat("g", member, None, stage.now)
        end = stage.now + 3.0
        while (due := stage.coordinator.tick(stage.now)) < end:
            stage.now, ticks = due, ticks + 1
        stage.now = end
    demand(ticks <= 4 * 180 / 27, f"{ticks} wake-ups in 180 s for 100 members that beat every 3 s")
    for member in members:
        stage.beat(member)  # the ghost has not heard the others
    demand(stage.state() == "stable", "and all are there")


def a_commit_without_a_member_in_an_old_generation_is_refused(stage: Stage) -> None:
    former = stage.join(member="-")
    stage.settle()
    old = stage.generation()
    stage.leave(former)
    demand(stage.commit("-", T[0], generation=old) == "", "nobody was there since")
    later = stage.join()
    stage.settle()
    stage.leave(later)
    demand(stage.commit("-", T[0], generation=old) == "fenced", "somebody has read on meanwhile")
    demand(stage.commit(None, T[0], generation=stage.generation()) == "", "the last generation")
    demand(stage.commit("-", T[0]) == "", "and who names none")


def a_commit_of_who_never_was_a_member_names_no_generation(stage: Stage) -> None:
    former = stage.join()
    stage.settle()
    stage.leave(former)
    demand(stage.generation() > 0, "the group has had a member")
    demand(stage.commit(None, T[0], generation=0) == "", "as a pipeline commits: 0 is no generation of the group")


def a_group_without_members_and_commits_is_forgotten(stage: Stage) -> None:
    member = stage.join()
    stage.settle()
    stage.stay(50.0, member)
    stage.leave(member)
    stage.forward(stage.limits.retention_s - 1.0)
    demand(stage.state() == "empty", "not yet")
    stage.commit(None, T[0])
    stage.forward(stage.limits.retention_s - 1.0)
    demand(stage.state() == "empty", "it was committed to")
    demand(kinds(stage.forward(2.0)) == ["Forgotten"] and stage.state() == "dead", "now")
    demand(stage.due == float("inf"), "nothing is waited for")


def an_earlier_attempt_of_a_run_takes_no_place(stage: Stage) -> None:
    member = stage.join(member="m", attempt=Attempt("r", 2))
    stage.settle()
    had, generation = stage.reads(member), stage.generation()
    demand(stage.join("u", member="m", attempt=Attempt("r", 1)) == "!fenced", "it came late")
    demand(stage.reads(member) == had and not stage.tick() and stage.generation() == generation, "nothing has changed")
    for attempt in (Attempt("r", 2), Attempt("r", 3), Attempt("s", 1), None, Attempt("r", 1)):
        demand(stage.join(member="m", attempt=attempt) == member, "a later one, or of another run")


# --- static members ---------------------------------------------------------------------------------------------------


def a_newer_member_of_the_same_name_takes_the_place_of_the_older(stage: Stage) -> None:
    other = stage.join(static_name="other")
    stage.settle()
    old = stage.join(static_name="w1")
    stage.settle()
    had, kept, generation = stage.reads(old), stage.reads(other), stage.generation()
    new = stage.join(static_name="w1")
    events = stage.tick()
    demand(new != old and stage.reads(new) == had and stage.reads(other) == kept, "nothing moves but the name")
    demand(kinds(events) == [f"Assigned {other}", f"Assigned {new}"], f"{events}")
    demand(stage.generation() == generation + 1, "two owners never share a generation")
    demand(stage.commit(old, had[0]) == "unknown_member" and stage.commit(new, had[0]) == "", "the older is fenced")
    stage.sync(new)
    demand(stage.state() == "stable", "that was all")
    demand(stage.join(member=old, static_name="w1") == "!fenced", "it does not come back")


def a_static_member_keeps_its_place_under_an_eager_assignor_too(stage: Stage) -> None:
    other = stage.join(static_name="other", assignors=("range",))
    old = stage.join(static_name="w1", assignors=("range",))
    stage.settle()
    had = stage.reads(old)
    new = stage.join(static_name="w1", assignors=("range",))
    stage.tick()
    demand(stage.reads(new) == had and len(stage.reads(other)) == 2, "nobody gave anything up")


def who_keeps_what_it_has_need_not_answer(stage: Stage) -> None:
    first = stage.join(static_name="w1", rebalance_s=5.0)
    stage.settle()
    generation = stage.generation()
    for _ in range(2):  # another member comes, and is replaced
        other = stage.join("u", static_name="w2")
        stage.forward(0.01)
        stage.sync(other)
    demand(stage.generation() == generation + 2 and stage.state() == "stable", "nobody is waited for")
    stage.stay(20.0, first, other)
    demand(stage.beat(first, generation) == "" and stage.commit(first, *T, generation=generation) == "", "it is fine")
    demand(stage.coordinator.assignment("g", first).changed == generation, "all that it has it had")


def who_is_not_told_that_a_topic_is_gone_is_ended(stage: Stage) -> None:
    member = stage.join("t", "u", rebalance_s=5.0)
    stage.settle()
    stage.topics(t=4)
    stage.stay(6.0, member)
    demand(stage.state() in ("empty", "dead"), "it reads what is not there")


# --- topics -----------------------------------------------------------------------------------------------------------


def a_topic_that_grows_is_shared_out(stage: Stage) -> None:
    first, second = pair(stage)
    kept = stage.reads(first)
    stage.topics(t=8, u=2)
    stage.settle()
    demand(set(kept) < set(stage.reads(first)) and len(stage.reads(second)) == 4, "four each, and nothing moved")
    stage.topics(t=8, u=2, v=1)
    demand(stage.forward(1.0) == [], "nobody asked for v")


def a_topic_that_is_deleted_is_read_by_nobody(stage: Stage) -> None:
    first, second = pair(stage)
    stage.topics(u=2)
    demand(stage.commit(first, T[0]) == "unknown_partition", "at once")
    demand(
        kinds(stage.tick()) == [f"Assigned {first}", f"Assigned {second}"], "nobody is asked to give up what is gone"
    )
    demand(stage.reads(first) == stage.reads(second) == [], "nothing is there")
    stage.settle()
    stage.topics(t=4, u=2)
    stage.settle()
    demand(len(stage.reads(first)) == len(stage.reads(second)) == 2, "it is back")


def a_topic_that_is_unsubscribed_and_deleted_is_read_by_nobody(stage: Stage) -> None:
    member = stage.join("t", "u")
    stage.settle()
    stage.join("t", member=member)
    stage.topics(t=4)
    demand(stage.reads(member) == T, "also before the next rebalance")
    stage.settle()


def a_topic_to_come_may_be_subscribed_to(stage: Stage) -> None:
    member = stage.join("v")
    stage.settle()
    demand(stage.reads(member) == [], "it is not there")
    stage.topics(t=4, u=2, v=1)
    stage.tick()
    demand(stage.reads(member) == [("v", 0)], "it is there")


# --- lives of the gateway ---------------------------------------------------------------------------------------------


def generations_go_on_above_those_of_the_former_life(stage: Stage) -> None:
    first, second = pair(stage)
    stage.commit(first, stage.reads(first)[0])
    for _ in range(20):
        stage.leave(stage.join())
        stage.settle()  # the last generations leave no record
    last, had = stage.generation(), stage.reads(second)
    stage.restart(1)
    demand(stage.commit(second, had[0], generation=last) == "unknown_member", "it has to join again")
    resume = stage.code.protocol.Resume(generation=last, owned=had)
    demand(stage.join(member=second, resume=resume) == second, "under its old id")
    new = stage.join()
    demand(new not in (first, second), "ids are new in each life")
    stage.tick()
    demand(stage.generation() > last and stage.reads(second) == had, "it has what it had")
    stage.settle()


def each_life_has_generations_and_ids_of_its_own(stage: Stage) -> None:
    first, second = pair(stage)
    last = stage.generation()
    for life in (1, 2):
        stage.restart(life)  # nothing was committed, and nobody comes back
        new = stage.join()
        stage.tick()
        demand(stage.generation() > last and new not in (first, second), "nothing is used twice")
        last, first = stage.generation(), new


def a_member_that_comes_back_tells_its_generation(stage: Stage) -> None:
    high = 3 * stage.code.coordinator.GENERATIONS
    stage.join(resume=stage.code.protocol.Resume(generation=high))
    stage.tick()
    demand(stage.generation() > high, "it is believed")
    demand(stage.join(resume=stage.code.protocol.Resume(generation=1 << 31)) == "!bad_request", "not everything is")
    demand(stage.join(resume=stage.code.protocol.Resume(generation=-1)) == "!bad_request", "not everything is")


def a_group_that_was_deleted_begins_above_its_former_self(stage: Stage) -> None:
    first, _ = pair(stage)
    demand(stage.call(lambda: stage.coordinator.delete("g")) == "group_not_empty", "it has members")
    demand(stage.call(lambda: stage.coordinator.delete("h")) == "unknown_group", "there is none")
    for member in list(stage.ghost.of("g")):
        stage.leave(member)
    last = stage.generation()
    stage.ghost.forgettable.add("g")
    stage.coordinator.delete("g")
    demand(kinds(stage.listen()) == ["Forgotten"] and stage.state() == "dead", "it is gone")
    stage.join(member=first)
    stage.tick()
    demand(stage.generation() > last, "a zombie of the former one is told from its members")


def restored_groups_wait_for_their_members(stage: Stage) -> None:
    stage.restore("g", 7, idle_s=60.0, wait_s=2.0)
    demand(stage.state() == "empty", "it is known")
    first, second = stage.join(), stage.join()
    demand(stage.forward(1.9) == [], "it waits")
    stage.forward(0.2)
    demand(len(stage.reads(first)) == len(stage.reads(second)) == 2, "both at once")
    demand(stage.generation() == 7 + stage.code.coordinator.UNSEEN + 1, "above the records")
    stage.restore("old", 3, idle_s=stage.limits.retention_s - 5.0)
    demand("Forgotten" in kinds(stage.forward(6.0)), "the time before the restart counts")
