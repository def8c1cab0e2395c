"""The judge of histories: each anomaly is found in a history that has it and nothing else, and a good one passes."""

from collections.abc import Callable

import pytest

from chaos.anomalies import check
from chaos.history import (
    FAIL,
    OK,
    UNKNOWN,
    Again,
    Assigned,
    Commit,
    Committed,
    Lost,
    Nacked,
    Operation,
    Owners,
    Poll,
    Produce,
    decode,
    encode,
    read,
)

P, Q = ("orders", 0), ("orders", 1)


def sent(value: str, offset: int | None = None, outcome: str = OK, **more: object) -> Produce:
    return Produce("p", value, outcome, P if offset is not None else None, offset, **more)


def assigned(process: str, at: float, *places: tuple[str, int], goes_on: bool = False) -> Assigned:
    return Assigned(process, "g", int(at), places, places, at, at + 0.5, goes_on)


def polled(
    process: str, first: int, *values: str, group: str = "g", place: tuple[str, int] = P, at: float = 99
) -> Poll:
    return Poll(process, group, place, first, values, at)


def read_all(*values: str) -> Poll:
    return polled("reader", 0, *values, group="")


def committed(process: str, offset: int, at: float, outcome: str = OK) -> Commit:
    return Commit(process, "g", {P: offset}, outcome, at, at + 0.5)


def again(process: str, offset: int, value: str, at: float) -> Again:
    return Again(process, "g", P, offset, value, at)


def lost(process: str, first: int, *values: str, at: float) -> Lost:
    return Lost(process, "g", P, first, values, at)


A = assigned("a", 1, P)
SENT = [sent("x", 0), sent("y", 1), sent("z", 2)]

GOOD: dict[str, list[Operation]] = {
    "nothing": [],
    "read, committed, taken over": [
        *SENT,
        A,
        polled("a", 0, "x", at=2),
        committed("a", 1, 3),
        assigned("b", 5, P),
        polled("b", 1, "y", "z", at=6),
        committed("b", 3, 7),
        Committed("g", {P: 3}, 8, 8),
        read_all("x", "y", "z"),
    ],
    "what was not committed comes again": [
        *SENT,
        A,
        polled("a", 0, "x", "y", at=2),
        committed("a", 1, 3),
        assigned("b", 5, P),
        polled("b", 1, "y", "z", at=6),
        read_all("x", "y", "z"),
    ],
    "a commit without an answer may have happened, or not": [
        *SENT,
        A,
        polled("a", 0, "x", "y", at=2),
        committed("a", 2, 3, UNKNOWN),
        assigned("b", 5, P),
        polled("b", 2, "z", at=6),
        Committed("g", {}, 4, 4),
        read_all("x", "y", "z"),
    ],
    "a commit that is acknowledged while another member begins may come too late for it": [
        *SENT,
        A,
        polled("a", 0, "x", at=2),
        committed("a", 1, 5),
        assigned("b", 5.2, P),
        polled("b", 0, "x", "y", "z", at=6),
    ],
    "a message without an answer is stored, or not, or twice if it may be": [
        sent("x", outcome=UNKNOWN),
        sent("y", outcome=UNKNOWN),
        sent("z", once=False),
        A,
        polled("a", 0, "x", "z", "z"),
        read_all("x", "z", "z"),
    ],
    "a refused message is nowhere": [sent("x", outcome=FAIL), sent("y"), A, polled("a", 0, "y"), read_all("y")],
    "who may go on goes on": [
        *SENT,
        assigned("a", 1, P, goes_on=True),
        polled("a", 0, "x", at=2),
        assigned("a", 3, P, goes_on=True),
        polled("a", 1, "y", "z", at=4),
        read_all("x", "y", "z"),
    ],
    "a partition changes hands in two generations": [
        Owners("g", 1, (("a", P), ("b", Q))),
        Owners("g", 2, (("b", Q),)),
        Owners("g", 3, (("b", P), ("b", Q))),
    ],
    "an answer that was given up comes again, after a commit beyond it or at once": [
        *SENT,
        A,
        lost("a", 0, "x", at=2),
        polled("a", 1, "y", at=3),
        committed("a", 2, 4),
        again("a", 0, "x", 5),
        lost("a", 2, "z", at=6),
        polled("a", 2, "z", at=7),
        committed("a", 3, 8),
        read_all("x", "y", "z"),
    ],
    "its group goes on over what comes again": [
        *SENT,
        A,
        lost("a", 0, "x", at=2),
        assigned("b", 5, P),
        polled("b", 1, "y", "z", at=6),
        again("b", 0, "x", 7),
        read_all("x", "y", "z"),
    ],
    "who comes back begins at what is committed": [
        *SENT,
        A,
        polled("a", 0, "x", "y", at=2),
        committed("a", 1, 3),
        assigned("a", 5, P),
        polled("a", 1, "y", "z", at=6),
        committed("a", 3, 7),
        read_all("x", "y", "z"),
    ],
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD)
def test_a_history_in_which_nothing_is_wrong_passes(history: list[Operation]) -> None:
    drained = ("g",) if any(isinstance(each, Poll) for each in history) else ()
    assert not check(history, drained=drained, complete=True).anomalies


BROKEN: dict[str, tuple[str, list[Operation]]] = {
    "acknowledged, and nowhere": ("lost write", [sent("x"), sent("y"), read_all("y")]),
    "acknowledged with its place, where something else is not read": (
        "lost write",
        [sent("x", 3), Poll("r", "", P, 0, (), 1), sent("y"), read_all("y")],
    ),
    "refused, and stored": ("refused write", [sent("x", outcome=FAIL), read_all("x")]),
    "sent by nobody": ("invented", [read_all("x")]),
    "stored twice": ("duplicate", [sent("x"), sent("y"), read_all("x", "y", "x")]),
    "without an answer, stored twice": ("duplicate", [sent("x", outcome=UNKNOWN), read_all("x", "x")]),
    "the later one in front": ("reordered", [sent("x"), sent("y"), read_all("y", "x")]),
    "two readers see different records": (
        "inconsistent offset",
        [
            sent("x", outcome=UNKNOWN),
            sent("y", outcome=UNKNOWN, once=False),
            read_all("x", "y"),
            polled("r", 0, "y", group=""),
        ],
    ),
    "elsewhere than was said": ("inconsistent offset", [sent("x", 1), sent("y"), read_all("x", "y")]),
    "back in one assignment": ("non-monotonic poll", [*SENT, A, polled("a", 0, "x", "y"), polled("a", 1, "y", "z")]),
    "past records in one assignment": (
        "poll-skip",
        [*SENT, A, polled("a", 0, "x"), polled("a", 2, "z"), read_all(*"xyz")],
    ),
    "past what is committed": (
        "poll-skip",
        [
            *SENT,
            A,
            polled("a", 0, "x", "y", at=2),
            committed("a", 1, 3),
            assigned("b", 5, P),
            polled("b", 2, "z"),
            read_all(*"xyz"),
        ],
    ),
    "past what was refused as a commit": (
        "poll-skip",
        [
            *SENT,
            A,
            polled("a", 0, "x", at=2),
            committed("a", 1, 3, FAIL),
            assigned("b", 5, P),
            polled("b", 1, "y"),
            read_all(*"xyz"),
        ],
    ),
    "a reader without a group skips": (
        "poll-skip",
        [*SENT, polled("r", 0, "x", group=""), polled("r", 2, "z", group=""), read_all(*"xyz")],
    ),
    "of a partition that was given up": ("unassigned poll", [*SENT, A, assigned("a", 2, Q), polled("a", 0, "x")]),
    "committed in front of it, and given to nobody": (
        "unseen",
        [*SENT, A, polled("a", 1, "y", "z"), Commit("b", "g", {P: 1}, OK, 0, 0.5), read_all("x", "y", "z")],
    ),
    "acknowledged behind the last that was read": ("unseen", [*SENT, A, polled("a", 0, "x", "y")]),
    "the next member begins in front of a commit": (
        "commit lost",
        [*SENT, A, polled("a", 0, "x", "y", at=2), committed("a", 2, 3), assigned("b", 5, P), polled("b", 0, *"xyz")],
    ),
    "the group says less than was acknowledged": (
        "commit lost",
        [committed("a", 2, 3), Committed("g", {P: 1}, 4, 4)],
    ),
    "the group says nothing": ("commit lost", [committed("a", 2, 3), Committed("g", {}, 4, 4)]),
    "an answer was given up, and a commit went beyond it": (
        "lost answer",
        [*SENT, A, lost("a", 0, "x", at=2), polled("a", 1, "y", "z", at=3), committed("a", 3, 4), read_all(*"xyz")],
    ),
    "a message was given back, and a commit went beyond it": (
        "lost nack",
        [*SENT, A, polled("a", 0, "x", "y", "z", at=2), Nacked("a", "g", P, 0, 3, 4), committed("a", 3, 5)],
    ),
    "what was given up had been read by another one before": (
        "lost answer",
        [
            *SENT,
            A,
            polled("a", 0, "x", at=2),
            assigned("b", 3, P),
            lost("b", 0, "x", at=4),
            polled("b", 1, "y", "z", at=5),
            read_all(*"xyz"),
        ],
    ),
    "a member commits from memory what another one has gone beyond": (
        "position against group",
        [*SENT, A, polled("a", 0, *"xyz", at=2), committed("a", 3, 3), committed("a", 1, 9)],
    ),
    "a zombie commits": (
        "stale commit",
        [*SENT, A, assigned("b", 5, P), polled("b", 0, *"xyz"), committed("a", 1, 9)],
    ),
    "as members were told": ("two owners", [A, assigned("b", 1, P)]),
    "as the broker says": ("two owners", [Owners("g", 7, (("a", P),)), Owners("g", 7, (("b", P),))]),
    "as both say": ("two owners", [A, Owners("g", 1, (("b", P),))]),
}


@pytest.mark.parametrize(("kind", "history"), BROKEN.values(), ids=BROKEN)
def test_an_anomaly_is_found_and_no_other(kind: str, history: list[Operation]) -> None:
    complete = any(isinstance(each, Poll) and each.process == "reader" for each in history)
    verdict = check(
        history, drained=("g",) if kind in ("unseen", "lost answer", "lost nack") else (), complete=complete
    )
    assert verdict.kinds == {kind}, verdict


@pytest.mark.parametrize(("first", "kinds"), [(1, set()), (2, {"skipped by latest"})])
def test_a_latest_group_is_given_what_was_sent_after_it_had_subscribed(first: int, kinds: set[str]) -> None:
    """Where its members begin they need not say."""
    sent = [Produce("p", value, OK, P, at, began=10.0 + at) for at, value in enumerate("xyz")]
    history = [*sent, A, polled("a", first, *"xyz"[first:], at=20), read_all(*"xyz")]
    assert check(history, drained=("g",), complete=True, latest={"g": 10.5}).kinds == kinds
    assert "unseen" in check(history, drained=("g",), complete=True).kinds


def test_many_anomalies_are_counted_and_few_are_listed() -> None:
    verdict = check([read_all(*map(str, range(50)))])
    assert verdict.counts["invented"] == 50 and len(verdict.anomalies) == 10
    assert 'poll=1 "invented"=50' in str(verdict)


@pytest.mark.parametrize("damage", [lambda text: text + "Poll ('a', 'g', (", lambda text: text + encode(A)])
def test_operations_come_back_from_a_file_but_for_one_cut_off(damage: Callable[[str], str], tmp_path) -> None:  # type: ignore[no-untyped-def]
    history = [operation for history in GOOD.values() for operation in history]
    assert [decode(encode(operation)) for operation in history] == history
    path = tmp_path / "history"
    path.write_text(damage("".join(f"{encode(operation)}\n" for operation in history)))
    assert list(read(path)) == history
