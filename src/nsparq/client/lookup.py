"""Asking nsqlookupd over HTTP, in threads: who has a topic, and which nsqd there are."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from nsparq.addresses import join_address
from nsparq.client.config import Config
from nsparq.client.errors import ClientError
from nsparq.fetch import FetchError, fetch

logger = logging.getLogger(__name__)

MAX_ANSWER = 64 << 20


class LookupFailed(ClientError):
    """No nsqlookupd gave a usable answer."""


def lookup_url(address: str, path: str, **parameters: str) -> str:
    """The URL of a question; `address` is `host:port` or itself a URL, whose path and parameters stay."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.port is None:
        raise ValueError(f"{address}: the address of an nsqlookupd needs a port")
    query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), *parameters.items()])
    own_path = parts.path if parts.path not in ("", "/") else path
    return urlunsplit((parts.scheme, parts.netloc, own_path, query, ""))


class Lookup:
    """A set of nsqlookupds."""

    def __init__(self, addresses: Iterable[str], config: Config) -> None:
        self.addresses = list(dict.fromkeys(addresses))
        self._config = config

    async def producers(self, topic: str) -> list[str]:
        """Addresses of the nsqd that have the topic, by all nsqlookupds together. Raises LookupFailed when
        none of them answers; a topic that they do not know has none."""
        return await self._ask("/lookup", topic=topic)

    async def nodes(self) -> list[str]:
        """Addresses of all nsqd."""
        return await self._ask("/nodes")

    async def _ask(self, path: str, **parameters: str) -> list[str]:
        urls = [lookup_url(address, path, **parameters) for address in self.addresses]
        answers = await asyncio.gather(*(asyncio.to_thread(self._fetch, url) for url in urls))
        reached = [answer for answer in answers if answer is not None]
        if not reached:
            raise LookupFailed(f"none of {', '.join(self.addresses)} answered")
        return list(dict.fromkeys(address for answer in reached for address in answer))

    def _fetch(self, url: str) -> list[str] | None:
        """What one of them says; None if it cannot be asked."""
        headers = [("Accept", "application/vnd.nsq; version=1.0")]
        if self._config.auth_secret and self._config.lookupd_authorization:
            headers.append(("Authorization", f"Bearer {self._config.auth_secret}"))
        timeout = self._config.lookupd_poll_timeout
        try:
            answer = fetch(
                url,
                headers=headers,
                connect_timeout=min(self._config.dial_timeout, timeout),
                request_timeout=timeout,
                max_bytes=MAX_ANSWER,
            )
            if answer.status == 404:
                return []
            if answer.status != 200:
                raise FetchError(f"status {answer.status}")
            content = json.loads(answer.body)
            # Before 1.0 the result was wrapped.
            found: list[dict[str, Any]] = content.get("data", content)["producers"]
            return [join_address(str(one["broadcast_address"]), int(one["tcp_port"])) for one in found]
        except (FetchError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s: %s", url, error)
            return None
