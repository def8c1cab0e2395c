"""The OpenAPI document: it has every route and no other, is valid, and its page needs nobody else."""

import html
import re

import pytest
from api_client import document
from fake_logger import FakeLogger
from jsonschema import Draft202012Validator
from log_server import groups_of, up
from made_data import write_data
from openapi_spec_validator import validate

from kmq.gateway.core import metrics
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.topics import OPTIONS
from kmq.gateway.http import openapi, operations, schema, server
from kmq.gateway.http.request import body_of
from kmq.wire import refusals


@pytest.fixture
def app(tmp_path):
    with up(write_data(tmp_path, [b"t|||x"], {"t": 1})) as broker:
        core = Core(broker.settings, broker.page, FakeLogger())
        yield server.application(core, groups_of(core), metrics.Requests())


def test_the_document_has_every_route_and_no_other(app):
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.method != "HEAD"}
    told = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    assert routes == told and len(told) > 15


def test_the_document_is_valid_openapi():
    validate(document())


def test_every_schema_is_one_of_json_schema_and_every_reference_leads_to_one():
    for shape in document()["components"]["schemas"].values():
        Draft202012Validator.check_schema(shape)
    refs = set(re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(document())))
    assert refs and refs <= set(schema.SCHEMAS)


def test_a_handler_is_missed_when_an_operation_has_none(app):
    with pytest.raises(KeyError, match="createTopic"):
        operations.register(app, operations.ADMIN, {}, print)


def test_every_operation_has_its_own_name_and_codes_of_the_table():
    names = [operation.name for operation in operations.OPERATIONS]
    assert len(set(names)) == len(names)
    known = {row.code for row in refusals.table()}
    assert {code for operation in operations.OPERATIONS for code in operation.errors} <= known


def test_an_error_has_the_shape_that_the_document_shows():
    shape = Draft202012Validator(schema.SCHEMAS["Error"])
    shape.validate(body_of(RequestRefused("out_of_range", "x", field="offset", first=1, end=2)))
    assert not shape.is_valid({"code": "x"})


def test_every_option_of_a_topic_is_in_the_document_and_no_other():
    options = {*OPTIONS, "partitioner"}
    assert options == set(schema.SCHEMAS["NewTopic"]["properties"]) - {"name", "partitions", "replicationFactor"}
    assert options - {"partitioner"} == set(schema.SCHEMAS["TopicChanges"]["properties"]) - {"partitions", "force"}


def test_the_page_names_every_path_and_loads_nothing():
    page = openapi.page()
    assert all(operation.path in page and html.escape(operation.summary) in page for operation in operations.OPERATIONS)
    assert not re.search(r"(?i)<script|<link|<img|@import|url\(|https?://", page)
    assert {name for name in schema.SCHEMAS if f'id="{name}"' not in page} == set()
