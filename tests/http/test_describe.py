"""The OpenAPI document and the reference page: complete and valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
import schemathesis

from nsparq.http.api import JSON_TYPE, TEXT_TYPE, Api, Endpoint, Param
from nsparq.http.describe import markdown, openapi
from nsparq.lookup.http_api import describe as describe_lookupd
from nsparq.options import NsqdOptions
from nsparq.server.api.table import NsqdApi
from nsparq.server.daemon import Nsqd

PLAIN = Endpoint(
    group="Watching", method="GET", path="/ping", handler=lambda _: None, summary="Whether it is well."
)
FULL = Endpoint(
    group="Things",
    method="PUT",
    path="/thing/v1.0/{name}",
    path_schema={"type": "string", "enum": ["a", "b"]},
    handler=lambda _: None,
    summary="Change a thing.",
    details="At once.",
    params=(
        Param(name="size", help="how large", required=True, schema={"type": "integer", "minimum": 0}),
        Param(name="colour", help="any"),
    ),
    permission="admin",
    keeps_body=True,
    body_help="the thing",
    body_type="application/json",
    body_schema={"type": "object"},
    max_body=1_234_567,
    too_big="THING_TOO_BIG",
    success="the thing",
    success_type=JSON_TYPE,
    success_schema={"type": "object", "required": ["name"]},
    other_types=(TEXT_TYPE,),
    success_headers=(("X-Weight", "in grams"),),
    errors=((400, "INVALID_THING"), (400, "MISSING_SIZE"), (404, "NO_THING"), (500, "NOK - …")),
)
API = Api(title="things", version="1.2", endpoints=[PLAIN, FULL])


def nsqd_api() -> Api:
    return NsqdApi(Nsqd(NsqdOptions()))


APIS = {"things": API, "nsqd": nsqd_api(), "nsqlookupd": describe_lookupd()}


@pytest.mark.parametrize("name", APIS)
def test_the_description_is_an_openapi_document(name: str) -> None:
    document = openapi(APIS[name])
    assert document["openapi"].startswith("3.1.")
    assert json.loads(json.dumps(document)) == document
    # The validator has the official schema of OpenAPI documents.
    schemathesis.openapi.from_dict(document).validate()


@pytest.mark.parametrize("name", APIS)
def test_every_schema_in_the_description_is_valid(name: str) -> None:
    found = 0

    def walk(part: Any) -> None:
        nonlocal found
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if key == "schema" and value and "$ref" not in value:
                jsonschema_rs.meta.validate(
                    {"$schema": "https://json-schema.org/draft/2020-12/schema", **value}
                )
                found += 1
            elif isinstance(value, dict | list):
                walk(value)

    walk(openapi(APIS[name]))
    assert found


@pytest.mark.parametrize("name", APIS)
def test_every_operation_has_a_unique_name(name: str) -> None:
    document = openapi(APIS[name])
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids)) == len(APIS[name].endpoints)
    assert all(text.replace("_", "").isalnum() for text in ids)


def test_an_endpoint_is_described_in_full() -> None:
    document = openapi(API)
    assert document["info"] == {"title": "things", "version": "1.2"}
    assert [*document["paths"]] == ["/ping", "/thing/v1.0/{name}"]
    operation = document["paths"]["/thing/v1.0/{name}"]["put"]
    assert operation["operationId"] == "put_thing_v1_0_name"
    assert (operation["summary"], operation["description"]) == ("Change a thing.", "At once.")
    assert operation["tags"] == ["Things"]
    size, colour, name = operation["parameters"]
    assert size == {
        "name": "size",
        "in": "query",
        "required": True,
        "description": "how large",
        "schema": {"type": "integer", "minimum": 0},
    }
    assert (colour["required"], colour["schema"]) == (False, {"type": "string"})
    wanted = {"type": "string", "enum": ["a", "b"]}
    assert name == {"name": "name", "in": "path", "required": True, "schema": wanted}
    assert operation["requestBody"] == {
        "description": "the thing",
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    success = operation["responses"]["200"]
    assert success["description"] == "the thing"
    assert success["content"] == {JSON_TYPE: {"schema": dict(FULL.success_schema or {})}, TEXT_TYPE: {}}
    assert success["headers"]["X-Weight"]["description"] == "in grams"


def test_every_error_is_listed_under_its_status() -> None:
    responses = openapi(API)["paths"]["/thing/v1.0/{name}"]["put"]["responses"]
    told = {status: response["description"] for status, response in responses.items() if status != "200"}
    assert told == {
        "400": "INVALID_THING, MISSING_SIZE, INVALID_REQUEST",
        "401": "AUTH_REQUIRED",
        "403": "UNAUTHORIZED",
        "404": "NO_THING, NOT_FOUND",
        "413": "THING_TOO_BIG",
        "500": "NOK - …, INTERNAL_ERROR",
        "503": "OVERLOADED",
    }
    error = {"$ref": "#/components/schemas/Error"}
    assert all(responses[status]["content"][JSON_TYPE]["schema"] == error for status in told)


def test_an_endpoint_without_body_and_result_describes_neither() -> None:
    operation = openapi(API)["paths"]["/ping"]["get"]
    assert not {"requestBody", "description"} & operation.keys()
    assert operation["parameters"] == []
    assert operation["responses"]["200"] == {"description": "empty"}
    assert "404" not in operation["responses"]


def test_a_plain_text_error_is_described_as_text() -> None:
    endpoint = Endpoint(
        method="GET", path="/", handler=lambda _: None, summary="", errors=((507, "NOK - …"),)
    )
    responses = openapi(Api(title="", version="", endpoints=[endpoint]))["paths"]["/"]["get"]["responses"]
    assert responses["507"]["content"] == {TEXT_TYPE: {"schema": {"type": "string"}}}


def test_the_page_has_the_same_facts() -> None:
    assert (
        markdown(API, "\n# Things\n\nAbout them.\n")
        == """\
# Things

About them.

## Watching

### GET /ping

Whether it is well.

200: empty

## Things

### PUT /thing/v1.0/{name}

Change a thing.

At once.

| parameter | |
| --- | --- |
| `size` | how large (required) |
| `colour` | any |

Body: the thing, 1,234,567 bytes at most by default.

200: the thing (`application/json; charset=utf-8` or `text/plain; charset=utf-8`)

| header | |
| --- | --- |
| `X-Weight` | in grams |

400 `INVALID_THING`, 400 `MISSING_SIZE`, 404 `NO_THING`, 500 `NOK - …`

Permission: `admin`
"""
    )


def test_endpoints_of_a_group_share_one_heading() -> None:
    def endpoint(group: str, path: str) -> Endpoint:
        return Endpoint(group=group, method="GET", path=path, handler=lambda _: None, summary="s")

    page = markdown(
        Api(title="", version="", endpoints=[endpoint("A", "/1"), endpoint("A", "/2"), endpoint("B", "/3")]),
        "",
    )
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == ["## A", "### GET /1", "### GET /2", "## B", "### GET /3"]
