#!/usr/bin/env python3
"""A model of the replication of one shard: every interleaving within bounds, or long random ones. Plain Python, no packages.

    cluster_model.py                 all exhaustive configurations, scenarios, random walks with healing: 9 minutes of CPU
    cluster_model.py --deep          the same with larger bounds: some hours
    cluster_model.py --config NAME   one of them; with --trace the shortest way to a violation
    cluster_model.py --mutants       each mutant must be caught; prints a trace that catches it: 5 minutes of CPU
    cluster_model.py --list          the mutants
Bounds are numbers of states and walks, not times: the same run gives the same answer, on a busy machine too (--seconds
is for trying by hand). test_cluster_model.py runs it with small bounds.

What is modelled
    register    (epoch, leader, isr, version, marks): one key in Consul. Every write is a compare-and-set on version.
    replica     a (node, life): a wiped, restored or replaced disk comes back as another replica. Written a, b, c; second life a'.
    a log       entries epoch.value; the first entry of an epoch is its record, epoch.0. `synced` of them are on disk.
    a promise   the version (where Consul may go back: the mark) of the last register the replica has answered under; on disk.
    a ring      what a leader has numbered and not yet appended.
    messages    a set without order: each may arrive late or never (--dup: also twice).
                FETCH(epoch, position, last epoch, promise)  "what is before position is on my disk"
                DATA(epoch, position, last epoch, entries, hw, register if the promise is another)
                CUT(epoch, e, end, position, last)      "I have `end` entries of epoch e and before": an answer to that position
                A change of the ISR: a leader's write of the register, on its way to Consul; its outcome unknown until the
                register is read
    a node      acts only on what it has learned of the register, which may be old for as long as it likes: a pause, a partition
                from Consul. A crash: back at once, memory lost, what is not synced kept or lost; a start on an old snapshot.
    Consul      may be restored: the register is one of its former ones; version numbers come again, marks do not.
    a volume    may be restored to any older prefix of its log, and to what it held before its last cut.
    operators   `recover` (hold, then election of the best of enough replicas); a new lineage from one survivor.
    coordinator elects whenever it likes: failure detectors may be wrong as often as they want. Only the cas counts.
Ghosts (what an outside observer knows): `committed`, the entries some leader has counted as committed (answered, shown to
    readers), and who has committed in which epoch.

Checked in every state
    committed   what is once committed at a place is never committed there as something else (in one lineage)
    lost        the leader at work, and every member of the register's ISR whose disk lives, has all that is committed
                (not where Consul was restored: then a register may name who has less, and must find nobody who follows)
    one leader  no two replicas commit in one epoch
    queue       what a node has routed (its `hw` prefix) is a prefix of what is committed, and is never cut: readers see
                nothing else
    reads       who reads at a leader whose doors are open has all that an earlier leader has shown
    electable   with fewer lost disks than min.insync somebody of the ISR lives
Checked at the end of random walks
    healing     when faults stop (and, where Consul went back, `recover` was run), a leader is elected, all nodes catch up, and a
                new message is committed and routed everywhere
Checked in the scenarios (deterministic rounds with the rules of 4.9 for when to shrink, resign and elect)
    progress    one broker of three dead, stopped, without its disk, cut off from the others or from Consul, all pairs of roles,
                or one message of the Broadcast Queue that cannot be processed: a new message is committed within 40 rounds
Logs are tuples: dense by construction. Not modelled: retention and bootstrap from files, levels, authentication, time,
more than three nodes.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

# All of these are tuples within tuples (places below): what is hashed a million times has no names.
State = tuple[Any, ...]
Node = tuple[Any, ...]
Register = tuple[Any, ...]
Message = tuple[Any, ...]
Label = tuple[Any, ...]
Numbers = tuple[int, ...]
Log = tuple[int, ...]
Bag = frozenset[Message]

NONE, FOLLOWER, LEADER = 0, 1, 2
FETCH, DATA, CUT, CHANGE = range(
    4
)  # kinds of messages; numbers, and () for nothing: a set of them has the same order in each process
ROLES = ("-", "follower", "leader")
NOBODY = -1

MUTANTS = {
    "follower_no_fence": "a follower takes data of an older epoch",
    "leader_no_fence": "a leader counts fetches of another epoch",
    "shrink_early": "a leader counts with the smaller ISR before the register has it",
    "expand_late": "a leader leaves out a replica whose joining is on its way",
    "expand_hw_only": "a replica joins at hw, not at the leader's epoch record (KAFKA-7128)",
    "truncate_hw": "a follower cuts to its own hw (before KIP-101)",
    "truncate_naive": "a follower cuts to the leader's end, not to where its own epochs end (before KIP-279)",
    "late_diverged": "a follower cuts on an answer to a position it has left meanwhile",
    "no_compare": "a leader believes the position of a fetch without comparing epochs",
    "resume_epoch": "a leader that crashed goes on in its old epoch, its changes of the ISR on their way forgotten",
    "rid_is_node": "a wiped disk keeps its replica id",
    "restored_keeps_id": "a volume restored to an older state keeps its replica id",
    "ack_before_sync": "a follower confirms before fdatasync",
    "dup_at_once": "!dup is answered although the first copy is not committed",
    "last_at_once": "!last, id_reused, id_too_old are answered although what they speak of is not committed",
    "hw_unchecked": "a follower takes hw from a leader without comparing logs",
    "unclean": "a leader from outside the ISR",
    "lineage_kept": "what a survivor begins anew keeps the lineage",
    "isr_no_version": "a change of the ISR is applied whatever the version",
    "pending_timeout": "a leader forgets a change of the ISR because no answer came in time",
    "route_synced": "the router takes what is synced, not what is committed",
    "ckpt_synced": "producers.ckpt speaks of what is synced, not of what is committed",
    "isr_below_min": "the ISR shrinks below min.insync",
    "min_below_majority": "min.insync may be less than a majority",
    "late_record": "a leader sends before its epoch's record is on its disk",
    "early_resume": "a leader sends before its own fdatasync and goes on in its epoch after a crash",
    "ring_kept": "what a deposed leader has numbered and not appended stays in its ring, and is appended as a follower",
    "no_promise": "a replica follows a register that is older than one it has answered under",
    "promise_lost": "a promise is not on disk before the first answer under it",
    "promise_number": "a promise is a version number without a mark",
    "epoch_promise": "a promise is renewed with the epoch only, and a leader counts under whatever version",
    "recover_no_hold": "recover elects by what replicas have said before they promised its register",
    "recover_few": "recover asks fewer replicas than brokers - min.insync + 1",
    "recover_any": "recover elects any of those it asked, not the one with the highest (last epoch, end)",
    "recover_fork": "recover takes promises of two branches as one",
    "recover_outside": "recover elects without a member of the last known ISR",
    "shrink_blind": "a leader that hears nobody takes replicas out of the ISR",
    "no_resign": "a leader that cannot move hw stays",
    "doors_early": "a new leader answers readers before its epoch's record is committed (KIP-207)",
    "repair_follows": "a replica in which repair has given a record another place keeps its log, under a new replica id",
    "starts_counted": "a start is known by a number that each attempt raises, not by a mark of the directory's own",
    "any_start": "a copy goes on under the id of its original whatever the mark in the key",
    "bq_order": "registers ride on the Broadcast Queue, behind a message that cannot be processed",
}


class Config:
    def __init__(self, **k: Any) -> None:
        self.nodes = k.get("nodes", 3)
        self.values = k.get("values", 2)
        self.epochs = k.get("epochs", 3)
        self.versions = k.get("versions", 5)  # writes of the register, elections included
        self.crashes = k.get("crashes", 1)
        self.wipes = k.get("wipes", 0)
        self.rollbacks = k.get("rollbacks", 0)  # of a volume
        self.restores = k.get("restores", 0)  # of Consul
        self.recovers = k.get("recovers", 0)
        self.anew = k.get("anew", 0)  # new lineages
        self.bag = k.get("bag", 2)  # messages on their way, changes of the ISR not counted
        self.min_insync = k.get("min_insync", 2)
        self.isr = k.get("isr")  # the ISR at the start
        self.ckpt = k.get("ckpt", False)
        self.early = k.get("early", False)  # a leader sends what it has not synced itself
        self.ring = k.get("ring", False)  # a leader numbers first and appends later
        self.stale = k.get("stale", False)  # who starts may see any former register
        self.dup = k.get("dup", False)
        self.fifo = k.get(
            "fifo", False
        )  # one connection a follower: a new fetch leaves behind what is still on its way
        self.instant = k.get("instant", False)  # a fetch arrives at once; its answer late or never
        self.mutant = k.get("mutant", "")
        if self.mutant in ("early_resume", "late_record"):
            self.early = True
        self.marks = self.restores > 0 or k.get("marks", False)
        if self.mutant == "min_below_majority" and self.marks:
            self.min_insync = 1
        self.promises = self.stale or self.marks
        self.swap = (
            self.nodes == 3 and self.isr is None and not self.ckpt and not self.promises and not self.anew
        )  # nodes 1 and 2 are alike
        self.start_lost = self.wipes + self.rollbacks


class Violation(Exception):
    pass


# Replicas are numbers, node + 4 x life; entries are numbers, 16 x epoch + value: small and quick to hash.
# state: (register, nodes, bag, committed, committers, used, budget, past, made)
#   budget: (crashes, wipes, rollbacks, restores, recovers, new lineages) left; past: the former registers; made: marks so far
# node:  (life, log, synced, hw, role, epoch, view, match, pending, ckpt, promise, ring, lineage, former)
#   former: what was on disk before the last cut, and hw then: a volume may be restored to that
LIFE, LOG, SYNCED, HW, ROLE, EPOCH, VIEW, MATCH, PENDING, CKPT, PROMISE, RING, LINEAGE, FORMER = range(14)
REGISTER, NODES, BAG, COMMITTED, COMMITTERS, USED, BUDGET, PAST, MADE = range(9)
CRASHES, WIPES, ROLLBACKS, RESTORES, RECOVERS, ANEW = range(6)


def but(old: State, *changes: Any) -> State:
    """A tuple like `old` with other values: place, value, place, value …"""
    new: list[Any] = list(old)
    for at in range(0, len(changes), 2):
        new[changes[at]] = changes[at + 1]
    return tuple(new)


def rid_of(i: int, node: Node, cfg: Config) -> int:
    return i if cfg.mutant == "rid_is_node" else i + 4 * node[LIFE]


def mark_of(register: Register) -> int:
    mark: int = register[4][-1] if register[4] else register[3]
    return mark


def accepts(promise: int, register: Register, cfg: Config) -> bool:
    """A replica follows only a register that descends from the one it has answered under."""
    if cfg.mutant == "no_promise" or not promise:
        return True
    if register[4] and cfg.mutant == "promise_number":
        return bool(register[4].index(mark_of(register)) + 1 >= promise)  # the number of a version is its place
    return bool(promise in register[4] if register[4] else promise <= register[3])


def promised(register: Register, cfg: Config) -> int:
    if not cfg.promises:
        return 0
    return len(register[4]) if register[4] and cfg.mutant == "promise_number" else mark_of(register)


def initial(cfg: Config) -> State:
    log = (16,)
    rids = tuple(range(cfg.nodes))
    isr = rids if cfg.isr is None else cfg.isr
    register = (1, 0, isr, 1, (1,) if cfg.marks else ())
    nodes = []
    for i in rids:
        n = 1 if i in isr else 0
        view = register if i == 0 else (1, 0, (), 0, ())
        role = LEADER if i == 0 else FOLLOWER
        nodes.append((0, log[:n], n, n, role, 1, view, (), (), None, promised(register, cfg), (), 0, ()))
    budget = (cfg.crashes, cfg.wipes, cfg.rollbacks, cfg.restores, cfg.recovers, cfg.anew)
    return (register, tuple(nodes), frozenset(), log, ((1, 0),), 0, budget, (), 1)


def end_of_epoch(log: Log, epoch: int) -> int:
    """How many entries are of `epoch` or before."""
    n, limit = len(log), 16 * epoch + 15
    while n and log[n - 1] > limit:
        n -= 1
    return n


def epoch_at(log: Log, n: int) -> int:
    """The epoch of the last of the first n entries."""
    return log[n - 1] >> 4 if n else 0


def spend(budget: Numbers, what: int) -> Numbers:
    return but(budget, what, budget[what] - 1)


def with_bag(state: State, bag: Bag) -> State:
    return but(state, BAG, bag)


def with_register(state: State, register: Register, cfg: Config) -> State:
    past = state[PAST]
    if cfg.promises and state[REGISTER] not in past:
        past += (state[REGISTER],)
    return but(state, REGISTER, register, PAST, past, MADE, max(state[MADE], register[4][-1] if register[4] else 0))


def next_marks(register: Register, state: State) -> Numbers:
    """The marks of a register that is written after this one."""
    return (*register[4], state[MADE] + 1) if register[4] else ()


def with_node(state: State, i: int, node: Node, cfg: Config, *changes: object) -> State:
    nodes = state[NODES]
    new = but(state, NODES, (*nodes[:i], node, *nodes[i + 1 :]), *changes)
    return advance(new, i, cfg) if node[ROLE] == LEADER else new


def advance(state: State, i: int, cfg: Config) -> State:
    """The leader counts. What is new below hw is committed: answered, and shown to readers."""
    node = state[NODES][i]
    log, hw, epoch, pending = node[LOG], node[HW], node[EPOCH], node[PENDING]
    me = rid_of(i, node, cfg)
    isr = node[VIEW][2]
    if cfg.mutant == "shrink_early" and pending:
        members = set(pending[-1])
    else:
        members = set(isr)
        if cfg.mutant != "expand_late":
            for each in pending:  # whatever the register's ISR may be now or become
                members.update(each)
    if len(isr) < cfg.min_insync and cfg.mutant != "isr_below_min":
        return state
    at = node[SYNCED]
    known = dict(node[MATCH])
    for each in members:
        if each != me:
            at = min(at, known.get(each, 0))
    if at <= hw:
        return state
    committed, committers = state[COMMITTED], state[COMMITTERS]
    for place in range(hw, at):
        if place < len(committed):
            if committed[place] != log[place]:
                raise Violation(
                    f"committed: place {place} was {entry(committed[place])}, "
                    f"now {name(me)} of epoch {epoch} commits {entry(log[place])}"
                )
        else:
            committed += (log[place],)
    who = (epoch, me)
    if who not in committers:
        if any(other == epoch for other, _ in committers):
            raise Violation(f"one leader: {name(me)} commits in epoch {epoch}, and somebody else did")
        committers += (who,)
    nodes = state[NODES]
    return but(
        state, NODES, (*nodes[:i], but(node, HW, at), *nodes[i + 1 :]), COMMITTED, committed, COMMITTERS, committers
    )


# --- what may happen next -------------------------------------------------------------------------------------------------


def lineage(state: State, cfg: Config) -> int:
    return cfg.anew - state[BUDGET][ANEW] if cfg.mutant != "lineage_kept" else 0


def is_news(node: Node, register: Register, cfg: Config) -> bool:
    view = node[VIEW]
    if view is None or view[0] < register[0] or (node[ROLE] == LEADER and view[3] < register[3]):
        return True
    if cfg.marks and node[PROMISE] != promised(register, cfg):
        if cfg.mutant == "epoch_promise":
            return bool(view[0] != register[0])
        return bool(node[ROLE] != LEADER or view[4] != register[4])
    return False


def successors(state: State, cfg: Config) -> Iterator[tuple[Label, State]]:
    """(what happens, the state after it) of everything that may happen."""
    register, nodes, bag, committed, used, budget = (
        state[REGISTER],
        state[NODES],
        state[BAG],
        state[COMMITTED],
        state[USED],
        state[BUDGET],
    )
    mutant = cfg.mutant
    now = lineage(state, cfg)
    for i in range(cfg.nodes):
        node = nodes[i]
        life, log, synced, hw, role, epoch, view, _match, pending, ckpt, promise, ring, lin, former = node
        me = rid_of(i, node, cfg)
        if lin != now:  # of the lineage before: refused, whatever it says; an empty directory may join
            if budget[WIPES]:
                new = (life + 1, (), 0, 0, NONE, 0, None, (), (), None, 0, (), now, ())
                yield (
                    ("is emptied for the new lineage", me),
                    with_node(state, i, new, cfg, BUDGET, spend(budget, WIPES)),
                )
            continue

        seen = (register, *state[PAST]) if cfg.stale and view is None else (register,)
        for each in seen:
            if is_news(node, each, cfg) and accepts(promise, each, cfg):
                learned = learn(me, node, each, cfg)
                if learned is not None and learned != node:
                    yield ("learns", me, each), with_node(state, i, learned, cfg)

        if role == LEADER:
            start = end_of_epoch(log, epoch - 1) + 1
            at_work = synced >= start  # its epoch's record is on disk
            if used < cfg.values:
                if cfg.ring:
                    new = but(node, RING, (*ring, used + 1))
                else:
                    longer = (*log, 16 * epoch + used + 1)
                    both = (
                        not cfg.crashes and not cfg.early and synced == len(log)
                    )  # then taking and syncing may as well be one
                    new = but(node, LOG, longer, SYNCED, len(longer) if both else synced)
                yield ("takes", me, used + 1), with_node(state, i, new, cfg, USED, used + 1)
            if synced < len(log):
                yield ("syncs", me), with_node(state, i, but(node, SYNCED, len(log)), cfg)
            if mutant == "dup_at_once" and len(log) > hw == len(committed) and log[hw] & 15:
                yield ("answers !dup to", me, log[hw] & 15), but(state, COMMITTED, (*committed, log[hw]))
            if (
                mutant == "last_at_once"
                and len(log) > len(committed)
                and log[: len(committed)] == committed
                and log[-1] & 15
            ):
                yield ("answers !last", me, log[-1] & 15), but(state, COMMITTED, log)
            if ckpt is not None and hw == len(log):
                for value in ckpt[1]:
                    if all(value != e & 15 for e in log):
                        raise Violation(f"lost: {name(me)} answers !dup to {value}, which is in no log")
            if at_work and view[3] < cfg.versions and len(pending) < 2:
                yield from changes_of_isr(state, i, me, node, start, cfg)
            if mutant == "pending_timeout" and pending:
                yield ("forgets what it asked", me), with_node(state, i, but(node, PENDING, ()), cfg)

        elif role == FOLLOWER and view[1] not in (me, NOBODY):
            yield from fetches(state, i, me, node, cfg)
            if synced < len(log):
                yield ("syncs", me), with_node(state, i, but(node, SYNCED, len(log)), cfg)

        if ring and role:
            longer = (*log, 16 * (epoch if role == LEADER else epoch_at(log, len(log))) + ring[0])
            new = but(node, LOG, longer, RING, ring[1:])
            yield ("appends from its ring", me, ring[0]), with_node(state, i, new, cfg)
        if cfg.ckpt and role == LEADER:
            upto = synced if mutant == "ckpt_synced" else hw
            values = tuple(e & 15 for e in log[:upto] if e & 15)
            if values and (ckpt is None or ckpt[1] != values):
                yield (
                    ("writes producers.ckpt up to", me, upto),
                    with_node(state, i, but(node, CKPT, (upto, values)), cfg),
                )
        if mutant == "route_synced" and hw < synced and role:
            yield ("routes to", me, synced), with_node(state, i, but(node, HW, synced), cfg)

        if budget[CRASHES]:
            kept = 0 if mutant == "promise_lost" else promise
            for keep in {synced, len(log)}:
                new = (
                    life,
                    log[:keep],
                    keep,
                    min(hw, keep),
                    NONE,
                    0,
                    None,
                    (),
                    (),
                    ckpt,
                    kept,
                    ring if mutant == "ring_kept" else (),
                    lin,
                    former,
                )
                yield ("crashes and keeps", me, keep), with_node(state, i, new, cfg, BUDGET, spend(budget, CRASHES))
        if budget[WIPES]:
            new = (life + 1, (), 0, 0, NONE, 0, None, (), (), None, 0, (), now, ())
            yield ("loses its disk", me), with_node(state, i, new, cfg, BUDGET, spend(budget, WIPES))
        if budget[ROLLBACKS]:
            again = life if mutant == "restored_keeps_id" else life + 1
            older = [(log[:keep], min(hw, keep)) for keep in range(synced)] + ([former] if former else [])
            for disk, then in older:
                if mutant == "repair_follows":
                    disk = (*disk, 16 * epoch_at(disk, len(disk)) + 15)
                new = (again, disk, len(disk), then, NONE, 0, None, (), (), None, 0, (), lin, ())
                yield (
                    ("its volume is restored to", me, disk),
                    with_node(state, i, new, cfg, BUDGET, spend(budget, ROLLBACKS)),
                )
        if budget[ANEW] and log:
            yield begins_anew(state, i, me, node, cfg)

    yield from writes_of_register(state, cfg)
    for message in bag:
        yield from deliver(state, message, bag if cfg.dup else bag - {message}, cfg)


def begins_anew(state: State, i: int, me: int, node: Node, cfg: Config) -> tuple[Label, State]:
    """`detach` and `init --from`: a new shard, of one lineage with nothing that went before."""
    register = state[REGISTER]
    log, epoch, budget = node[LOG], register[0] + 1, spend(state[BUDGET], ANEW)
    kept = cfg.mutant == "lineage_kept"
    new = (
        node[LIFE],
        log,
        len(log),
        len(log) if not kept else node[HW],
        NONE,
        0,
        None,
        (),
        (),
        None,
        0,
        (),
        0 if kept else node[LINEAGE] + 1,
        (),
    )
    state = with_register(state, (epoch, me, (me,), register[3] + 1, next_marks(register, state)), cfg)
    committed = state[COMMITTED] if kept else log
    return ("begins anew with", me, len(log)), with_node(
        state, i, new, cfg, BUDGET, budget, COMMITTED, committed, BAG, frozenset()
    )


def writes_of_register(state: State, cfg: Config) -> Iterator[tuple[Label, State]]:
    """What the coordinator, an operator, or a restored backup of Consul does."""
    register, nodes, budget, mutant = state[REGISTER], state[NODES], state[BUDGET], cfg.mutant
    epoch, leader, isr, version, marks = register
    now = lineage(state, cfg)
    alive = {rid_of(i, node, cfg): node for i, node in enumerate(nodes) if node[LINEAGE] == now}
    if epoch < cfg.epochs and version < cfg.versions and leader != NOBODY:
        for each in sorted(alive if mutant == "unclean" else set(alive).intersection(isr)):
            for rest in subsets([r for r in isr if r != each]):
                least = min(cfg.min_insync, len(isr))
                if len(rest) + 1 < least and mutant not in ("isr_below_min", "unclean"):
                    continue
                new = (epoch + 1, each, tuple(sorted((each, *rest))), version + 1, next_marks(register, state))
                yield ("elected", each, new), with_register(state, new, cfg)
    if budget[RESTORES]:
        for each in state[PAST]:
            if each != register:
                yield (
                    ("Consul restored:", -1, each),
                    but(with_register(state, each, cfg), BUDGET, spend(budget, RESTORES)),
                )
    if budget[RECOVERS]:
        enough = 1 if mutant == "recover_few" else cfg.nodes - cfg.min_insync + 1
        known = {mark_of(r): r for r in (*state[PAST], register)}
        if leader == NOBODY or mutant == "recover_no_hold":
            asked = [
                r
                for r, n in alive.items()
                if n[PROMISE] and (n[PROMISE] == mark_of(register) or mutant == "recover_no_hold")
            ]
            for some in itertools.combinations(sorted(asked), enough):
                best = max(some, key=lambda r: (epoch_at(alive[r][LOG], alive[r][SYNCED]), alive[r][SYNCED]))
                base = register
                if mutant == "recover_no_hold":
                    base = max((known[alive[r][PROMISE]] for r in some), key=lambda r: r[3])
                    if any(alive[r][PROMISE] not in base[4] for r in some):
                        continue
                if not {*some} & {*base[2]} and mutant != "recover_outside":
                    continue  # of the last ISR nobody: its other disks may be new ones
                for each in some if mutant == "recover_any" else (best,):
                    new = (base[0] + 1, each, (each,), base[3] + 1, next_marks(base, state))
                    yield (
                        ("recovered:", each, new),
                        but(with_register(state, new, cfg), BUDGET, spend(budget, RECOVERS)),
                    )
        else:
            for some in itertools.combinations(sorted(r for r, n in alive.items() if n[PROMISE] in known), enough):
                base = max((known[alive[r][PROMISE]] for r in some), key=lambda r: r[3])
                marks = base[4]
                if any(alive[r][PROMISE] not in marks for r in some):
                    if mutant != "recover_fork":
                        continue  # two branches
                    marks = tuple(sorted({*marks, *(m for r in some for m in known[alive[r][PROMISE]][4])}))
                new = (base[0] + 1, NOBODY, base[2], base[3] + 1, (*marks, state[MADE] + 1))
                yield ("held:", -1, new), with_register(state, new, cfg)


def learn(me: int, node: Node, register: Register, cfg: Config) -> Node | None:
    """What a node does that hears of the register, or None where nothing is new to it."""
    log, synced, role, epoch, view = node[LOG], node[SYNCED], node[ROLE], node[EPOCH], node[VIEW]
    resumes = cfg.mutant in ("resume_epoch", "early_resume")
    promise = promised(register, cfg)
    if cfg.promises:
        node = but(node, PROMISE, promise)
    if role == LEADER and register[0] == epoch and register[1] == me:
        new = but(node, VIEW, register, PENDING, ())  # what was on its way has an old version now
        return (
            but(new, MATCH, ()) if cfg.marks and cfg.mutant != "epoch_promise" else new
        )  # each confirms anew under this version
    ring = node[RING] if cfg.mutant == "ring_kept" else ()  # what was numbered goes with the role
    if register[1] == me:
        if any(e >> 4 == register[0] for e in log):  # it has been leader of this epoch: it waits for a new one
            if resumes:
                return but(node, ROLE, LEADER, EPOCH, register[0], VIEW, register, MATCH, (), PENDING, ())
            if view is not None and not cfg.marks:
                return None
            return but(
                node,
                ROLE,
                NONE,
                EPOCH,
                register[0],
                VIEW,
                (*register[:2], (), 0, ()),
                MATCH,
                (),
                PENDING,
                (),
                RING,
                ring,
            )
        longer = (*log, 16 * register[0])
        # Nothing of an epoch leaves the leader before its record is on disk; with `late_record` it does.
        on_disk = synced if cfg.mutant == "late_record" else len(longer)
        return but(
            node,
            LOG,
            longer,
            SYNCED,
            on_disk,
            ROLE,
            LEADER,
            EPOCH,
            register[0],
            VIEW,
            register,
            MATCH,
            (),
            PENDING,
            (),
            RING,
            ring,
        )
    follows = (register[0], register[1], (), 0, ())
    return but(node, ROLE, FOLLOWER, EPOCH, register[0], VIEW, follows, MATCH, (), PENDING, (), RING, ring)


def changes_of_isr(state: State, i: int, me: int, node: Node, start: int, cfg: Config) -> Iterator[tuple[Label, State]]:
    epoch, view, pending, hw = node[EPOCH], node[VIEW], node[PENDING], node[HW]
    isr = view[2]
    wanted = []
    for each in isr:
        if each != me and (len(isr) > cfg.min_insync or cfg.mutant == "isr_below_min"):
            wanted.append((("asks out", me, each), tuple(r for r in isr if r != each)))
    for each, have in node[MATCH]:
        if each not in isr and have >= hw and (have >= start or cfg.mutant == "expand_hw_only"):
            others = [r for r in isr if r & 3 != each & 3]  # it takes the place of its node's former disk
            wanted.append((("asks in", me, each), tuple(sorted((*others, each)))))
    for label, new_isr in wanted:
        if new_isr not in pending:
            marks = next_marks(view, state)
            bag = state[BAG] | {(CHANGE, epoch, view[3], new_isr, me, marks)}
            made = state[MADE] + 1 if marks else state[MADE]
            yield label, with_node(with_bag(state, bag), i, but(node, PENDING, (*pending, new_isr)), cfg, MADE, made)


def fetches(state: State, i: int, me: int, node: Node, cfg: Config) -> Iterator[tuple[Label, State]]:
    log, bag = node[LOG], state[BAG]
    have = len(log) if cfg.mutant == "ack_before_sync" else node[SYNCED]
    message = (FETCH, node[VIEW][1], node[EPOCH], me, have, epoch_at(log, have), node[PROMISE] if cfg.marks else 0)
    if cfg.fifo:
        bag = frozenset(m for m in bag if m[0] == CHANGE or (m[1] & 3 != i and m[3] & 3 != i))
    if cfg.instant:
        for label, after in deliver(with_bag(state, bag), message, bag, cfg):
            yield ("fetches:", me, label), after
    elif message not in bag:
        new = send(bag, message, cfg)
        if new is not None:
            yield ("fetches from", me, have), with_bag(state, new)


def send(bag: Bag, message: Message, cfg: Config) -> Bag | None:
    """The bag with the message; None where the net is full, which is a message lost."""
    if sum(m[0] != CHANGE for m in bag) >= cfg.bag and message not in bag:
        return None
    return bag | {message}


def subsets(items: Sequence[int]) -> list[Numbers]:
    found: list[Numbers] = [()]
    for each in items:
        found += [(*f, each) for f in found]
    return found


def deliver(state: State, message: Message, rest: Bag, cfg: Config) -> Iterator[tuple[Label, State]]:
    kind = message[0]
    register, nodes = state[REGISTER], state[NODES]
    gone = with_bag(state, rest)
    if kind == CHANGE:
        _, epoch, version, isr, leader, marks = message
        if cfg.mutant == "isr_no_version":
            if register[0] == epoch and register[3] < cfg.versions:
                new = (register[0], register[1], isr, register[3] + 1, next_marks(register, state))
                yield ("register:", -1, new), with_register(gone, new, cfg)
        elif (
            register[3] == version and version < cfg.versions
        ):  # where Consul was restored, perhaps another register's version
            new = (epoch, leader, isr, version + 1, marks)
            yield ("register:", -1, new), with_register(gone, new, cfg)
        return
    to, at_epoch, sender = message[1:4]
    i = to & 3
    node = nodes[i]
    log, synced, hw, role, epoch = node[LOG], node[SYNCED], node[HW], node[ROLE], node[EPOCH]
    if rid_of(i, node, cfg) != to or node[LINEAGE] != lineage(state, cfg):
        return
    if kind == FETCH:
        have, last, promise = message[4:]
        if role != LEADER or (at_epoch != epoch and cfg.mutant != "leader_no_fence"):
            return
        end = end_of_epoch(log, last)
        agrees = have <= end and epoch_at(log, have) == last
        if cfg.mutant == "no_compare":
            agrees, have = True, min(have, len(log))
        if not agrees:
            answer = (CUT, sender, at_epoch, to, epoch_at(log, end), end, have, last)
            bag = send(rest, answer, cfg)
            if bag is not None:
                yield ("says cut after epoch, end", to, answer[4], end, sender), with_bag(state, bag)
            return
        current = not cfg.marks or promise == node[PROMISE] or cfg.mutant in ("epoch_promise", "no_promise")
        after = gone
        if current:
            known = dict(node[MATCH])
            known[sender] = max(known.get(sender, 0), have)
            after = with_node(gone, i, but(node, MATCH, tuple(sorted(known.items()))), cfg)
        entries = log[have : len(log) if cfg.early else synced]
        told = () if current else node[VIEW]
        bag = send(
            after[BAG], (DATA, sender, at_epoch, to, have, epoch_at(log, have), entries, after[NODES][i][HW], told), cfg
        )
        yield (
            ("counts" if current else "says its version to", to, sender, have),
            with_bag(after, bag) if bag is not None else after,
        )
        return
    if role != FOLLOWER or at_epoch > epoch or (at_epoch < epoch and cfg.mutant != "follower_no_fence"):
        return
    if cfg.mutant != "follower_no_fence" and node[VIEW][1] != sender:
        return  # another leader's; only where Consul was restored there are two of one number
    if kind == DATA:
        position, last, entries, leader_hw, told = message[4:]
        if told and told[0] == epoch:
            if not accepts(node[PROMISE], told, cfg):
                return  # of another branch: it leaves
            node = but(node, PROMISE, promised(told, cfg))
        agrees = len(log) >= position and epoch_at(log, position) == last
        if agrees and len(log) == position:
            longer = log + entries
            on_disk = synced if cfg.mutant == "ack_before_sync" else len(longer)
            new = but(node, LOG, longer, SYNCED, on_disk, HW, max(hw, min(leader_hw, len(longer))))
            yield ("appends", to, entries, leader_hw), with_node(gone, i, new, cfg)
        elif (
            agrees and log[position : position + len(entries)] == entries
        ):  # it has them: hw is news, as far as compared
            new = but(node, HW, max(hw, min(leader_hw, position + len(entries))))
            yield ("has them already", to, leader_hw), with_node(gone, i, new, cfg)
        elif cfg.mutant == "hw_unchecked":
            new = but(node, HW, max(hw, min(leader_hw, len(log))))
            yield ("takes hw", to, leader_hw), with_node(gone, i, new, cfg)
        return
    e, end, position, last = message[4:]
    if (position != len(log) or last != epoch_at(log, len(log))) and cfg.mutant != "late_diverged":
        return  # an answer to a position it has left meanwhile
    if cfg.mutant == "truncate_hw":
        keep = hw
    elif cfg.mutant == "truncate_naive":
        keep = min(end, len(log))
    else:
        keep = min(end, end_of_epoch(log, e))
    if keep < hw:
        raise Violation(f"queue: {name(to)} would cut to {keep} what it has routed up to {hw}")
    new = but(
        node,
        LOG,
        log[:keep],
        SYNCED,
        min(synced, keep),
        FORMER,
        (log[:synced], hw) if cfg.rollbacks and keep < synced else node[FORMER],
    )
    yield ("cuts to", to, keep), with_node(gone, i, new, cfg)


# --- fewer states, the same behaviour -------------------------------------------------------------------------------------


def prune(state: State, cfg: Config) -> State:
    """Without the messages that nobody will ever act on."""
    register, nodes, bag = state[:3]
    if not bag:
        return state
    mutant = cfg.mutant
    back = state[BUDGET][RESTORES]
    kept = []
    for m in bag:
        if m[0] == CHANGE:
            if mutant == "isr_no_version":
                if m[1] != register[0]:
                    continue
            elif not back and (m[2] < register[3] if cfg.marks else m[2] != register[3]):
                continue
        else:
            i = m[1] & 3
            node = nodes[i]
            if rid_of(i, node, cfg) != m[1]:
                continue
            if m[2] < node[EPOCH] and mutant not in ("follower_no_fence", "leader_no_fence"):
                continue
            if m[2] == node[EPOCH] and node[ROLE] != (LEADER if m[0] == FETCH else FOLLOWER):
                continue
        kept.append(m)
    return state if len(kept) == len(bag) else with_bag(state, frozenset(kept))


_SWAP = {r: r if r & 3 in (0, 3) else r ^ 3 for r in range(64)}


def canonical(state: State, cfg: Config) -> State:
    """Nodes 1 and 2 began alike: one picture stands for both."""
    a, b = state[1][1], state[1][2]
    if hash(a[:6]) <= hash(b[:6]):
        return state
    swap = _SWAP

    def rids(rs: Numbers) -> Numbers:
        return tuple(sorted([swap[r] for r in rs]))

    def reg(r: Register) -> Register:
        return r if r is None else (r[0], swap[r[1]], rids(r[2]), r[3], r[4])

    def one(n: Node) -> Node:
        match = tuple(sorted([(swap[r], have) for r, have in n[MATCH]]))
        return (*n[:6], reg(n[VIEW]), match, tuple([rids(p) for p in n[PENDING]]), *n[CKPT:])

    def message(m: Message) -> Message:
        return (
            (*m[:3], rids(m[3]), swap[m[4]], m[5]) if m[0] == CHANGE else (m[0], swap[m[1]], m[2], swap[m[3]], *m[4:])
        )

    register, nodes, bag, committed, committers, *more = state
    who = tuple([(epoch, swap[r]) for epoch, r in committers])
    moved = (one(nodes[0]), one(b), one(a))
    return (reg(register), moved, frozenset([message(m) for m in bag]), committed, who, *more)


# --- what must hold -------------------------------------------------------------------------------------------------------


def check(state: State, cfg: Config) -> None:
    register, nodes, committed = state[REGISTER], state[NODES], state[COMMITTED]
    n = len(committed)
    now = lineage(state, cfg)
    alive = {}
    for i, node in enumerate(nodes):
        if node[LINEAGE] != now:
            continue
        log, hw = node[LOG], node[HW]
        alive[rid_of(i, node, cfg)] = log
        if hw > len(log) or log[:hw] != committed[:hw]:
            raise Violation(f"queue: node {i} shows {entries_text(log[:hw])}, committed is {entries_text(committed)}")
        answers_early = cfg.mutant in (
            "dup_at_once",
            "last_at_once",
        )  # they count as committed what the leader does not
        if (
            node[ROLE] == LEADER
            and hw < n
            and not cfg.marks
            and not answers_early
            and all(node[EPOCH] >= epoch for epoch, _ in state[COMMITTERS])
        ):
            is_open = hw > end_of_epoch(log, node[EPOCH] - 1) or cfg.mutant == "doors_early"
            if is_open:
                raise Violation(
                    f"reads: leader node {i} of epoch {node[EPOCH]} shows {entries_text(log[:hw])}, "
                    f"{entries_text(committed)} was shown before"
                )
        if node[ROLE] == LEADER and node[EPOCH] == register[0] and log[:n] != committed and not cfg.marks:
            raise Violation(
                f"lost: leader node {i} of epoch {node[EPOCH]} has {entries_text(log)}, committed is {entries_text(committed)}"
            )
    if cfg.marks:
        return
    able = 0
    for rid in register[2]:
        log = alive.get(rid)
        if log is not None:
            able += 1
            if log[:n] != committed:
                raise Violation(
                    f"lost: {name(rid)} is in the ISR and has {entries_text(log)}, committed is {entries_text(committed)}"
                )
    if not able and cfg.start_lost < cfg.min_insync and not now:
        raise Violation(f"electable: nobody of the ISR {[name(r) for r in register[2]]} lives")


def calm_of(cfg: Config) -> Config:
    """Without faults, and with room for everything."""
    more = {"values": 15, "epochs": 15, "versions": 1000, "crashes": 0, "bag": 99}
    return Config(
        nodes=cfg.nodes,
        min_insync=cfg.min_insync,
        mutant=cfg.mutant,
        early=cfg.early,
        marks=cfg.marks,
        stale=cfg.stale,
        **more,
    )


def recover(state: State, cfg: Config) -> State:
    """What operators do where Consul went back: the branch that has shown most; a hold; the best of who has promised it."""
    register, nodes = state[REGISTER], state[NODES]
    if all(accepts(n[PROMISE], register, cfg) for n in nodes):
        return state
    known = {mark_of(r): r for r in (*state[PAST], register)}
    best = max(nodes, key=lambda n: (n[HW], epoch_at(n[LOG], n[SYNCED]), n[SYNCED]))
    branch = known[best[PROMISE]]
    base = max(
        (known[n[PROMISE]] for n in nodes if n[PROMISE] in known and best[PROMISE] in known[n[PROMISE]][4]),
        key=lambda r: r[3],
        default=branch,
    )
    held = (base[0] + 1, NOBODY, base[2], base[3] + 1, (*base[4], state[MADE] + 1))
    state = with_register(state, held, cfg)
    for i, node in enumerate(state[NODES]):
        if not accepts(node[PROMISE], held, cfg):  # of another branch: reset
            node = (node[LIFE] + 1, (), 0, 0, NONE, 0, None, (), (), None, 0, (), 0, ())
        state = with_node(state, i, learn(rid_of(i, node, cfg), node, held, cfg) or node, cfg)
    alive = {rid_of(i, n, cfg): n for i, n in enumerate(state[NODES])}
    rid = max(alive, key=lambda r: (epoch_at(alive[r][LOG], alive[r][SYNCED]), alive[r][SYNCED]))
    return with_register(state, (held[0] + 1, rid, (rid,), held[3] + 1, (*held[4], state[MADE] + 1)), cfg)


def heal(state: State, cfg: Config) -> None:
    """Faults have stopped. Raises Violation where no new message is committed and routed everywhere within some rounds."""
    calm = calm_of(cfg)
    state = but(state, BAG, frozenset(), BUDGET, (0,) * 6)
    if cfg.marks:
        state = recover(state, calm)
    register, nodes, used = state[REGISTER], state[NODES], state[USED]
    alive = {rid_of(i, node, cfg) for i, node in enumerate(nodes)}
    able = [r for r in register[2] if r in alive]
    if not able or used >= 14 or register[0] >= 13:
        return
    keep = (
        able + [r for r in register[2] if r not in alive][: max(0, min(cfg.min_insync, len(register[2])) - len(able))]
    )
    state = with_register(
        state, (register[0] + 1, able[0], tuple(sorted(keep)), register[3] + 1, next_marks(register, state)), calm
    )
    took = False
    net = ("counts", "says cut after epoch, end", "says its version to")
    for _ in range(60):
        for kinds in (
            ("learns",),
            ("fetches from",),
            net,
            ("appends", "has them already", "cuts to"),
            ("syncs",),
            ("asks in",),
            ("register:",),
            ("asks out",),
            ("register:",),
        ):
            for i in range(calm.nodes):
                for label, new in list(successors(state, calm)):
                    wants = label[0] in kinds and (label[0] != "asks out" or label[2] not in alive)
                    if (
                        wants
                        and new != state
                        and (label[1] < 0 or label[1] & 3 == i or label[0] == "register:" or label[0] in net)
                    ):
                        state = prune(new, calm)
                        check(state, calm)
                        break
        node = state[NODES][able[0] & 3]
        if not took and node[ROLE] == LEADER and node[HW] == len(node[LOG]):
            took = True
            state = next(new for label, new in successors(state, calm) if label[0] == "takes")
        if took and all(n[HW] == len(state[COMMITTED]) == len(state[NODES][able[0] & 3][LOG]) for n in state[NODES]):
            return
    raise Violation(f"healing: after 60 rounds without faults {picture(state)}")


# --- scenarios: the rules for when to shrink, resign, elect ---------------------------------------------------------------


class Trouble:
    """What is broken for good. Links are between two nodes, for replication; `consul`: who does not reach Consul."""

    def __init__(
        self,
        isr: Numbers,
        dead: Sequence[int] = (),
        wiped: Sequence[int] = (),
        cut: Sequence[Sequence[int]] = (),
        consul: Sequence[int] = (),
        stuck: Sequence[int] = (),
    ) -> None:
        self.isr, self.dead, self.wiped, self.consul, self.stuck = isr, set(dead), set(wiped), set(consul), set(stuck)
        self.cut = {frozenset(pair) for pair in cut}

    def __str__(self) -> str:
        said = [f"isr {''.join('abc'[i] for i in self.isr)}"]
        for what in ("dead", "wiped", "consul", "stuck"):
            said += [f"{'no ' if what == 'consul' else ''}{what} {'abc'[i]}" for i in getattr(self, what)]
        return ", ".join([*said, *sorted("cut " + "-".join("abc"[i] for i in sorted(pair)) for pair in self.cut)])


def troubles() -> Iterator[Trouble]:
    """a leads. Each leaves two brokers that reach each other, one of them of the ISR."""
    alone = [[(i, j) for j in range(3) if j != i] for i in range(3)]
    for isr in ((0, 1, 2), (0, 1), (0, 2)):
        yield Trouble(isr)
        for i in range(3):
            yield Trouble(isr, dead=[i])
            if set(isr) - {i}:
                yield Trouble(isr, wiped=[i])
            yield Trouble(isr, cut=alone[i])
            yield Trouble(isr, cut=alone[i][:1])
            yield Trouble(isr, consul=[i])
            yield Trouble(isr, consul=[i], cut=alone[i])
            for j in range(3):
                yield Trouble(isr, dead=[i], stuck=[j])
                if len(isr) == 3:
                    yield Trouble(isr, wiped=[i], cut=[] if i == j else alone[j])


def works(trouble: Trouble, mutant: str) -> None:
    """Rounds with these faults and no others. Raises Violation where no new message is committed."""
    cfg = Config(
        values=15, epochs=15, versions=1000, crashes=0, bag=99, instant=True, fifo=True, isr=trouble.isr, mutant=mutant
    )
    state = initial(cfg)
    for i in trouble.wiped:
        state = with_node(state, i, (1, (), 0, 0, NONE, 0, None, (), (), None, 0, (), 0, ()), cfg)
    here = [i for i in range(3) if i not in trouble.dead]
    told = [i for i in here if i not in trouble.consul]  # who has a session
    heard: dict[int, dict[int, int]] = {i: {} for i in here}  # leader: follower: the round
    stood = dict.fromkeys(here, 0)

    def do(kind: str, who: int, *more: object) -> Label | None:
        """Carry out the first thing of this kind; return its label."""
        nonlocal state
        for label, new in successors(state, cfg):
            if label[0] == kind and label[1] == who and label[2 : 2 + len(more)] == more:
                state = new
                check(state, cfg)
                return label
        return None

    def me(i: int) -> int:
        return rid_of(i, state[NODES][i], cfg)

    def elect(without: int = NOBODY) -> None:
        nonlocal state
        register = state[REGISTER]
        able = [me(i) for i in told if me(i) in register[2] and me(i) != without]
        if able and register[0] < 14:
            rest = [r for r in register[2] if r in {me(i) for i in told}]
            rest += [r for r in register[2] if r not in rest][
                : max(0, min(cfg.min_insync, len(register[2])) - len(rest))
            ]
            state = with_register(state, (register[0] + 1, able[0], tuple(sorted(rest)), register[3] + 1, ()), cfg)

    for number in range(40):
        for i in told:
            if mutant != "bq_order" or i not in trouble.stuck:
                do("learns", me(i))
        for i in here:
            node = state[NODES][i]
            if node[ROLE] != FOLLOWER:
                continue
            leader = node[VIEW][1] & 3
            if leader not in here or frozenset((i, leader)) in trouble.cut:
                continue
            for _ in range(3):
                label = do("fetches:", me(i))
                if label and label[2][0] == "counts":
                    heard[leader][me(i)] = number
                for kind in ("appends", "has them already", "cuts to"):
                    do(kind, me(i))
        for i in here:
            node = state[NODES][i]
            if node[ROLE] != LEADER:
                continue
            rid, isr = me(i), node[VIEW][2]
            if node[HW] == len(node[LOG]) and number > 5 and state[USED] < 14:
                do("takes", rid)
            do("syncs", rid)
            stood[i] = 0 if state[NODES][i][HW] > node[HW] or node[HW] == len(node[LOG]) else stood[i] + 1
            if i not in told or node[VIEW][0] != state[REGISTER][0]:
                continue
            label = do("asks in", rid)
            silent = [r for r in isr if r != rid and heard[i].get(r, -9) < number - 3]
            if not label and number > 3 and silent and len(isr) > cfg.min_insync:
                if mutant == "shrink_blind":
                    label = do("asks out", rid, silent[-1])
                elif len(isr) - len(silent) >= cfg.min_insync:
                    label = do("asks out", rid, silent[0])
            if label:
                do("register:", -1)
            elif stood[i] > 5 and mutant != "no_resign":
                stood[i] = 0
                elect(without=rid)
        if told and state[REGISTER][1] not in [me(i) for i in told]:
            elect()
        if any(e & 15 for e in state[COMMITTED]):
            return
    raise Violation(f"progress: {trouble}: after 40 rounds {picture(state)}")


# --- identity: which directory may go on under a replica id (4.9) -----------------------------------------------------------


def put(directories: Any, at: int, new: Any) -> Any:
    """Both directories, with a new one at this place."""
    return (new, directories[1]) if at == 0 else (directories[0], new)


def identity(mutant: str = "", starts: int = 4) -> tuple[int, str]:
    """(states, what is violated): one replica id, its key in Consul, two directories; the second may become a copy of the first.

    directory   (marks of its starts, the mark that it is about to put into the key or 0, end): on disk
    key         (mark, end); held: the directory whose process has the key locked, -1 nobody
    Faults: a start that does not reach Consul or dies on the way, a kill, a copy, a volume restored, Consul restored.
    Checked: who goes on under the id has all that was noted under it, and all that was confirmed by a start
        that it does not know; a directory that was never copied nor restored keeps the id, however often it starts without
        Consul, and where Consul went back.
    """
    counted = mutant == "starts_counted"
    first = ((((1,), 0, 0), None), (1, 0), 0, 1, (0, 0, 1), (), (), 0, 0)
    seen: set[Any] = {first}
    frontier: list[Any] = [first]
    while frontier:
        after: list[Any] = []
        for dirs, key, held, made, ghost, disk, kept, copied, restored in frontier:
            noted, confirmed, last = ghost  # ends in the key and confirmed to a leader; mark of the last start let in
            if not kept:
                after.append((dirs, key, held, made, ghost, disk, (key,), copied, restored))  # a backup of Consul
            elif key != kept[0] and not disk and not copied:
                after.append((dirs, kept[0], -1, made, ghost, disk, kept, copied, 1))
            for i, each in enumerate(dirs):
                if each is None:
                    if dirs[0] and not copied and not restored:
                        after.append(((dirs[0], dirs[0]), key, held, made, ghost, disk, kept, 1, restored))
                    continue
                marks, coming, end = each
                if held == i:
                    after.append((dirs, key, -1, made, ghost, disk, kept, copied, restored))  # killed
                    if end < 2:
                        after.append(
                            (
                                put(dirs, i, (marks, coming, end + 1)),
                                key,
                                held,
                                made,
                                (noted, max(confirmed, end + 1), last),
                                disk,
                                kept,
                                copied,
                                restored,
                            )
                        )
                    if key[1] != end:
                        after.append(
                            (
                                dirs,
                                (key[0], end),
                                held,
                                made,
                                (max(noted, end), confirmed, last),
                                disk,
                                kept,
                                copied,
                                restored,
                            )
                        )
                    continue
                if not disk and not copied and not restored:
                    after.append(
                        (dirs, key, held, made, ghost, (each,), kept, copied, restored)
                    )  # a snapshot of the volume
                elif disk:
                    after.append((put(dirs, i, disk[0]), key, held, made, ghost, disk, kept, copied, restored))
                if held >= 0:
                    continue  # 69: another process holds the key
                if made < starts and (
                    counted or not coming
                ):  # on disk before it is in Consul; who finds one there goes on with it
                    here = ((marks[0] + 1,), 0, end) if counted else (marks, made + 1, end)
                    after.append((put(dirs, i, here), key, held, made + 1, ghost, disk, kept, copied, restored))
                if not coming and not counted:
                    continue
                known = 0 <= marks[0] - key[0] <= 1 if counted else key[0] in (*marks, coming) or mutant == "any_start"
                if known and end >= key[1]:
                    if not restored and (
                        end < noted or (end < confirmed and last not in marks and last != coming and not counted)
                    ):
                        return (
                            len(seen),
                            f"identity: end {end} goes on under the id; noted {noted}, "
                            f"confirmed {confirmed} by start {last}, it knows {marks}",
                        )
                    mark = marks[0] if counted else coming
                    here = each if counted else ((*marks, coming), 0, end)
                    after.append(
                        (
                            put(dirs, i, here),
                            (mark, end),
                            i,
                            made,
                            (noted, confirmed, mark),
                            disk,
                            kept,
                            copied,
                            restored,
                        )
                    )
                elif not copied and not disk:
                    return (
                        len(seen),
                        f"identity: the only directory loses its id: its starts {marks} {coming or ''} end {end}, the key {key}",
                    )
        frontier = [new for new in set(after) if new not in seen]
        seen.update(frontier)
    return len(seen), ""


# --- running --------------------------------------------------------------------------------------------------------------


def bfs(cfg: Config, limit: int, seconds: float, traced: bool) -> tuple[str, int, int, int, str, list[str]]:
    """(how it ended, states, depth, transitions, what is violated, the steps that lead there)."""
    start = initial(cfg)
    seen: dict[Any, Any] = {start if traced else hash(start): None}
    frontier, depth, made = [start], 0, 0
    until = time.time() + (seconds or 1e9)
    while frontier:
        after = []
        for state in frontier:
            label: Label = ()
            try:
                for label, new in successors(state, cfg):
                    made += 1
                    new = prune(new, cfg)
                    if cfg.swap and not traced:
                        new = canonical(new, cfg)
                    key = new if traced else hash(new)
                    if key in seen:
                        continue
                    seen[key] = (state, label) if traced else None
                    check(new, cfg)
                    after.append(new)
            except Violation as err:
                steps = [*path(seen, state), "… and then: " + text(label)] if traced else []
                return "violation", len(seen), depth + 1, made, str(err), steps
            if len(seen) > limit or time.time() > until:
                return "limit", len(seen), depth, made, "", []
        frontier, depth = after, depth + 1
    return "complete", len(seen), depth, made, "", []


def path(seen: dict[State, Any], state: State) -> list[str]:
    steps = []
    while seen[state] is not None:
        state, label = seen[state]
        steps.append(text(label))
    return steps[::-1]


def walk(
    cfg: Config, walks: int, depth: int, seed: int, seconds: float
) -> tuple[str, int, int, int, int, str, list[str]]:
    """Long random ways: faults are rare beside what makes progress, or nothing is ever committed."""
    rng = random.Random(seed)
    steps_made, committed, healed = 0, 0, 0
    until = time.time() + (seconds or 1e9)
    number = 0
    rare = {
        "crashes and keeps": 0.02,
        "loses its disk": 0.01,
        "its volume is restored to": 0.005,
        "elected": 0.05,
        "asks out": 0.1,
        "asks in": 0.5,
        "takes": 0.4,
    }
    rare |= {"Consul restored:": 0.01, "held:": 0.01, "recovered:": 0.3, "begins anew with": 0.003}
    for number in range(1, walks + 1):
        state, steps = initial(cfg), []
        try:
            for _ in range(rng.randrange(20, depth)):
                options = list(successors(state, cfg))
                if not options:
                    break
                label, state = rng.choices(options, [rare.get(o[0][0], 1) for o in options])[0]
                state = prune(state, cfg)
                steps.append(label)
                steps_made += 1
                check(state, cfg)
            committed += len(state[COMMITTED])
            if not cfg.anew:
                heal(state, cfg)
                healed += 1
        except Violation as err:
            return "violation", steps_made, number, committed, healed, str(err), [*map(text, steps)]
        if time.time() > until:
            break
    return "done", steps_made, number, committed, healed, "", []


def name(rid: int) -> str:
    return "nobody" if rid == NOBODY else "abcd"[rid & 3] + "'" * (rid >> 2)


def entry(e: int) -> str:
    return f"{e >> 4}.{e & 15}"


def entries_text(log: Log) -> str:
    return "[" + " ".join(map(entry, log)) + "]"


def text(label: Label) -> str:
    if not label:
        return ""
    what, who, *rest = label
    if what == "fetches:":
        return f"{name(who)} fetches: {text(rest[0])}"
    said = []
    for each in rest:
        if what in ("learns", "elected", "register:", "Consul restored:", "recovered:", "held:"):
            marks = " marks " + ",".join(map(str, each[4])) if each[4] else ""
            said.append(
                f"epoch {each[0]} leader {name(each[1])} isr {''.join(map(name, each[2]))} version {each[3]}{marks}"
            )
        elif what in ("appends", "its volume is restored to") and isinstance(each, tuple):
            said.append(entries_text(each))
        elif (what in ("counts", "says its version to") and not said) or what in ("asks in", "asks out"):
            said.append(name(each))
        else:
            said.append(str(each))
    if what.startswith("says cut"):
        said[-1] = "to " + name(rest[-1])
    return f"{name(who) if who >= 0 else ''} {what} {' '.join(said)}".strip()


def picture(state: State) -> str:
    register, nodes = state[:2]
    shown = [
        f"{'abcd'[i] + chr(39) * n[LIFE]}={entries_text(n[LOG])} hw {n[HW]} {ROLES[n[ROLE]]} {n[EPOCH]}"
        for i, n in enumerate(nodes)
    ]
    return (
        f"register epoch {register[0]} leader {name(register[1])} isr {''.join(map(name, register[2]))}; "
        + "; ".join(shown)
    )


LATE = {"fifo": True, "instant": True}  # one connection a follower; fetches arrive at once, answers late or never
CONFIGS: dict[str, dict[str, Any]] = {
    # every message in any order, as late as can be
    "late": {"values": 1, "epochs": 2, "versions": 2, "crashes": 0, "bag": 2},
    "late2": {"nodes": 2, "values": 2, "epochs": 3, "versions": 3, "crashes": 1, "bag": 3, "min_insync": 1},
    # answers of a former epoch, on a connection that the next epoch has not closed
    "zombie": {"values": 1, "epochs": 3, "versions": 3, "crashes": 0, "bag": 1, "instant": True},
    "two": dict(nodes=2, values=2, epochs=4, versions=5, crashes=1, bag=2, min_insync=1, **LATE),
    "ckpt": {
        "nodes": 2,
        "values": 2,
        "epochs": 3,
        "versions": 4,
        "crashes": 0,
        "bag": 2,
        "min_insync": 1,
        "ckpt": True,
        "fifo": True,
    },
    "crash": dict(values=1, epochs=3, versions=3, crashes=1, bag=1, **LATE),
    "isr": dict(values=1, epochs=2, versions=4, crashes=1, bag=1, **LATE),
    "join": dict(values=2, epochs=3, versions=4, crashes=0, bag=1, isr=(0, 1), **LATE),
    "wipe": dict(values=1, epochs=2, versions=3, crashes=0, wipes=1, bag=1, **LATE),
    "early": dict(values=1, epochs=3, versions=3, crashes=1, bag=1, early=True, **LATE),
    "early2": dict(values=2, epochs=2, versions=2, crashes=1, bag=1, early=True, **LATE),
    "ring": dict(values=1, epochs=3, versions=3, crashes=0, bag=1, ring=True, **LATE),
    # 1: a start on an old snapshot
    "stale": dict(values=1, epochs=3, versions=3, crashes=1, bag=1, stale=True, **LATE),
    # 2: Consul restored, then recovered
    "consul": dict(values=0, epochs=3, versions=4, crashes=0, bag=1, restores=1, **LATE),
    "recover": dict(values=1, epochs=2, versions=2, crashes=0, bag=1, restores=0, recovers=1, marks=True, **LATE),
    # 3: a volume restored
    "volume": dict(values=1, epochs=2, versions=3, crashes=0, rollbacks=1, bag=1, **LATE),
    # 11: one survivor begins anew
    "anew": dict(values=1, epochs=2, versions=2, crashes=0, wipes=1, anew=1, bag=1, **LATE),
}
RANDOM: dict[str, dict[str, Any]] = {
    "random": {
        "values": 6,
        "epochs": 7,
        "versions": 16,
        "crashes": 4,
        "wipes": 1,
        "bag": 5,
        "ring": True,
        "stale": True,
    },
    "random-volume": {"values": 6, "epochs": 7, "versions": 16, "crashes": 3, "rollbacks": 1, "bag": 4, "ring": True},
    "random-consul": dict(values=6, epochs=8, versions=16, crashes=3, restores=2, recovers=1, bag=4, **LATE),
    "random-recover": dict(values=6, epochs=8, versions=16, crashes=2, wipes=1, recovers=1, marks=True, bag=4, **LATE),
    "random-anew": {"values": 6, "epochs": 8, "versions": 16, "crashes": 3, "wipes": 2, "anew": 1, "bag": 4},
}
DEEP: dict[str, dict[str, Any]] = {
    "late": {"values": 2, "epochs": 2, "versions": 3, "crashes": 0, "bag": 2},
    "crash": dict(values=2, epochs=4, versions=4, crashes=1, bag=1, **LATE),
    "isr": dict(values=2, epochs=3, versions=5, crashes=1, bag=1, **LATE),
    "stale": dict(values=1, epochs=4, versions=4, crashes=2, bag=1, stale=True, **LATE),
    "consul": dict(values=1, epochs=4, versions=5, crashes=1, bag=1, restores=1, **LATE),
    "recover": dict(values=1, epochs=3, versions=4, crashes=1, bag=1, restores=1, recovers=1, **LATE),
    "volume": dict(values=1, epochs=3, versions=4, crashes=1, rollbacks=1, bag=1, **LATE),
}


def scenarios(mutant: str = "") -> tuple[int, str]:
    """(how many worked, what did not)."""
    done = 0
    for trouble in troubles():
        try:
            works(trouble, mutant)
        except Violation as err:
            return done, str(err)
        done += 1
    return done, ""


FIRST = {  # where a mutant is most quickly caught; else each is tried
    "follower_no_fence": ["zombie"],
    "leader_no_fence": ["random"],
    "shrink_early": ["late2", "scenarios"],
    "expand_late": ["ckpt"],
    "expand_hw_only": ["join"],
    "truncate_hw": ["random"],
    "truncate_naive": ["random"],
    "late_diverged": ["random"],
    "no_compare": ["late"],
    "resume_epoch": ["isr"],
    "rid_is_node": ["wipe"],
    "restored_keeps_id": ["volume"],
    "ack_before_sync": ["late2"],
    "hw_unchecked": ["late2"],
    "unclean": ["late2"],
    "lineage_kept": ["anew"],
    "isr_no_version": ["random"],
    "pending_timeout": ["ckpt"],
    "ckpt_synced": ["ckpt"],
    "isr_below_min": ["wipe"],
    "min_below_majority": ["random-consul"],
    "late_record": ["early2"],
    "early_resume": ["random"],
    "ring_kept": ["random"],
    "no_promise": ["random"],
    "promise_lost": ["random"],
    "promise_number": ["random-consul"],
    "epoch_promise": ["random-consul"],
    "recover_no_hold": ["random-consul"],
    "recover_few": ["random-consul"],
    "recover_any": ["random-consul"],
    "recover_fork": ["random-consul"],
    "recover_outside": ["random-recover"],
    "shrink_blind": ["scenarios"],
    "no_resign": ["scenarios"],
    "bq_order": ["scenarios"],
    "doors_early": ["late"],
    "repair_follows": ["volume"],
    "starts_counted": ["identity"],
    "any_start": ["identity"],
}


def hunt(mutant: str, a: argparse.Namespace) -> tuple[str, int, str, list[str]] | None:
    """(where it was caught, states, what is violated, the steps), or None."""
    tried = FIRST.get(mutant, [])
    for each in [*tried, *(c for c in (*CONFIGS, *RANDOM, "scenarios", "identity") if c not in tried)]:
        if a.config and each != a.config:
            continue
        if each in ("scenarios", "identity"):
            done, err = scenarios(mutant) if each == "scenarios" else identity(mutant)
            if err:
                return each, done, err, []
        elif each in RANDOM:
            how, states, _, _, _, err, steps = walk(
                Config(**RANDOM[each], mutant=mutant), a.walks, a.depth, a.seed, a.seconds
            )
            if how == "violation":
                return each, states, err, steps
        else:
            how, states, _, _, err, steps = bfs(Config(**CONFIGS[each], mutant=mutant), a.states, a.seconds, True)
            if how == "violation":
                return each, states, err, steps
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="", help="one of: " + " ".join([*CONFIGS, *RANDOM, "scenarios", "identity"])
    )
    parser.add_argument("--mutant", default="", help="with this guard removed")
    parser.add_argument("--mutants", action="store_true", help="hunt for every mutant")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--deep", action="store_true", help="larger bounds, ten times the time")
    parser.add_argument("--states", type=int, default=400_000, help="at most, for each exhaustive configuration")
    parser.add_argument("--walks", type=int, default=4_000, help="of each random configuration")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0,
        help="at most, for each configuration; then the result depends on the machine",
    )
    parser.add_argument("--depth", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dup", action="store_true", help="messages may arrive twice")
    parser.add_argument("--trace", action="store_true", help="keep the ways, to print one")
    a = parser.parse_args()
    if a.list:
        for mutant, what in MUTANTS.items():
            print(f"{mutant:20} {what}")
        return 0
    if a.deep:
        CONFIGS.update(DEEP)
        a.states, a.walks = 20 * a.states, 20 * a.walks
    if a.mutants:
        missed, began = 0, time.time()
        for mutant, what in MUTANTS.items():
            if a.mutant and mutant != a.mutant:
                continue
            found = hunt(mutant, a)
            missed += found is None
            if found is None:
                print(f"MISSED  {mutant:20} {what}", flush=True)
                continue
            where, states, err, steps = found
            print(f"caught  {mutant:20} {what}\n        {where}, {states:,} states: {err}", flush=True)
            for step in steps[:30]:
                print(f"            {step}")
        print(f"{len(MUTANTS) if not a.mutant else 1} mutants, {missed} missed, {time.time() - began:.0f} s")
        return 1 if missed else 0
    bad, total, start = 0, 0, time.time()
    for each in [a.config] if a.config else [*CONFIGS, *RANDOM, "scenarios", "identity"]:
        began, steps = time.time(), []
        if each == "identity":
            states, err = identity(a.mutant)
            total, how = total + states, "violation" if err else "complete"
            print(f"identity: {how}: {states:,} states, {time.time() - began:.0f} s {err}", flush=True)
        elif each == "scenarios":
            done, err = scenarios(a.mutant)
            how = "violation" if err else "done"
            print(f"scenarios: {how}: {done} worked, {time.time() - began:.0f} s {err}", flush=True)
        elif each in RANDOM:
            cfg = Config(**RANDOM[each], mutant=a.mutant, dup=a.dup)
            how, made, walks, committed, healed, err, steps = walk(cfg, a.walks, a.depth, a.seed, a.seconds)
            print(
                f"{each}: {how}: {made:,} steps in {walks:,} walks, {committed:,} entries committed, {healed:,} healed, "
                f"{time.time() - began:.0f} s {err}",
                flush=True,
            )
        else:
            cfg = Config(**CONFIGS[each], mutant=a.mutant, dup=a.dup)
            how, states, depth, made, err, steps = bfs(cfg, a.states, a.seconds, a.trace)
            total += states
            print(
                f"{each}: {how}: {states:,} states, {made:,} transitions, depth {depth}, {time.time() - began:.0f} s {err}",
                flush=True,
            )
        for step in steps:
            print(f"    {step}")
        bad += how == "violation"
    print(f"{total:,} states explored exhaustively, {bad} violations, {time.time() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
