"""The simulated Consul of the model tests answers like the real one: the same requests to both, the answers compared."""

import base64
import json
import random
import sys
import time
import uuid
from pathlib import Path

import httpx
import pytest

from kmq.cluster import consul as steps
from kmq.cluster.consul import KvOperation, Request, cas, check_session

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
from consul_model import ConsulModel
from waiting import until


class Both:
    """Sends each request to both, with the real one's numbers and sessions in the real one's request."""

    def __init__(self, address):
        self.client = httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=60)
        self.root = f"model-{uuid.uuid4().hex[:8]}/"
        self.model = ConsulModel(time.monotonic)
        self.model.restore(self.model.snapshot())
        self.real_of = {}  # sessions and versions of the model → those of the real one
        self.versions = {0: 0}

    def ask(self, request):
        """The status of both, compared; returns the two bodies."""
        real = self.client.request(
            request.method, request.path, params=request.params, content=self._real(request.body)
        )
        answer = self.model.answer(request)
        assert (real.status_code, real.text) == (answer.status, real.text), (request, answer)
        return real, answer

    def _real(self, body):
        for ours, theirs in self.real_of.items():
            body = body.replace(ours.encode(), theirs.encode())
        return body

    def run(self, generator, **kinds):
        """Drive one Steps through both."""
        request, bodies = next(generator), None
        while True:
            bodies = self.ask(request)
            try:
                request = generator.send(bodies[1])
            except StopIteration:
                return bodies

    def session(self, name, keeps_keys=False):
        """A session on a check of its own, in both; its name in the model."""
        check = f"{self.root[:-1]}-{name}"
        self.run(steps.register(check, 30.0))
        create = next(steps.create_session(check, keeps_keys))

        def created():
            real = self.client.put(create.path, content=create.body)
            assert real.status_code == 200 or (real.status_code == 500 and "Missing check" in real.text), real.text
            return real if real.status_code == 200 else None

        real = until(created, "a session on a check that is known")
        ours = json.loads(self.model.answer(create).body)["ID"]
        self.real_of[ours] = real.json()["ID"]
        return ours

    def txn(self, *operations):
        """One Txn; returns the operations that were refused, and what was read."""
        ours = json.dumps([{"KV": steps._fields(operation)} for operation in operations]).encode()
        theirs = [
            {"KV": steps._fields(one._replace(version=self.versions.get(one.version, one.version)))}
            for one in operations
        ]
        real = self.client.put("/v1/txn", content=self._real(json.dumps(theirs).encode()))
        answer = self.model.answer(Request("PUT", "/v1/txn", body=ours))
        assert real.status_code == answer.status, (operations, real.text, answer)
        if real.status_code == 413:
            return real.status_code
        mine, other = json.loads(answer.body), real.json()
        refused = sorted(error["OpIndex"] for error in mine["Errors"] or [])
        assert refused == sorted(error["OpIndex"] for error in other["Errors"] or []), (operations, real.text, answer)
        if refused:
            return refused
        results = [result["KV"] for result in mine["Results"] or []]
        assert self.same(results, [result["KV"] for result in other["Results"] or []]), (operations, real.text)
        return results

    def same(self, ours, theirs):
        """Compare entries but for the numbers of their versions, which are learned from here."""
        for mine, other in zip(ours, theirs, strict=True):
            assert self.versions.setdefault(mine["ModifyIndex"], other["ModifyIndex"]) == other["ModifyIndex"]
            session = self.real_of.get(mine.get("Session", ""), "")
            for field in ("Key", "Value", "LockIndex", "Flags"):
                assert mine[field] == other[field], (field, mine, other)
            assert session == other.get("Session", "")
            assert set(mine) == set(other)
        return True

    def read(self, key, **params):
        request = Request("GET", f"/v1/kv/{key}", params)
        real, answer = self.ask(request)
        if answer.status == 404:
            assert real.content == answer.body == b""
            return []
        ours = json.loads(answer.body)
        assert self.same(ours, real.json())
        if "recurse" in params:
            position = int(answer.headers["x-consul-index"])
            assert self.versions.setdefault(position, int(real.headers["x-consul-index"])) == int(
                real.headers["x-consul-index"]
            )
        return ours


@pytest.fixture
def both(consul):
    pair = Both(consul.address)
    yield pair
    pair.client.close()


def version(both, key):
    return both.model.state.pairs[key].modified


def test_the_model_reads_and_sets_as_consul_does(both):
    key = both.root + "a"
    assert both.read(key, consistent="") == [] and both.read(both.root, recurse="") == []
    assert both.txn(KvOperation("get-tree", both.root)) == []
    assert both.txn(KvOperation("get", key)) == [0]
    both.txn(cas(key, b"1", 0))
    assert both.txn(cas(key, b"2", 0)) == [0]
    assert both.txn(KvOperation("set", key + "x", b"9"), cas(key, b"2", 0), KvOperation("get", key + "y")) == [1, 2]
    assert [entry["Key"] for entry in both.read(both.root, recurse="")] == [key]
    both.txn(
        cas(key, b"2", version(both, key)),
        KvOperation("set", both.root + "10", b""),
        KvOperation("get-tree", both.root),
    )
    both.txn(KvOperation("set", key, b"2"))  # as it is: nothing is written
    both.txn(KvOperation("set", both.root + "2", b"two"))
    assert [entry["Key"][len(both.root) :] for entry in both.read(both.root, recurse="")] == ["10", "2", "a"]
    both.txn(KvOperation("delete", both.root + "none"))
    both.txn(KvOperation("delete", both.root + "2"))
    both.read(both.root, recurse="")  # the number of the prefix is that of the deletion
    assert both.txn(KvOperation("check-not-exists", key)) == [0]
    both.txn(KvOperation("check-not-exists", both.root + "none"))


def test_the_model_bounds_a_txn_as_consul_does(both):
    many = [KvOperation("delete", f"{both.root}{n}") for n in range(65)]
    assert both.txn(*many[:64]) == [] and both.txn(*many) == 413
    assert both.txn(KvOperation("set", both.root + "big", b"x" * 394_000)) == 413
    assert both.read(both.root + "big") == []


def test_the_model_locks_as_consul_does(both):
    key, one, two = both.root + "lock", both.session("one"), both.session("two")
    assert both.txn(check_session(key, one)) == [0]
    both.txn(KvOperation("lock", key, b"holder=one", session=one))
    both.txn(KvOperation("lock", key, b"holder=one again", session=one))
    both.txn(check_session(key, one))
    assert both.txn(KvOperation("lock", key, b"", session=two)) == [0]
    assert both.txn(check_session(key, two), KvOperation("set", both.root + "x", b"")) == [0]
    assert both.txn(KvOperation("unlock", key, session=two)) == [0]
    both.read(key, consistent="")
    both.txn(KvOperation("set", key, b"by anybody"))
    both.read(key, consistent="")
    both.txn(KvOperation("unlock", key, session=one))
    assert both.txn(KvOperation("unlock", key, session=one)) == [0]
    both.txn(KvOperation("lock", key, b"holder=two", session=two))
    both.read(key, consistent="")


def test_a_lost_session_and_its_lock_delay_are_as_in_consul(both):
    key, one, two = both.root + "lock", both.session("one"), both.session("two")
    both.txn(KvOperation("lock", key, b"holder=one", session=one))
    for session in (one, two):
        real = both.client.get(f"/v1/session/info/{both.real_of[session]}").json()
        ours = json.loads(both.model.answer(Request("GET", f"/v1/session/info/{session}")).body)
        assert len(real) == len(ours) == 1 and real[0]["LockDelay"] == ours[0]["LockDelay"]
    both.client.put(f"/v1/session/destroy/{both.real_of[one]}").raise_for_status()
    both.model.answer(Request("PUT", f"/v1/session/destroy/{one}"))
    assert both.read(key) == []
    assert both.txn(KvOperation("lock", key, b"", session=two)) == [0], "within the lock-delay"
    assert both.txn(KvOperation("lock", key, b"", session=one)) == [0], "by the dead"
    assert both.txn(check_session(key, one)) == [0]
    assert both.client.get(f"/v1/session/info/{both.real_of[one]}").json() == []
    lock = both._real(_locking(key, two))
    until(lambda: both.client.put("/v1/txn", content=lock).status_code != 409, "the end of the lock-delay")
    both.model.delays.clear()
    both.model.answer(Request("PUT", "/v1/txn", body=_locking(key, two)))
    assert both.read(key)[0]["Session"] == two


def test_a_session_that_keeps_its_keys_releases_them_as_in_consul(both):
    key, one, two = both.root + "note", both.session("one", keeps_keys=True), both.session("two")
    both.txn(KvOperation("lock", key, b"of one", session=one))
    before = version(both, key)
    both.client.put(f"/v1/session/destroy/{both.real_of[one]}").raise_for_status()
    both.model.answer(Request("PUT", f"/v1/session/destroy/{one}"))
    [entry] = both.read(key, consistent="")
    assert base64.b64decode(entry["Value"]) == b"of one" and "Session" not in entry
    assert both.txn(KvOperation("check-index", key, version=before)) == [0], "a release is a change"
    assert both.txn(KvOperation("lock", key, b"", session=two)) == [0], "within the lock-delay"
    both.txn(KvOperation("check-index", key, version=version(both, key)), KvOperation("set", key, b"by anybody"))
    both.read(key, consistent="")


def _locking(key, session):
    return json.dumps([{"KV": {"Verb": "lock", "Key": key, "Value": "", "Session": session}}]).encode()


def test_a_lock_given_back_is_given_out_at_once(both):
    key, one, two = both.root + "lock", both.session("one"), both.session("two")
    both.txn(KvOperation("lock", key, b"1", session=one))
    both.txn(KvOperation("unlock", key, session=one))
    both.txn(KvOperation("lock", key, b"2", session=two))
    assert base64.b64decode(both.read(key)[0]["Value"]) == b"2"


def test_the_agent_of_the_model_answers_as_consul_does(both):
    check = f"{both.root[:-1]}-check"
    nobody = Request("PUT", f"/v1/agent/check/pass/{check}")
    assert both.client.put(nobody.path).status_code == both.model.answer(nobody).status
    both.run(steps.register(check, 30.0))
    both.run(steps.beat(check))
    both.run(steps.deregister(check))
    both.run(steps.deregister(check))
    assert both.client.put(f"/v1/session/destroy/{uuid.uuid4()}").status_code == 200
    assert both.client.get(f"/v1/session/info/{uuid.uuid4()}").json() == []


@pytest.mark.parametrize("seed", range(10))
def test_random_txns_have_the_same_outcome_in_both(both, seed):
    rng = random.Random(seed)
    sessions = [both.session(name) for name in "ab"]
    keys = [both.root + name for name in ("1", "2", "10", "x/1")]
    for _ in range(40):
        both.txn(*(_any_operation(rng, both, keys, sessions) for _ in range(rng.randrange(1, 4))))
        both.read(rng.choice(keys), consistent="")
        both.read(both.root + rng.choice(["", "1", "x/"]), recurse="")


def _any_operation(rng, both, keys, sessions):
    key, session = rng.choice(keys), rng.choice(sessions)
    found = both.model.state.pairs.get(key)
    right = found.modified if found is not None else 0
    verb = rng.choice(
        ["set", "cas", "cas", "get", "get-tree", "delete", "lock", "unlock", "check-session", "check-index"]
    )
    if verb in ("cas", "check-index"):
        return KvOperation(verb, key, b"%d" % rng.randrange(3), rng.choice([right, right, 0]))
    if verb in ("lock", "unlock", "check-session"):
        return KvOperation(verb, key, b"%d" % rng.randrange(3) if verb != "check-session" else b"", session=session)
    return KvOperation(verb, key, b"%d" % rng.randrange(3) if verb == "set" else b"")
