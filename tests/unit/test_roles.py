"""Roles: every act of every door has a row, what is not in the table is shut, and old files mean what they meant."""

import pytest

from kmq.access import roles, tokens
from kmq.access.roles import ADMIN, ALL, CONSUME, PRODUCE, Holder
from kmq.errors import ConfigError
from kmq.gateway.grpc.schema import KMQ, PODBUS
from kmq.gateway.http.operations import OPERATIONS
from kmq.gateway.kafka.access import BEFORE
from kmq.gateway.kafka.wire import Key


def test_every_act_of_every_door_has_a_row_and_no_other():
    http = {operation.name for operation in OPERATIONS}
    methods = {f"/{schema.service}/{name}" for schema in (KMQ, PODBUS) for name in schema.methods}
    doors = {roles.LINES_IN, roles.LINES_OUT, roles.GET_ACK, roles.GET_STATUS}
    kafka = {key.act for key in Key if key not in BEFORE}
    others = {act for act in roles.NEEDED if act.startswith("/grpc.")}
    assert set(roles.NEEDED) == http | methods | doors | kafka | others


def test_a_role_opens_its_own_acts_and_no_others():
    producer, consumer = (Holder("x", frozenset({role})) for role in (PRODUCE, CONSUME))
    assert producer.may("produce") and producer.may(roles.LINES_IN) and producer.may("overview")
    assert not any(producer.may(act) for act in ("consume", "commit", "records", "deleteTopic", roles.LINES_OUT))
    assert consumer.may("consume") and consumer.may("messages") and not consumer.may("produce")
    assert not any(consumer.may(act) for act in ("replay", "resetGroup", "createTopic", "/kmq.v1.Kmq/Produce"))


def test_an_admin_may_do_everything_and_an_unknown_act_is_for_admins():
    admin = Holder("x", frozenset({ADMIN}))
    assert all(admin.may(act) for act in (*roles.NEEDED, "new"))
    assert not Holder("x", frozenset({PRODUCE, CONSUME})).may("new")


def test_a_token_without_a_role_has_all_of_them_as_before(tmp_path):
    path = str(tmp_path / "tokens")
    tokens.new(path, "old")
    assert (tmp_path / "tokens").read_text().startswith("old:sha256$")
    assert [row.roles for row in tokens.read(path)["old"]] == [ALL]


def test_the_file_keeps_the_roles_of_each_token(tmp_path):
    path = str(tmp_path / "tokens")
    tokens.new(path, "one", ["consume", "produce"])
    tokens.new(path, "one", ["admin"])
    assert (tmp_path / "tokens").read_text().startswith("one@produce,consume:sha256$")
    assert [row.roles for row in tokens.read(path)["one"]] == [{PRODUCE, CONSUME}, {ADMIN}]


@pytest.mark.parametrize("mark", ["@", "@read", "@produce,", "@produce,read", "@Produce", "@produce@consume"])
def test_an_unknown_role_in_the_file_is_refused(tmp_path, mark):
    path = tmp_path / "tokens"
    tokens.new(str(path), "one")
    path.write_text(path.read_text().replace("one:", f"one{mark}:"))
    with pytest.raises(ConfigError, match="line 1 is not <name>"):
        tokens.read(str(path))


def test_an_unknown_role_is_no_token(tmp_path):
    with pytest.raises(ConfigError, match="role 'read': must be one of produce, consume, admin"):
        tokens.new(str(tmp_path / "tokens"), "one", ["read"])
    assert not (tmp_path / "tokens").exists()
