"""Queries to nsqlookupd over HTTP: which nsqd have a topic, and which nsqd there are."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from nsparq.addresses import heard_address
from nsparq.client.config import Config
from nsparq.client.connect.connection import checked_addresses
from nsparq.client.connect.http_get import GetFailed, get
from nsparq.client.connect.secret import reason_to_withhold
from nsparq.client.errors import ClientError

logger = logging.getLogger(__name__)

MAX_ANSWER: Final = 64 << 20
PATIENCE_S: Final = 0.5
"""How long all nsqlookupds are waited for. After that, each answer is used when it comes."""

Answers = AsyncGenerator[list[str] | None, None]
"""All addresses known so far, or None. Close it: the requests end with it."""


class LookupFailed(ClientError):
    """No nsqlookupd gave a usable answer."""


def lookup_url(address: str, path: str, **parameters: str) -> str:
    """A query's URL. `address` is `host:port`, or a URL that keeps its path. Raises ValueError."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{address!r} is not the address of an nsqlookupd")
    if parts.port is None:
        raise ValueError(f"{address}: the address of an nsqlookupd needs a port")
    query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), *parameters.items()])
    own_path = parts.path if parts.path not in ("", "/") else path
    if own_path.endswith("/lookup"):
        # The URL was given for lookups; the other endpoints are beside it.
        own_path = own_path.removesuffix("/lookup") + path
    return urlunsplit((parts.scheme, parts.netloc, own_path, query, ""))


class Lookup:
    """Asks a set of nsqlookupds and joins their answers: each may know a part only.

    An nsqlookupd may be silent until `config.lookupd_poll_timeout`. The others are not held up: a
    question gives what is known after PATIENCE_S, then more with each later answer. `None` means
    that nobody has answered yet.
    """

    def __init__(self, addresses: Iterable[str], config: Config) -> None:
        """Raises ValueError for an invalid address."""
        self.addresses = list(dict.fromkeys(addresses))
        self._config = config
        for address in self.addresses:
            lookup_url(address, "/lookup")

    def producers(self, topic: str) -> Answers:
        """Addresses of the nsqd that have the topic. Raises LookupFailed if nobody answers."""
        return self._ask("/lookup", topic=topic)

    def nodes(self) -> Answers:
        """Addresses of all nsqd."""
        return self._ask("/nodes")

    async def _ask(self, path: str, **parameters: str) -> Answers:
        urls = [lookup_url(address, path, **parameters) for address in self.addresses]
        requests = [asyncio.create_task(self._get(url)) for url in urls]
        found: dict[str, None] | None = None
        try:
            done, late = await asyncio.wait(requests, timeout=PATIENCE_S)
            while True:
                for request in requests:
                    if request in done and (answer := request.result()) is not None:
                        found = (found or {}) | dict.fromkeys(answer)
                yield None if found is None else self._filtered([*found])
                if not late:
                    break
                done, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)
        if found is None:
            raise LookupFailed(f"none of {', '.join(map(_shown, self.addresses))} answered")

    def _filtered(self, found: list[str]) -> list[str]:
        wanted = self._config.discovery_filter
        if wanted is None:
            return found
        try:
            return checked_addresses(wanted(found))
        except Exception as error:
            logger.error("the discovery_filter failed", exc_info=error)
            raise LookupFailed(f"the discovery_filter failed: {error!r}") from error

    async def _get(self, url: str) -> list[str] | None:
        """The answer of one nsqlookupd; None if it gave none."""
        config = self._config
        headers = {"Accept": "application/vnd.nsq; version=1.0", "User-Agent": config.user_agent}
        if config.auth_secret and config.lookupd_authorization:
            parts = urlsplit(url)
            host, is_encrypted = parts.hostname or "", parts.scheme == "https"
            address = f"{host}:{parts.port}"
            if not reason_to_withhold(config, address, host, is_encrypted=is_encrypted, is_nsqlookupd=True):
                headers["Authorization"] = f"Bearer {config.auth_secret}"
        try:
            status, body = await get(
                url,
                headers,
                connect_timeout=config.dial_timeout or None,
                request_timeout=config.lookupd_poll_timeout,
                max_bytes=MAX_ANSWER,
                make_context=self._context,
            )
            if status == 404:
                return []
            if status != 200:
                raise GetFailed(f"status {status}")
            content = json.loads(body)
            # Before NSQ 1.0 the result was inside `data`.
            return [*_addresses(content.get("data", content)["producers"])]
        except (GetFailed, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s: %s", _shown(url), error)
            return None

    def _context(self) -> ssl.SSLContext:
        """Trusts the system's authorities and `tls_root_ca_file`, which nsqd often shares."""
        context = ssl.create_default_context()
        if self._config.tls_root_ca_file:
            context.load_verify_locations(self._config.tls_root_ca_file)
        return context


def _addresses(producers: list[dict[str, Any]]) -> Iterable[str]:
    for producer in producers:
        address = heard_address(producer.get("broadcast_address"), producer.get("tcp_port"))
        if address is not None:
            yield address
        else:
            logger.warning("nsqlookupd reported an nsqd with an invalid address: %.200r", producer)


def _shown(url: str) -> str:
    """For logs: without user name and password."""
    return url.rpartition("@")[2] if "@" in url else url
