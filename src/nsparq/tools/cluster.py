"""Blocking HTTP queries to nsqlookupds and nsqds: topics, nsqds, figures of a channel."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from nsparq.addresses import heard_address, join_address
from nsparq.client import Config
from nsparq.client.connect.lookup import lookup_url
from nsparq.client.connect.secret import reason_to_withhold
from nsparq.errors import NsparqError
from nsparq.fetch import Answer, FetchError, fetch
from nsparq.tools.options import SCOPE_VARIABLE, SECRET_VARIABLE

__all__ = ["NSQD", "NSQLOOKUPD", "AskFailed", "ChannelFigures", "Cluster", "Node", "number_in", "objects"]

logger = logging.getLogger(__name__)

MAX_ANSWER = 64 << 20
LARGEST = 1 << 64
AT_A_TIME = 16
NSQLOOKUPD, NSQD = "nsqlookupd", "nsqd"


class AskFailed(NsparqError):
    """No usable answer; the text says from whom, and why."""

    def __init__(self, text: str, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        """The HTTP status; 0 without an answer."""
        self.code = code
        """NSQ's error code, such as TOPIC_NOT_FOUND; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Node:
    """An nsqd that nsqlookupd knows."""

    http_address: str
    tcp_address: str


COUNTS: Final = (
    "depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "message_count",
    "client_count",
)


@dataclass(frozen=True, slots=True)
class ChannelFigures:
    """Figures of a channel on one nsqd, or summed over several."""

    depth: int = 0
    backend_depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    message_count: int = 0
    client_count: int = 0
    age_s: float | None = None
    """Age of the oldest waiting message; None if unknown, as with NSQ's own nsqds."""
    drain_s: float | None = None
    """Time to drain; infinite if it does not drain, None if unknown."""

    @property
    def memory_depth(self) -> int:
        return self.depth - self.backend_depth

    def __add__(self, other: ChannelFigures) -> ChannelFigures:
        """A channel is as far behind as its slowest nsqd."""
        return ChannelFigures(
            **{name: getattr(self, name) + getattr(other, name) for name in COUNTS},
            age_s=_highest(self.age_s, other.age_s),
            drain_s=_highest(self.drain_s, other.drain_s),
        )


class Cluster:
    """Asks several daemons at a time. Methods raise AskFailed if one gives no usable answer."""

    def __init__(self, connect_timeout: float, request_timeout: float, config: Config | None = None) -> None:
        """`config` has the auth secret and the certificate authorities for HTTPS."""
        self._connect_timeout, self._request_timeout = connect_timeout, request_timeout
        self._config = config or Config()
        self._secret_withheld: dict[str, str] = {}
        """`host:port` of those that asked for the secret, and why they do not get it; empty if they
        do. Nobody gets the secret without asking."""

    def topics(self, nsqlookupds: Iterable[str]) -> set[str]:
        answers = self._ask_all((lookup_url(address, "/topics") for address in nsqlookupds), NSQLOOKUPD)
        found = (topic for answer in answers for topic in _list(answer, "topics"))
        return {topic for topic in found if isinstance(topic, str)}

    def producers(self, nsqlookupds: Iterable[str], topic: str) -> list[str]:
        """HTTP addresses of the nsqds that have the topic."""
        return [node.http_address for node in self.nodes(nsqlookupds, topic)]

    def nodes(self, nsqlookupds: Iterable[str], topic: str = "") -> list[Node]:
        """All nsqds, or those that have the topic."""
        path, query = ("/lookup", {"topic": topic}) if topic else ("/nodes", {})
        answers = self._ask_all((lookup_url(address, path, **query) for address in nsqlookupds), NSQLOOKUPD)
        found: dict[Node, None] = {}
        for producer in (one for answer in answers for one in objects(answer, "producers")):
            host = producer.get("broadcast_address")
            http, tcp = (heard_address(host, producer.get(name)) for name in ("http_port", "tcp_port"))
            if http is None:
                logger.warning("nsqlookupd reported an nsqd with an invalid address: %.200r", producer)
            else:
                found[Node(http, tcp or "")] = None
        return list(found)

    def channel(self, nsqds: Iterable[str], topic: str, channel: str) -> ChannelFigures | None:
        """The sum over all nsqds; None if none has the channel."""
        query = urlencode({"format": "json", "topic": topic, "channel": channel, "include_clients": "false"})
        answers = self._ask_all((f"http://{address}/stats?{query}" for address in nsqds), NSQD)
        found = [
            _figures(one)
            for answer in answers
            for its_topic in objects(answer, "topics")
            if its_topic.get("topic_name") == topic
            for one in objects(its_topic, "channels")
            if one.get("channel_name") == channel
        ]
        return sum(found, ChannelFigures()) if found else None

    def _ask_all(self, urls: Iterable[str], kind: str) -> list[Mapping[str, Any]]:
        asked = list(urls)
        if len(asked) == 1:
            return [self._ask(asked[0], kind)]
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            return list(threads.map(lambda url: self._ask(url, kind), asked))

    def _ask(self, url: str, kind: str) -> Mapping[str, Any]:
        try:
            return self.call("GET", url, kind)
        except AskFailed as error:
            if error.status != 404:
                raise
            parts = urlsplit(url)
            if kind == NSQLOOKUPD and error.code == "NOT_FOUND":
                text = f"{parts.netloc} has no {parts.path}: it is not an nsqlookupd"
                raise AskFailed(text, error.status, error.code) from error
            return {}

    def call(self, method: str, url: str, kind: str = NSQD, body: bytes | None = None) -> Mapping[str, Any]:
        """The JSON object of an answer with status 200; empty if there is none. Raises
        AskFailed."""
        answer = self.exchange(method, url, kind, body)
        try:
            content = json.loads(answer.body) if answer.body not in (b"", b"OK") else {}
        except (ValueError, RecursionError) as error:
            raise AskFailed(f"{method} {url}: {error}") from error
        if not isinstance(content, dict):
            raise AskFailed(f"{method} {url}: not an answer of NSQ")
        # Before NSQ 1.0 the result was inside `data`.
        found = content.get("data", content)
        return found if isinstance(found, dict) else {}

    def exchange(self, method: str, url: str, kind: str = NSQD, body: bytes | None = None) -> Answer:
        """An answer with status 200. Raises AskFailed."""
        try:
            answer = self._fetch(method, url, kind, body)
            if answer.status == 403 and (secure := _https_url(url, answer.body)):
                url = secure
                answer = self._fetch(method, url, kind, body)
        except FetchError as error:
            raise AskFailed(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise AskFailed(f"{method} {url}: {error}") from error
        if answer.status == 200:
            return answer
        code, detail = _code(answer.body)
        reason = self._explain(url, answer.status) or (f" {code}" if code else "")
        reason += f": {detail}" if detail else ""
        raise AskFailed(f"{method} {url}: status {answer.status}{reason}", answer.status, code)

    def _fetch(self, method: str, url: str, kind: str, body: bytes | None) -> Answer:
        parts, config = urlsplit(url), self._config
        headers = []
        if config.auth_secret and self._secret_withheld.get(parts.netloc) == "":
            headers.append(("Authorization", f"Bearer {config.auth_secret}"))
        answer = fetch(
            url,
            method=method,
            body=body,
            headers=headers,
            connect_timeout=self._connect_timeout,
            request_timeout=self._request_timeout,
            ca_file=config.tls_root_ca_file,
            max_bytes=MAX_ANSWER,
        )
        host, is_encrypted = parts.hostname or "", parts.scheme == "https"
        if answer.status != 401 or headers or not config.auth_secret:
            return answer
        reason = self._secret_withheld[parts.netloc] = reason_to_withhold(
            config, parts.netloc, host, is_encrypted=is_encrypted, is_nsqlookupd=kind == NSQLOOKUPD
        )
        return answer if reason else self._fetch(method, url, kind, body)

    def _explain(self, url: str, status: int) -> str:
        if status == 401:
            if not self._config.auth_secret:
                return f": set {SECRET_VARIABLE}"
            if reason := self._secret_withheld.get(urlsplit(url).netloc):
                return f": it does not get the secret: {reason} (see {SCOPE_VARIABLE})"
            return f": {SECRET_VARIABLE} is wrong"
        return ": the secret does not permit this" if status == 403 and self._config.auth_secret else ""


def _https_url(url: str, body: bytes) -> str:
    """The HTTPS address that an nsqd names when it requires TLS; empty if it names none. Raises
    ValueError."""
    content = json.loads(body or b"{}")
    if not isinstance(content, dict) or "https_port" not in content or url.startswith("https:"):
        return ""
    parts, port = urlsplit(url), content["https_port"]
    if type(port) is not int or not 0 < port < 65536:
        raise ValueError("not an answer of NSQ")
    return f"https://{join_address(parts.hostname or '', port)}{parts.path}?{parts.query}"


def _code(body: bytes) -> tuple[str, str]:
    """The code of an error, and its reason in words; empty if there is none."""
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        content = {}
    found = [content.get(name) if isinstance(content, dict) else "" for name in ("message", "reason")]
    code, reason = (value if isinstance(value, str) else "" for value in found)
    return code, reason


# Values from answers. Missing ones, and those of a wrong type, are left out.


def _list(answer: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = answer.get(name)
    return found if isinstance(found, list) else ()


def objects(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [one for one in _list(answer, name) if isinstance(one, dict)]


def _figures(channel: Mapping[str, Any]) -> ChannelFigures:
    found = {name: number_in(channel, name) for name in COUNTS}
    counts: dict[str, Any] = {name: value for name, value in found.items() if isinstance(value, int)}
    drain_s = number_in(channel, "drain_time_s")
    if drain_s is None and number_in(channel, "drain_rate") is not None:
        drain_s = math.inf
    return ChannelFigures(**counts, age_s=number_in(channel, "oldest_message_age_s"), drain_s=drain_s)


def number_in(values: Mapping[str, Any], name: str) -> float | None:
    """None if it is missing, or larger than any figure of an nsqd."""
    value: Any = values.get(name)
    return value if type(value) in (int, float) and abs(value) < LARGEST else None


def _highest(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)
