"""Seeded garbage for the HTTP port, and the judge of what comes back.

A case is bytes, cut into pieces as they are sent, made from its seed alone: random bytes, or valid
requests on one connection that were mutated. The broker must answer with whole HTTP answers that
are documented, or close; `play` says what else it did. HEAD is left out: only who asked knows that
its answer has no body.
"""

from __future__ import annotations

import json
import random
import re
from functools import partial
from typing import Final

from tests.faults.fuzzing import cut, play_against, run_cases
from tests.support import multi

STATUSES: Final = frozenset({200, 301, 308, 400, 404, 405, 409, 410, 413, 414, 416, 417, 431, 501, 503, 505})
CODES: Final = frozenset(
    "NOT_FOUND METHOD_NOT_ALLOWED INVALID_REQUEST MSG_TOO_BIG MSG_EMPTY BODY_TOO_BIG BAD_BODY BAD_MESSAGE "
    "MISSING_ARG_TOPIC MISSING_ARG_CHANNEL INVALID_TOPIC INVALID_ARG_TOPIC INVALID_ARG_CHANNEL INVALID_DEFER "
    "TOPIC_NOT_FOUND CHANNEL_NOT_FOUND INVALID_OPTION INVALID_VALUE MISSING_ARG_FROM INVALID_ARG_FROM "
    "INVALID_ARG_MAX_BYTES INVALID_ARG_COUNT INVALID_ARG_STATE INVALID_ARG_TO INVALID_ARG_SEQUENCE "
    "INVALID_ARG_TIME MISSING_ARG_SEQUENCE MISSING_ARG_TARGET INVALID_SETTINGS WRONG_INCARNATION OFFSET_GONE "
    "OFFSET_AHEAD".split()
)

_TOPICS = [
    "fuzz",
    "fuzz",
    "fuzz",
    "fuzz%23ephemeral",
    "f!",
    "",
    "n" * 65,
    "..",
    "%00",
    "%c3%a9",
    "%zz",
    "a%2fb",
]
_CHANNELS = ["c", "c", "c%23ephemeral", "c!", ""]
_DEFERS = ["0", "100", "-1", "x", "", "3600001", "99999999999999999999", "+5", "1e3"]
_NUMBERS = [
    *_DEFERS,
    "5",
    "1000",
    "-9223372036854775808",
    "9223372036854775808",
    "start",
    "end",
    "%00",
    "1_0",
]
_PATHS = [
    "/ping",
    "/info",
    "/stats",
    "/stats?format=json",
    "/pub",
    "/mpub",
    "/config/log_level",
    "/config/nope",
    "/config/",
    "/nope",
    "/",
    "*",
    "/ping/",
    "/PUB",
    "//stats//",
    "/%2e%2e/%2e%2e",
    "/metrics",
    "/openapi.json",
    "/debug/pprof/",
    "/debug/pprof/goroutine",
    "/debug/freememory",
    "/debug/setblockrate",
    "http://h/ping",
]
_HEADERS = [
    "Connection: keep-alive",
    "Connection: close",
    "Expect: 100-continue",
    "Accept: application/vnd.nsq; version=1.0",
    "Content-Length: 5",
    "Content-Length: -1",
    "Content-Length: 99999999999",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip",
    "Host: other",
    "X: " + "y" * 3000,
    "Upgrade: websocket",
    " folded",
    "no colon",
    ": no name",
]


def _body(choose: random.Random) -> bytes:
    match choose.randrange(6):
        case 0:
            return b""
        case 1:
            return b"\n".join(choose.randbytes(choose.randrange(20)) for _ in range(5))
        case 2:
            return multi([choose.randbytes(choose.randint(1, 30)) for _ in range(choose.randrange(4))])
        case 3:
            settings = [b'{"retention_bytes":5}', b'{"retention_age":-1}', b'{"durability":"x"}', b'{"x":[]}']
            return choose.choice([b"info", b"debug", b"bad", b"[]", b"{}", b"null", *settings])
        case _:
            return choose.randbytes(choose.choice([1, 10, 300, 3000]))


def _target(choose: random.Random) -> tuple[str, str]:
    """Method and target, mostly of the same endpoint."""
    topic, channel = choose.choice(_TOPICS), choose.choice(_CHANNELS)
    match choose.randrange(10):
        case 0 | 1:
            defer = f"&defer={choose.choice(_DEFERS)}" if choose.random() < 0.3 else ""
            return "POST", f"/pub?topic={topic}{defer}"
        case 2:
            binary = choose.choice(["", "&binary=true", "&binary=0", "&binary", "&binary=x"])
            return "POST", f"/mpub?topic={topic}{binary}"
        case 3:
            action = choose.choice(["create", "delete", "empty", "pause", "unpause", "nope"])
            return "POST", f"/topic/{action}?topic={topic}"
        case 4:
            action = choose.choice(["create", "delete", "empty", "pause", "unpause", "nope"])
            return "POST", f"/channel/{action}?topic={topic}&channel={channel}"
        case 5:
            form, clients = choose.choice(["json", "text", ""]), choose.choice(["0", "1", "x"])
            return "GET", f"/stats?format={form}&topic={topic}&channel={channel}&include_clients={clients}"
        case 6:
            key = choose.choice(["log_level", "max_msg_size", "nsqlookupd_tcp_addresses", "x", "%00"])
            # No word that would silence the log, no address that would be connected to: see _body.
            return choose.choice(["GET", "PUT"]), f"/config/{key}"
        case 7:
            return _of_the_log(choose, topic, channel)
        case _:
            return choose.choice(["GET", "GET", "POST", "PUT", "OPTIONS", "DELETE", "X"]), choose.choice(
                _PATHS
            )


def _of_the_log(choose: random.Random, topic: str, channel: str) -> tuple[str, str]:
    """Endpoints that read and move positions."""
    name = choose.choice(
        ["from", "sequence", "to", "time", "count", "max_bytes", "state", "incarnation", "verify"]
    )
    query = f"topic={topic}&{name}={choose.choice(_NUMBERS)}"
    if choose.random() < 0.5:
        query += f"&{choose.choice(['from', 'sequence'])}={choose.choice(_NUMBERS)}"
    match choose.randrange(3):
        case 0:
            return "GET", f"/topic/{choose.choice(['positions', 'read', 'peek', 'settings'])}?{query}"
        case 1:
            return "PUT", f"/topic/settings?{query}"
        case _:
            method, action = choose.choice([("POST", "seek"), ("POST", "commit"), ("GET", "peek")])
            return method, f"/channel/{action}?{query}&channel={channel}"


def _request(choose: random.Random) -> bytes:
    method, target = _target(choose)
    headers = ["Host: fuzz"]
    body = _body(choose) if method != "GET" or choose.random() < 0.1 else b""
    if choose.random() < 0.3:
        headers.append("Transfer-Encoding: chunked")
        cut = choose.randint(0, len(body))
        pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
        extension = choose.choice([b"", b"", b";x=y", b";" + b"z" * 500])
        content = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
        content += b"0\r\n" + choose.choice([b"", b"", b"Trailer: x\r\n"]) + b"\r\n"
    else:
        if body or method != "GET":
            headers.append(f"Content-Length: {len(body)}")
        content = body
    if choose.random() < 0.15:
        headers.insert(choose.randint(0, len(headers)), choose.choice(_HEADERS))
    version = choose.choice(["1.1"] * 8 + ["1.0", "2.0"])
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"{method} {target} HTTP/{version}\r\n{lines}\r\n".encode() + content


def _mutate(choose: random.Random, data: bytes) -> bytes:
    mutable = bytearray(data)
    for _ in range(choose.choice([1, 1, 2, 5])):
        at = choose.randrange(len(mutable) + 1)
        match choose.randrange(7):
            case 0 if mutable:
                mutable[at % len(mutable)] ^= 1 << choose.randrange(8)
            case 1:
                del mutable[at : at + choose.randint(1, 8)]
            case 2:
                mutable[at:at] = choose.randbytes(choose.randint(1, 8))
            case 3:
                end = at + choose.randint(1, 60)
                mutable[at:at] = mutable[at:end]
            case 4:
                del mutable[at:]
            case 5:
                mutable[at:at] = choose.choice([b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"%", b"0\r\n\r\n"])
            case _:
                mutable[at:at] = choose.choice(
                    [
                        b"A" * 70_000,
                        b"HTTP/1.1",
                        b"Content-Length: 3\r\n",
                        b"\r\n\r\n",
                        b"\xff\xff",
                        b"ffffffff",
                    ]
                )
    return bytes(mutable)


def case(seed: int) -> list[bytes]:
    """The pieces to send for this seed."""
    choose = random.Random(f"http {seed}")
    data = b"".join(_request(choose) for _ in range(choose.randint(1, 6)))
    kind = choose.random()
    if kind < 0.1:
        data = choose.randbytes(choose.randint(0, 2000))
    elif kind > 0.35:
        data = _mutate(choose, data)
    return cut(choose, data)


def play(address: tuple[str, int], pieces: list[bytes], timeout: float = 8.0) -> list[str]:
    """Send the pieces and the end of the stream; what the broker did that it must not do."""
    return play_against(judge, address, pieces, timeout)


def judge(received: bytes, reset: bool) -> list[str]:
    """Everything in these bytes that no broker says. A reset may have cost the end of them."""
    problems: list[str] = []
    closing = False
    while received:
        if closing:
            return [*problems, f"goes on after its last answer: {received[:80]!r}"]
        head, separator, rest = received.partition(b"\r\n\r\n")
        if not separator:
            return problems if reset else [*problems, f"half an answer: {received[:80]!r}"]
        status, headers, found = _read_head(head)
        problems += found
        if status is None:
            return problems
        if status == 100:
            received = rest
            continue
        length = headers.get("content-length", "")
        if not length.isdigit():
            return [*problems, f"an answer without its length: {head!r}"]
        body, received = rest[: int(length)], rest[int(length) :]
        if len(body) < int(length):
            return problems if reset else [*problems, f"half a body: {body[:80]!r}"]
        closing = headers.get("connection", "").lower() == "close"
        problem = _judge_answer(status, headers, body)
        if problem:
            problems.append(problem)
    return problems


def _read_head(head: bytes) -> tuple[int | None, dict[str, str], list[str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    status_line = re.fullmatch(r"HTTP/1\.[01] (\d{3}) [A-Za-z -]+", first)
    if not status_line:
        return None, {}, [f"not a status line: {first!r}"]
    headers: dict[str, str] = {}
    problems = []
    for line in lines:
        header = re.fullmatch(r"([A-Za-z-]+): ([\x20-\x7e\x80-\xff]*)", line)
        if not header or header[1].lower() in headers:
            problems.append(f"a header that is none, or stands twice: {line!r}")
        else:
            headers[header[1].lower()] = header[2]
    return int(status_line[1]), headers, problems


def _judge_answer(status: int, headers: dict[str, str], body: bytes) -> str:
    if status not in STATUSES:
        return f"status {status}: {body[:80]!r}"
    is_json = headers.get("content-type", "").startswith("application/json")
    if is_json:
        try:
            content = json.loads(body)
        except ValueError:
            return f"JSON that is none: {body[:80]!r}"
        if status >= 400 and (not isinstance(content, dict) or content.get("message") not in CODES):
            return f"an unknown error: {body[:80]!r}"
    elif status >= 400 and not body.startswith((b"%d " % status, b"invalid block rate")):
        return f"status {status} with {body[:80]!r}"
    return ""


run = partial(run_cases, case, play)
