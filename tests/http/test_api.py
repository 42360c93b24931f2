"""Endpoints in a table: which one a request is for, what it asks, what becomes of what a handler gives."""

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
def test_a_method_on_a_path_is_its_endpoint(entry: Endpoint) -> None:
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
def test_the_open_end_of_a_path_takes_anything_without_a_slash(path: str, value: str) -> None:
    refusal, asked = routed("PUT", path)
    assert refusal is None and asked.endpoint is TABLE[7] and asked.path_value == value


@pytest.mark.parametrize("path", ["/config/a/b", "/config/a%2Fb", "/config//", "/config/", "/config"])
def test_it_takes_no_further_part_and_is_not_empty(path: str) -> None:
    refusal, asked = routed("GET", path)
    assert refusal is not None and refusal.status == 404 and asked.endpoint is None


@pytest.mark.parametrize("path", ["/", "", "/nope", "/ping/x", "/topic", "/p%", "/pi\xffng", "*"])
def test_a_path_that_is_not_there_is_not_found(path: str) -> None:
    refusal, asked = routed("GET", path)
    assert refusal is not None and asked.endpoint is None
    assert (refusal.status, refusal.body) == (404, b'{"message":"NOT_FOUND"}')
    assert refusal.nsq_header and refusal.content_type == JSON_TYPE


def test_an_escaped_path_is_the_path_that_it_means() -> None:
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
def test_another_method_is_told_which_there_are(method: str, path: str, allowed: str) -> None:
    refusal, asked = routed(method, path)
    assert refusal is not None and asked.endpoint is None
    assert (refusal.status, refusal.body) == (405, b'{"message":"METHOD_NOT_ALLOWED"}')
    assert refusal.headers == (("Allow", allowed),)


@pytest.mark.parametrize(("path", "allowed"), [("/ping", "GET, OPTIONS"), ("/config/x", "GET, OPTIONS, PUT")])
def test_options_tells_the_methods_of_a_path(path: str, allowed: str) -> None:
    refusal, _ = routed("OPTIONS", path)
    assert refusal == Response(headers=(("Allow", allowed),), nsq_header=False)


def test_options_of_everything_is_merely_answered() -> None:
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
def test_a_path_that_is_merely_spelled_otherwise_is_led_to_the_proper_one(
    method: str, path: str, query: str, status: int, location: str
) -> None:
    refusal, asked = routed(method, path, query)
    assert refusal == Response(status=status, headers=(("Location", location),), nsq_header=False)
    assert asked.endpoint is None


# What is asked


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
def test_a_query_is_names_and_values(query: str, expected: dict[str, str]) -> None:
    assert parse_query(query) == expected
    assert request("GET", "/", query).parameters == expected


@pytest.mark.parametrize("query", ["a=1;b=2", "a=%", "a=%2", "a=%zz", "%=a", "a=1&b=%g0"])
def test_a_query_that_cannot_be_parsed_is_refused(query: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_query(query)
    assert (caught.value.status, caught.value.code) == (400, "INVALID_REQUEST")


def test_a_parameter_that_must_be_there_is_asked_for_by_its_own_code() -> None:
    assert request("GET", "/", "topic=a").parameter("topic", "MISSING") == "a"
    for query in ("", "topic=", "topics=a"):
        with pytest.raises(ApiError, match="^400 MISSING$"):
            request("GET", "/", query).parameter("topic", "MISSING")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("true", True), ("1", True), ("false", False), ("0", False), ("yes", None), ("", None), ("TRUE", None)],
)
def test_a_flag_says_yes_or_no_and_anything_else_is_its_default(value: str, expected: bool | None) -> None:
    asked = request("GET", "/", f"flag={value}")
    for default in (True, False):
        assert asked.flag("flag", default) is (default if expected is None else expected)
        assert asked.flag("another", default) is default


def test_a_header_is_found_in_any_case_and_the_first_counts() -> None:
    headers = [(b"HOST", b"a"), (b"X-one", b"1"), (b"x-ONE", b"2"), (b"Odd", b"\xff")]
    asked = request("GET", "/", headers=headers)
    assert [asked.header(name) for name in ("Host", "X-One", "odd", "None")] == ["a", "1", "\xff", ""]


# What handlers give


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
def test_nothing_is_empty_a_text_is_itself_and_the_rest_is_json(
    result: Result, body: bytes, content_type: str
) -> None:
    assert to_response(result) == Response(body=body, content_type=content_type)


def test_a_response_goes_out_as_it_is() -> None:
    response = Response(status=299, body=b"x", headers=(("A", "b"),), nsq_header=False)
    assert to_response(response) is response


def test_an_error_is_its_code_and_what_stands_beside_it() -> None:
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


def test_a_guard_that_has_nothing_to_say_lets_the_request_pass_at_once() -> None:
    seen = []
    api, asked = guarded(lambda *about: seen.append(about))
    assert api.handle(asked) == "done"
    assert seen == [(asked, api.endpoints[0])]


def test_a_guard_that_refuses_keeps_the_handler_from_being_asked() -> None:
    def refuse(*_: object) -> None:
        raise ApiError(403, "NO")

    api, asked = guarded(refuse, lambda _: pytest.fail("was asked"))
    with pytest.raises(ApiError, match="403 NO"):
        api.handle(asked)


def test_a_guard_may_take_its_time() -> None:
    """And the handler may be of any kind: it gives the answer, waits for it, or gives it later."""

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


def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
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


def test_an_answer_without_anybody_to_tell_is_no_error() -> None:
    request("GET", "/").answer("OK")
