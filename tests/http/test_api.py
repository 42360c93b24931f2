"""The table of endpoints: routing, parameters, and the responses for what handlers return."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from nsparq.http.api import (
    JSON_TYPE,
    LATER,
    TEXT_TYPE,
    Api,
    ApiError,
    Endpoint,
    Later,
    Request,
    Response,
    Result,
    endpoints_of,
    error_response,
    parse_query,
    to_response,
)


def endpoint(method: str, path: str, handler: Callable[[Request], object] = lambda _: None) -> Endpoint:
    return Endpoint(method=method, path=path, handler=handler, summary="")  # type: ignore[arg-type]


TABLE = [
    endpoint("GET", "/ping"),
    endpoint("POST", "/pub"),
    endpoint("GET", "/topic/settings"),
    endpoint("PUT", "/topic/settings"),
    endpoint("GET", "/debug/"),
    endpoint("GET", "/debug/heap"),
    endpoint("GET", "/config/{key}"),
    endpoint("PUT", "/config/{key}"),
]
API = Api(title="test", version="1", endpoints=TABLE)


def request(
    method: str, path: str, query: str = "", headers: list[tuple[bytes, bytes]] | None = None
) -> Request:
    return Request(method, path, query, headers or [])


def routed(method: str, path: str, query: str = "") -> tuple[Response | None, Request]:
    asked = request(method, path, query)
    return API.route(asked), asked


# Routing


@pytest.mark.parametrize("entry", TABLE[:6], ids=lambda entry: f"{entry.method} {entry.path}")
def test_a_method_and_a_path_select_the_endpoint(entry: Endpoint) -> None:
    refusal, asked = routed(entry.method, entry.path)
    assert refusal is None and asked.endpoint is entry and asked.path_value == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/config/log_level", "log_level"),
        ("/config/%6Cog_level", "log_level"),
        ("/config/a%20b", "a b"),
        ("/config/%C3%A4", "ä"),
        ("/config/%ff", "\ufffd"),
        ("/config/{key}", "{key}"),
        ("/config/..", ".."),
    ],
)
def test_the_placeholder_of_a_path_matches_any_text_without_a_slash(path: str, value: str) -> None:
    refusal, asked = routed("PUT", path)
    assert refusal is None and asked.endpoint is TABLE[7] and asked.path_value == value


@pytest.mark.parametrize("path", ["/config/a/b", "/config/a%2Fb", "/config//", "/config/", "/config"])
def test_the_placeholder_matches_one_part_that_is_not_empty(path: str) -> None:
    refusal, asked = routed("GET", path)
    assert refusal is not None and refusal.status == 404 and asked.endpoint is None


@pytest.mark.parametrize("path", ["/", "", "/nope", "/ping/x", "/topic", "/p%", "/pi\xffng", "*"])
def test_an_unknown_path_is_not_found(path: str) -> None:
    refusal, asked = routed("GET", path)
    assert refusal is not None and asked.endpoint is None
    assert (refusal.status, refusal.body) == (404, b'{"message":"NOT_FOUND"}')
    assert refusal.nsq_header and refusal.content_type == JSON_TYPE


def test_an_escaped_path_is_decoded() -> None:
    refusal, asked = routed("GET", "/%70ing")
    assert refusal is None and asked.endpoint is TABLE[0]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/ping", "GET, OPTIONS"),
        ("HEAD", "/ping", "GET, OPTIONS"),
        ("DELETE", "/topic/settings", "GET, OPTIONS, PUT"),
        ("POST", "/config/x", "GET, OPTIONS, PUT"),
    ],
)
def test_a_wrong_method_gets_the_list_of_methods(method: str, path: str, allowed: str) -> None:
    refusal, asked = routed(method, path)
    assert refusal is not None and asked.endpoint is None
    assert (refusal.status, refusal.body) == (405, b'{"message":"METHOD_NOT_ALLOWED"}')
    assert refusal.headers == (("Allow", allowed),)


@pytest.mark.parametrize(("path", "allowed"), [("/ping", "GET, OPTIONS"), ("/config/x", "GET, OPTIONS, PUT")])
def test_options_lists_the_methods_of_a_path(path: str, allowed: str) -> None:
    refusal, _ = routed("OPTIONS", path)
    assert refusal == Response(headers=(("Allow", allowed),), nsq_header=False)


def test_options_of_everything_gets_an_empty_response() -> None:
    assert routed("OPTIONS", "*")[0] == Response(nsq_header=False)


@pytest.mark.parametrize(
    ("method", "path", "query", "status", "location"),
    [
        ("GET", "/ping/", "", 301, "/ping"),
        ("GET", "//ping", "", 301, "/ping"),
        ("GET", "/PING", "", 301, "/ping"),
        ("GET", "/Topic//Settings/", "topic=a&b=%20", 301, "/topic/settings?topic=a&b=%20"),
        ("GET", "/debug", "", 301, "/debug/"),
        ("GET", "/debug/heap/", "", 301, "/debug/heap"),
        ("POST", "/Pub", "topic=t", 308, "/pub?topic=t"),
        ("PUT", "/topic/settings/", "", 308, "/topic/settings"),
    ],
)
def test_a_path_with_wrong_case_or_slashes_is_redirected(
    method: str, path: str, query: str, status: int, location: str
) -> None:
    refusal, asked = routed(method, path, query)
    assert refusal == Response(status=status, headers=(("Location", location),), nsq_header=False)
    assert asked.endpoint is None


# Endpoints as decorators


class Letters:
    def __init__(self, size: int) -> None:
        self.size = size

    def topics(self, request: Request) -> set[str]:
        return {request.query * self.size}

    def is_owner(self, request: Request) -> bool:
        return len(request.query) == self.size

    @Endpoint(
        method="POST",
        path="/z",
        summary="",
        topics=topics,
        is_owner=is_owner,
        body_help="letters",
        max_body_of=lambda api: api.size,
        success_schema={"type": "string"},
    )
    def last(self, request: Request) -> Result:
        return "z" * self.size

    @Endpoint(method="GET", path="/a", summary="", group="Own")
    def first(self, request: Request) -> Result:
        return "a" * self.size


def test_decorated_methods_are_endpoints_bound_to_their_object() -> None:
    for size in (2, 3):
        last, first = endpoints_of(Letters(size))
        asked = request("POST", "/z", "ab")
        assert last.handler(asked) == "z" * size and first.handler(asked) == "a" * size
        assert last.topics is not None and last.is_owner is not None
        assert (last.topics(asked), last.is_owner(asked), last.max_body) == ({"ab" * size}, size == 2, size)
        assert (last.group, first.group, first.topics, first.is_owner) == ("", "Own", None, None)
    assert {one.group for one in endpoints_of(Letters(1), "Letters")} == {"Letters"}


def test_a_body_with_a_description_is_kept_and_a_schema_means_json() -> None:
    last, first = endpoints_of(Letters(1))
    assert (last.keeps_body, last.success_type) == (True, JSON_TYPE)
    assert (first.keeps_body, first.success_type) == (False, "")
    assert (
        Endpoint(method="GET", path="/", summary="", success_type="x", success_schema={"a": 1}).success_type
        == "x"
    )


def test_an_endpoint_without_a_handler_is_a_bug() -> None:
    with pytest.raises(NotImplementedError, match="no handler"):
        Endpoint(method="GET", path="/", summary="").handler(request("GET", "/"))


# Parameters and headers


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {}),
        ("a=1&b=2", {"a": "1", "b": "2"}),
        ("a=1&a=2", {"a": "1"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("=a", {"": "a"}),
        ("a=b=c", {"a": "b=c"}),
        ("&&a=1&", {"a": "1"}),
        ("a=b+c%2Bd", {"a": "b c+d"}),
        ("%61=%23ephemeral", {"a": "#ephemeral"}),
        ("a=%C3%A4", {"a": "ä"}),
        ("a=\xc3\xa4", {"a": "ä"}),  # as bytes off the wire, read as Latin-1
        ("a=%ff", {"a": "\udcff"}),
        ("a?b=c", {"a?b": "c"}),
    ],
)
def test_a_query_consists_of_names_and_values(query: str, expected: dict[str, str]) -> None:
    assert parse_query(query) == expected
    assert request("GET", "/", query).parameters == expected


@pytest.mark.parametrize("query", ["a=1;b=2", "a=%", "a=%2", "a=%zz", "%=a", "a=1&b=%g0"])
def test_a_malformed_query_is_refused(query: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_query(query)
    assert (caught.value.status, caught.value.code) == (400, "INVALID_REQUEST")


def test_a_missing_required_parameter_has_its_own_error_code() -> None:
    assert request("GET", "/", "topic=a").parameter("topic", "MISSING") == "a"
    for query in ("", "topic=", "topics=a"):
        with pytest.raises(ApiError, match="^400 MISSING$"):
            request("GET", "/", query).parameter("topic", "MISSING")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("true", True), ("1", True), ("false", False), ("0", False), ("yes", None), ("", None), ("TRUE", None)],
)
def test_a_flag_is_true_or_false_and_any_other_value_is_the_default(
    value: str, expected: bool | None
) -> None:
    asked = request("GET", "/", f"flag={value}")
    for default in (True, False):
        assert asked.flag("flag", default) is (default if expected is None else expected)
        assert asked.flag("another", default) is default


def test_header_names_ignore_case_and_the_first_value_counts() -> None:
    headers = [(b"HOST", b"a"), (b"X-one", b"1"), (b"x-ONE", b"2"), (b"Odd", b"\xff")]
    asked = request("GET", "/", headers=headers)
    assert [asked.header(name) for name in ("Host", "X-One", "odd", "None")] == ["a", "1", "\xff", ""]


# Results of handlers


@pytest.mark.parametrize(
    ("result", "body", "content_type"),
    [
        (None, b"", ""),
        ("", b"", ""),
        ("OK", b"OK", TEXT_TYPE),
        ("ä\ud800", "ä?".encode(), TEXT_TYPE),
        (0, b"0", JSON_TYPE),
        (True, b"true", JSON_TYPE),
        ([], b"[]", JSON_TYPE),
        ({"a": [1, None], "ä": "\ud800"}, '{"a":[1,null],"ä":"?"}'.encode(), JSON_TYPE),
    ],
)
def test_none_is_empty_a_text_is_sent_as_it_is_and_other_values_as_json(
    result: Result, body: bytes, content_type: str
) -> None:
    assert to_response(result) == Response(body=body, content_type=content_type)


def test_a_response_object_is_sent_unchanged() -> None:
    response = Response(status=299, body=b"x", headers=(("A", "b"),), nsq_header=False)
    assert to_response(response) is response


def test_an_error_response_has_its_code_and_further_keys() -> None:
    found = error_response(410, "OFFSET_GONE", (("A", "b"),), earliest=7, reason="gone")
    assert (found.status, found.content_type, found.headers) == (410, JSON_TYPE, (("A", "b"),))
    assert json.loads(found.body) == {"message": "OFFSET_GONE", "earliest": 7, "reason": "gone"}
    error = ApiError(410, "OFFSET_GONE", earliest=7)
    assert (str(error), error.more, error.headers) == ("410 OFFSET_GONE", {"earliest": 7}, ())


# The guard


def guarded(
    guard: Callable[[Request, Endpoint], Awaitable[None] | None],
    handler: Callable[[Request], object] = lambda _: "done",
) -> tuple[Api, Request]:
    api = Api(title="", version="", endpoints=[endpoint("GET", "/", handler)], guard=guard)
    asked = request("GET", "/")
    assert api.route(asked) is None
    return api, asked


def test_a_guard_without_objection_lets_the_request_pass_at_once() -> None:
    seen = []
    api, asked = guarded(lambda *about: seen.append(about))
    assert api.handle(asked) == "done"
    assert seen == [(asked, api.endpoints[0])]


def test_a_guard_that_refuses_prevents_the_call_of_the_handler() -> None:
    def refuse(*_: object) -> None:
        raise ApiError(403, "NO")

    api, asked = guarded(refuse, lambda _: pytest.fail("was asked"))
    with pytest.raises(ApiError, match="403 NO"):
        api.handle(asked)


def test_a_guard_may_be_asynchronous() -> None:
    """With every kind of handler: it returns the result, awaits it, or answers later."""

    async def slow(request: Request) -> str:
        await asyncio.sleep(0)
        return "waited"

    def later(request: Request) -> Later:
        asyncio.get_running_loop().call_soon(request.answer, "later")
        return LATER

    def at_once(request: Request) -> Later:
        request.answer("at once")
        request.answer("twice")
        return LATER

    def failing_later(request: Request) -> Later:
        asyncio.get_running_loop().call_soon(request.answer, ApiError(503, "LATE"))
        return LATER

    def failing(request: Request) -> Result:
        raise ApiError(400, "EARLY")

    async def ask(handler: Callable[[Request], object], refusal: Exception | None = None) -> Result:
        passed = asyncio.Event()

        async def think() -> None:
            await passed.wait()
            if refusal:
                raise refusal

        def checked(request: Request) -> object:
            assert passed.is_set()
            return handler(request)

        api, asked = guarded(lambda *_: think(), checked)
        waiting = asyncio.ensure_future(api.handle(asked))  # type: ignore[arg-type]  # it must be something to wait for
        await asyncio.sleep(0)
        assert not waiting.done()
        passed.set()
        return await waiting

    assert asyncio.run(ask(lambda _: "done")) == "done"
    assert asyncio.run(ask(slow)) == "waited"
    assert asyncio.run(ask(later)) == "later"
    assert asyncio.run(ask(at_once)) == "at once"
    for handler, text in ((failing, "400 EARLY"), (failing_later, "503 LATE")):
        with pytest.raises(ApiError, match=text):
            asyncio.run(ask(handler))
    with pytest.raises(ApiError, match="401 WHO"):
        asyncio.run(ask(lambda _: pytest.fail("was asked"), ApiError(401, "WHO")))


def test_an_answer_after_the_request_was_cancelled_is_dropped() -> None:
    async def scenario() -> None:
        asked_for = []

        def later(request: Request) -> Later:
            asked_for.append(request)
            return LATER

        async def think() -> None:
            await asyncio.sleep(0)

        api, asked = guarded(lambda *_: think(), later)
        waiting = asyncio.ensure_future(api.handle(asked))  # type: ignore[arg-type]  # it must be something to wait for
        while not asked_for:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        asked.answer("too late")
        asked.answer(ApiError(503, "TOO_LATE"))

    asyncio.run(scenario())


def test_an_answer_without_a_connection_is_not_an_error() -> None:
    request("GET", "/").answer("OK")
