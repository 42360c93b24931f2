"""Chooses the nsqd that a sink publishes to, and the delivery guarantee there.

Exactly-once needs transactions, which nsparq's nsqd has and NSQ's own does not. The sink waits for
a node that does not answer: its absence must not weaken the guarantee, and a node that took part in
a batch must take part again when the batch is repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from nsparq.errors import NsparqError
from nsparq.fetch import without_secrets
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Backoff, Refused, Unreachable, base_url
from nsparq.spark.cluster.nodes import Node, identify, known_nodes
from nsparq.spark.options import NsqOptions, OptionError

__all__ = ["FindAgain", "Plan", "SinkNode", "find_again", "find_plan"]

logger = logging.getLogger(__name__)

FRESH_S: Final = 5.0
"""Age up to which a plan is used again: asking all nodes takes time."""


class SinkNode(NamedTuple):
    name: str
    """`broadcast address:HTTP port`, as nsqd reports it, whatever address we used. The nodes of a
    replicated nsqd share the name of their cluster: what one of them has staged, the next has."""
    url: str

    def __str__(self) -> str:
        return without_secrets(self.url)


FindAgain = Callable[[SinkNode], SinkNode]
"""Where a node is now."""


class Plan(NamedTuple):
    """Where and how all tasks of a write publish."""

    nodes: tuple[SinkNode, ...]
    exactly_once: bool


class _Away(NsparqError):
    """A daemon that has to be asked does not answer."""


_plans: dict[tuple[NsqOptions, bool], tuple[float, Plan]] = {}
"""Plans and their times. Spark uses this process again for the next micro-batch."""
_warned: set[tuple[str, ...]] = set()


def find_plan(options: NsqOptions, *, headers: bool = False, wait: bool = True) -> Plan:
    """Raises OptionError if exactly-once or `headers` are required and not possible, Refused, and
    Unreachable if a daemon does not answer: at once, or with `wait` after retryFor."""
    known = _plans.get((options, headers))
    if known is not None and time.monotonic() - known[0] < FRESH_S:
        return known[1]
    backoff = Backoff(options.retry_for)
    while True:
        try:
            plan = _ask(options, headers)
            break
        except _Away as away:
            if known is not None and not options.nsqd:
                # nsqlookupd is away, or a node that it named. The known nodes are still right.
                logger.warning("%s; the sink continues with the known nsqd", away)
                plan = known[1]
                break
            if not wait:
                raise Unreachable(str(away)) from away
            if not backoff.wait():
                raise Unreachable(f"{away}, for {options.retry_for:g} s (option retryFor)") from away
    if len(_plans) > 100:
        _plans.clear()
    _plans[options, headers] = time.monotonic(), plan
    return plan


def _ask(options: NsqOptions, headers: bool) -> Plan:
    access = Access.of(options)
    urls = [base_url(address) for address in options.nsqd]
    urls += [url for url in _discover(options, access) if url not in urls]
    if not urls:
        raise _Away("nsqlookupd knows no nsqd")
    if options.delivery == "at-least-once" and not headers:
        return Plan(tuple(SinkNode(base_url(url), url) for url in urls), False)
    nodes: dict[str, SinkNode] = {}
    lacking: list[str] = []
    headerless: list[str] = []
    for url in urls:
        with Client(url, access) as client:
            try:
                node = identify(client)
                if not node.is_serving:
                    continue
                has_transactions = _has_transactions(client)
                if headers and not _knows_headers(client):
                    headerless.append(without_secrets(url))
            except Unreachable as error:
                raise _Away(str(error)) from error
            except Refused as error:
                if error.status < 500:
                    raise
                raise _Away(str(error)) from error
            # The client's URL, since nsqd may have sent the client to its HTTPS port.
            nodes.setdefault(_name(node), SinkNode(_name(node), client.url))
        if not has_transactions:
            lacking.append(without_secrets(url))
    if not nodes:
        raise _Away("no nsqd serves")
    found = tuple(nodes[name] for name in sorted(nodes))
    if headerless:
        raise OptionError(
            f"column headers: {', '.join(headerless)} does not know message headers, and would take them for "
            "a part of the body. Leave the column out, or write to an nsqd of nsparq"
        )
    if options.delivery == "at-least-once":
        return Plan(found, False)
    if not lacking:
        return Plan(found, True)
    if options.delivery == "exactly-once":
        raise OptionError(
            f"option delivery: exactly-once needs the transactions of nsparq's nsqd, and "
            f"{', '.join(lacking)} has none. Write to another nsqd, or set delivery to at-least-once"
        )
    if (key := tuple(lacking)) not in _warned:
        _warned.add(key)
        logger.warning(
            "the sink delivers AT LEAST ONCE: %s has no transactions, so rows that are written again after "
            "a failure are published again",
            ", ".join(lacking),
        )
    return Plan(found, False)


def find_again(options: NsqOptions, lost: SinkNode) -> SinkNode:
    """Where a node is that does not answer: another node of its cluster may have taken over."""
    access = Access.of(options)
    with suppress(_Away):
        for url in [*map(base_url, options.nsqd), *_discover(options, access)]:
            with suppress(Unreachable, Refused), Client(url, access) as client:
                node = identify(client)
                if node.is_serving and _name(node) == lost.name:
                    return SinkNode(lost.name, client.url)
    return lost


def _name(node: Node) -> str:
    return node.cluster or node.name


def _discover(options: NsqOptions, access: Access) -> list[str]:
    """URLs of all nsqd that any nsqlookupd knows."""
    urls: set[str] = set()
    failures: list[Exception] = []
    for address in options.nsqlookupd:
        with Client(address, access) as client:
            try:
                urls |= {node.url for node in known_nodes(client)}
            except (Unreachable, Refused) as error:
                failures.append(error)
    if failures and len(failures) == len(options.nsqlookupd):
        raise _Away(str(failures[0])) from failures[0]
    for failure in failures:
        logger.warning("%s", failure)
    return sorted(urls)


def _knows_headers(client: Client) -> bool:
    try:
        return bool(client.info().get("headers"))
    except Refused as refused:
        if refused.status not in (401, 403):
            raise
        # NSQ's own nsqd answers everybody, so this one is ours.
        return True


def _has_transactions(client: Client) -> bool:
    try:
        client.get("/transaction", producer="anybody", sequence=0)
    except Refused as refused:
        if refused.status == 404:
            return False
        raise
    return True
