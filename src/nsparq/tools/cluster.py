"""What nsqlookupds and nsqds say over HTTP: topics, who has one, figures of a channel. It blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode, urlsplit

from nsparq.addresses import join_address
from nsparq.client import Config
from nsparq.client.lookup import lookup_url
from nsparq.client.secret import may_show_secret
from nsparq.errors import NsparqError
from nsparq.fetch import Answer, FetchError, fetch
from nsparq.tools.common import SECRET_VARIABLE

__all__ = ["AskFailed", "ChannelFigures", "Cluster"]

MAX_ANSWER = 64 << 20
AT_A_TIME = 16


class AskFailed(NsparqError):
    """There is no usable answer; the text names who was asked, and why."""


@dataclass(frozen=True, slots=True)
class ChannelFigures:
    """Of one channel on one nsqd, or on several together."""

    depth: int = 0
    backend_depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    message_count: int = 0
    client_count: int = 0

    @property
    def memory_depth(self) -> int:
        return self.depth - self.backend_depth

    def __add__(self, other: ChannelFigures) -> ChannelFigures:
        names = (field.name for field in fields(self))
        return ChannelFigures(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Cluster:
    """Asks several at a time. Every method raises AskFailed if one of those asked has no usable answer."""

    def __init__(self, connect_timeout: float, request_timeout: float, config: Config | None = None) -> None:
        """`config` has the secret for those that want one, and who may sign the certificates of HTTPS."""
        self._connect_timeout, self._request_timeout = connect_timeout, request_timeout
        self._config = config or Config()
        self._want_secret: set[str] = set()
        """Hosts and ports that have asked for it: nobody else is shown it."""

    def topics(self, nsqlookupds: Iterable[str]) -> set[str]:
        answers = self._ask_all(lookup_url(address, "/topics") for address in nsqlookupds)
        return {str(topic) for answer in answers for topic in _part(answer, "topics")}

    def producers(self, nsqlookupds: Iterable[str], topic: str) -> list[str]:
        """HTTP addresses of the nsqds that have the topic; none if nobody knows it."""
        answers = self._ask_all(lookup_url(address, "/lookup", topic=topic) for address in nsqlookupds)
        found = [_http_address(one) for answer in answers for one in _part(answer, "producers")]
        return list(dict.fromkeys(found))

    def channel(self, nsqds: Iterable[str], topic: str, channel: str) -> ChannelFigures | None:
        """The sum over all of them; None if none has it."""
        query = urlencode({"format": "json", "topic": topic, "channel": channel, "include_clients": "false"})
        answers = self._ask_all(f"http://{address}/stats?{query}" for address in nsqds)
        found = [
            _figures(one)
            for answer in answers
            for its_topic in _part(answer, "topics")
            if its_topic["topic_name"] == topic
            for one in its_topic["channels"] or ()
            if one["channel_name"] == channel
        ]
        return sum(found, ChannelFigures()) if found else None

    def _ask_all(self, urls: Iterable[str]) -> list[Any]:
        asked = list(urls)
        if len(asked) == 1:
            return [self._ask(asked[0])]
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            return list(threads.map(self._ask, asked))

    def _ask(self, url: str, *, may_redirect: bool = True) -> Any:
        try:
            answer = self._fetch(url)
            if answer.status == 404:
                return {}
            content = json.loads(answer.body or b"{}") if answer.status in (200, 403) else {}
            if answer.status == 403 and may_redirect and "https_port" in content:
                # This nsqd wants TLS, and says where.
                parts = urlsplit(url)
                address = join_address(parts.hostname or "", int(content["https_port"]))
                return self._ask(f"https://{address}{parts.path}?{parts.query}", may_redirect=False)
            if answer.status != 200:
                raise AskFailed(f"GET {url}: status {answer.status}{self._explain(answer.status)}")
            if not isinstance(content, dict):
                raise AskFailed(f"GET {url}: not what NSQ would answer")
            # Before 1.0 the result was wrapped.
            return content.get("data", content)
        except FetchError as error:
            raise AskFailed(str(error)) from error
        except ValueError as error:
            raise AskFailed(f"GET {url}: {error}") from error

    def _fetch(self, url: str) -> Answer:
        parts, config = urlsplit(url), self._config
        headers = []
        if config.auth_secret and parts.netloc in self._want_secret:
            headers.append(("Authorization", f"Bearer {config.auth_secret}"))
        answer = fetch(
            url,
            headers=headers,
            connect_timeout=self._connect_timeout,
            request_timeout=self._request_timeout,
            ca_file=config.tls_root_ca_file,
            max_bytes=MAX_ANSWER,
        )
        host, is_encrypted = parts.hostname or "", parts.scheme == "https"
        if answer.status != 401 or headers or not config.auth_secret:
            return answer
        if not may_show_secret(config, parts.netloc, host, is_encrypted=is_encrypted):
            return answer
        self._want_secret.add(parts.netloc)
        return self._fetch(url)

    def _explain(self, status: int) -> str:
        if status == 401:
            return f": {SECRET_VARIABLE} is wrong" if self._config.auth_secret else f": set {SECRET_VARIABLE}"
        return ": the secret does not permit this" if status == 403 and self._config.auth_secret else ""


def _part(answer: Any, name: str) -> Sequence[Any]:
    found = answer.get(name)
    return found if isinstance(found, list) else ()


def _http_address(producer: dict[str, Any]) -> str:
    return join_address(str(producer["broadcast_address"]), int(producer["http_port"]))


def _figures(channel: dict[str, Any]) -> ChannelFigures:
    return ChannelFigures(**{field.name: int(channel.get(field.name, 0)) for field in fields(ChannelFigures)})
