"""nsqd's HTTP API: NSQ's endpoints, and the table of all of them.

`python -m nsparq.server.http_api --markdown` prints the checked-in reference page, `--openapi` the
description that the daemon serves.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsparq.errors import Exiting, FatalClientError, StorageError, SyncFailed
from nsparq.http.api import (
    JSON_TYPE,
    LATER,
    TEXT_TYPE,
    Api,
    ApiError,
    Later,
    Request,
    Response,
    Result,
    encode_json,
)
from nsparq.http.describe import markdown, openapi
from nsparq.http.hosts import HostNames
from nsparq.packed import PackedBodies
from nsparq.server.arguments import find_channel, find_topic_and_name, is_valid
from nsparq.server.debug import DebugApi
from nsparq.server.http_endpoints import nsqd_endpoints
from nsparq.server.log_api import LogApi
from nsparq.server.memory import memory_stats
from nsparq.server.metrics import Metrics
from nsparq.server.stats_text import render_stats
from nsparq.server.topics_api import TopicsApi
from nsparq.server.transaction_api import TransactionApi
from nsparq.version import NSQ_VERSION
from nsparq.wire.server import decode_multiple

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

SLICE_SIZE: Final = 64 << 10
"""Bytes of stats that are encoded before the loop has its turn."""
_DEFER = re.compile(r"[+-]?[0-9]{1,19}")


class HttpApi:
    """The handlers of one nsqd."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self.broker = nsqd.broker
        self.metrics = Metrics(nsqd)
        self.log = LogApi(nsqd)
        self.topics = TopicsApi(nsqd)
        self.transactions = TransactionApi(nsqd)
        self.debug = DebugApi(nsqd)
        options = nsqd.options
        hosts = HostNames(options.broadcast_address, options.http_address, allowed=options.allowed_host)
        self.api = Api(
            title="nsqd",
            version=NSQ_VERSION,
            endpoints=nsqd_endpoints(self),
            guard=nsqd.guard,
            # With a policy file a page of somebody else's has no secret.
            check_host=None if nsqd.guard is not None else hosts.check,
        )

    # publishing

    def pub(self, request: Request) -> Result | Later:
        body = request.body
        if not body:
            raise ApiError(400, "MSG_EMPTY")
        topic = self._valid_topic(request)
        defer = request.parameters.get("defer")
        defer_ms = 0
        if defer is not None:
            self._topic_to_publish(topic)
            defer_ms = int(defer) if _DEFER.fullmatch(defer) else -1
            if not 0 <= defer_ms <= self.nsqd.options.max_req_timeout * 1000:
                raise ApiError(400, "INVALID_DEFER")
        return self._publish(request, topic, PackedBodies(array("I", (len(body),)), body), defer_ms)

    def mpub(self, request: Request) -> Result | Later:
        topic = self._valid_topic(request)
        self._topic_to_publish(topic)
        mode = request.parameters.get("binary", "false")
        bodies = self._lines(request.body) if mode in ("false", "0") else self._binary(request.body)
        if not bodies:
            return "OK"
        return self._publish(request, topic, bodies, 0)

    def _lines(self, body: bytes) -> PackedBodies:
        lines = [line for line in body.split(b"\n") if line]
        if lines and max(map(len, lines)) > self.nsqd.options.max_msg_size:
            raise ApiError(413, "MSG_TOO_BIG")
        return PackedBodies.of(lines)

    def _binary(self, body: bytes) -> PackedBodies:
        try:
            return decode_multiple(body, self.nsqd.limits)
        except FatalClientError as error:
            raise ApiError(413, error.code.removeprefix("E_")) from error

    def _valid_topic(self, request: Request) -> str:
        topic = request.parameters.get("topic")
        if topic is None:
            raise ApiError(400, "MISSING_ARG_TOPIC")
        if topic not in self.broker.topics and not is_valid(topic):
            raise ApiError(400, "INVALID_TOPIC")
        return topic

    def _topic_to_publish(self, name: str) -> None:
        """NSQ creates the topic before it looks at the rest of the request."""
        try:
            self.broker.get_topic(name)
        except (Exiting, StorageError, OSError) as error:
            raise ApiError(503, "EXITING") from error

    def _publish(self, request: Request, topic: str, bodies: PackedBodies, defer_ms: int) -> Later:
        def done(verb: str, error: Exception | None) -> None:
            code = "FSYNC_FAILED" if isinstance(error, SyncFailed) else "EXITING"
            request.answer("OK" if error is None else ApiError(503, code))

        try:
            self.broker.publish(topic, bodies, defer_ms, done, "PUB")
        except (Exiting, StorageError, OSError) as error:
            raise ApiError(503, "EXITING") from error
        return LATER

    # topics and channels

    def create_topic(self, request: Request) -> Later | None:
        return self._answer_new(request, self.broker.get_topic(self._valid_topic(request)))

    def delete_topic(self, request: Request) -> Later:
        self.broker.delete_topic(self._known_topic(request).name)
        return self._answer_when_durable(request)

    def empty_topic(self, request: Request) -> Later:
        self._valid_topic(request)
        self._known_topic(request).empty()
        return self._answer_when_durable(request)

    def pause_topic(self, request: Request) -> Later:
        self._known_topic(request).pause()
        return self._answer_when_durable(request)

    def unpause_topic(self, request: Request) -> Later:
        self._known_topic(request).unpause()
        return self._answer_when_durable(request)

    def _answer_when_durable(self, request: Request) -> Later:
        """Once it is on disk: a crash after the answer changes nothing."""
        self.broker.changes.when_durable(request.answer)
        return LATER

    def _answer_new(self, request: Request, topic: Topic) -> Later | None:
        """Once the disk has it, if it is promised that."""
        return self._answer_when_durable(request) if topic.is_synchronous else None

    def _known_topic(self, request: Request) -> Topic:
        name = request.parameters.get("topic")
        if name is None:
            raise ApiError(400, "MISSING_ARG_TOPIC")
        topic = self.broker.topics.get(name)
        if topic is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return topic

    def create_channel(self, request: Request) -> Later | None:
        topic, channel = find_topic_and_name(self.broker, request)
        topic.get_channel(channel)
        return self._answer_new(request, topic)

    def delete_channel(self, request: Request) -> Later:
        channel = find_channel(self.broker, request)
        channel.topic.delete_channel(channel.name)
        return self._answer_when_durable(request)

    def empty_channel(self, request: Request) -> Later:
        find_channel(self.broker, request).empty()
        return self._answer_when_durable(request)

    def pause_channel(self, request: Request) -> Later:
        find_channel(self.broker, request).pause()
        return self._answer_when_durable(request)

    def unpause_channel(self, request: Request) -> Later:
        find_channel(self.broker, request).unpause()
        return self._answer_when_durable(request)

    # watching

    def ping(self, request: Request) -> Response:
        trouble = self.broker.health.error
        if trouble is None:
            return Response(body=b"OK", content_type=TEXT_TYPE, nsq_header=False)
        text = f"NOK - {trouble}".encode("utf-8", "replace")
        return Response(status=500, body=text, content_type=TEXT_TYPE, nsq_header=False)

    def info(self, request: Request) -> Result:
        nsqd, options = self.nsqd, self.nsqd.options
        return {
            "version": NSQ_VERSION,
            "broadcast_address": options.broadcast_address,
            "hostname": nsqd.hostname,
            "http_port": nsqd.http_port,
            "tcp_port": nsqd.tcp_port,
            "start_time": self.broker.start_s,
            "max_heartbeat_interval": round(options.max_heartbeat_interval * 1e9),
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": round(options.max_output_buffer_timeout * 1e9),
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
        }

    async def stats(self, request: Request) -> Response:
        """With a break now and then: ten thousand topics take a while."""
        parameters = request.parameters
        stats: dict[str, Any] = {}
        for _ in self.broker.stats_in_slices(
            stats,
            parameters.get("topic", ""),
            parameters.get("channel", ""),
            request.flag("include_clients", default=True),
        ):
            await asyncio.sleep(0)
        if request.flag("include_mem", default=True):
            behind = {name: stats.pop(name) for name in ("producers", "corrupt_files")}
            stats |= {"memory": memory_stats(), **behind}
        if parameters.get("format") == "json":
            return Response(body=await _join_in_slices(_json_pieces(stats)), content_type=JSON_TYPE)
        text = render_stats(stats, self.broker.wall_ns() / 1e9)
        pieces = (piece.encode("utf-8", "replace") for piece in text)
        return Response(body=await _join_in_slices(pieces), content_type=TEXT_TYPE)


def _json_pieces(stats: Mapping[str, Any]) -> Iterator[bytes]:
    """An object as JSON, with the entries of its lists one by one."""
    for number, (name, value) in enumerate(stats.items()):
        yield b"%b%b:" % (b"," if number else b"{", encode_json(name))
        if not isinstance(value, list):
            yield encode_json(value)
            continue
        yield b"["
        for place, entry in enumerate(value):
            yield b"," + encode_json(entry) if place else encode_json(entry)
        yield b"]"
    yield b"}"


async def _join_in_slices(pieces: Iterable[bytes]) -> bytes:
    whole = bytearray()
    rest_at = SLICE_SIZE
    for piece in pieces:
        whole += piece
        if len(whole) >= rest_at:
            rest_at = len(whole) + SLICE_SIZE
            await asyncio.sleep(0)
    return bytes(whole)


INTRODUCTION: Final = """
# nsqd's HTTP API

Made from the table that the daemon routes by (`make docs`); the same description, for programs, is at
`/openapi.json`. Parameters go into the query string, also for POST; of a repeated one the first counts.
Errors are `{"message":"CODE"}`. Names of topics and channels: 1 to 64 of `.a-zA-Z0-9_-`, and `#ephemeral`
(as `%23ephemeral`) behind them if they are to leave nothing.

Any endpoint may answer 400 `INVALID_REQUEST` (the query cannot be parsed), 404 `NOT_FOUND`, 405
`METHOD_NOT_ALLOWED`, 413 (the body is too long), 500 `INTERNAL_ERROR`, 503 `OVERLOADED` (too much is waiting
to be read by slow clients); 401 `AUTH_REQUIRED` and 403 `UNAUTHORIZED` where the API is guarded (see
[auth](../auth.md)), and 403 `TLS_REQUIRED` on the plain port with `--tls-required`. A request line with its
headers may have 64 KiB and 10 seconds, a body 60 seconds.

Sequence numbers count the messages of one topic on one node. They never repeat, and they may skip.
"""


def _describe(form: str) -> str:
    from nsparq.options import NsqdOptions
    from nsparq.server.daemon import Nsqd

    api = HttpApi(Nsqd(NsqdOptions())).api
    if form == "--markdown":
        return markdown(api, INTRODUCTION)
    return json.dumps(openapi(api), indent=2) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("--markdown", "--openapi"):
        sys.exit("usage: python -m nsparq.server.http_api --markdown|--openapi")
    sys.stdout.write(_describe(sys.argv[1]))
