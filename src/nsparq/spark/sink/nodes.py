"""Which nsqd a sink publishes to, and what it may promise there.

Exactly once needs transactions, which nsparq's nsqd has and NSQ's own has not. A node that cannot be asked is
waited for: neither may its absence weaken what is promised, nor may a node that took part in a batch be left
out when the batch is repeated.
"""

from __future__ import annotations

import logging
import time
from typing import Final, NamedTuple

from nsparq.addresses import heard_address
from nsparq.errors import NsparqError
from nsparq.fetch import without_secrets
from nsparq.spark.cluster.http_client import Access, Client, Patience, Refused, Unreachable, base_url
from nsparq.spark.options import NsqOptions, OptionError

__all__ = ["Plan", "SinkNode", "find_plan"]

logger = logging.getLogger(__name__)

FRESH_S: Final = 5.0
"""How long a plan is good for the next micro-batch: asking for each would cost more than an empty one
does."""


class SinkNode(NamedTuple):
    name: str
    """`broadcast address:HTTP port`, by its own word: the same nsqd by two addresses is one node."""
    url: str

    def __str__(self) -> str:
        return without_secrets(self.url)


class Plan(NamedTuple):
    """What the tasks of a write agree on."""

    nodes: tuple[SinkNode, ...]
    exactly_once: bool


class _Away(NsparqError):
    """Somebody who has to be asked does not answer."""


_plans: dict[NsqOptions, tuple[float, Plan]] = {}
"""Of this process, which Spark uses again for the next micro-batch, with the time of each."""
_warned: set[tuple[str, ...]] = set()


def find_plan(options: NsqOptions, *, wait: bool = True) -> Plan:
    """Raises OptionError if exactly-once was asked for and cannot be, Refused, and Unreachable when somebody
    is away: at once, or when time is up."""
    known = _plans.get(options)
    if known is not None and time.monotonic() - known[0] < FRESH_S:
        return known[1]
    patience = Patience(options.retry_for)
    while True:
        try:
            plan = _ask(options)
            break
        except _Away as away:
            if known is not None and not options.nsqd:
                # Only nsqlookupd is away, or one of the nodes that it named: those are as good as before.
                logger.warning("%s; going on with the nsqd that are known", away)
                plan = known[1]
                break
            if not wait:
                raise Unreachable(str(away)) from away
            if not patience.wait():
                raise Unreachable(f"{away}, for {options.retry_for:g} s") from away
    if len(_plans) > 100:
        _plans.clear()
    _plans[options] = time.monotonic(), plan
    return plan


def _ask(options: NsqOptions) -> Plan:
    access = Access.of(options)
    urls = [base_url(address) for address in options.nsqd]
    urls += [url for url in _discover(options, access) if url not in urls]
    if not urls:
        raise _Away("nsqlookupd knows of no nsqd")
    if options.delivery == "at-least-once":
        return Plan(tuple(SinkNode(base_url(url), url) for url in urls), False)
    nodes: dict[str, SinkNode] = {}
    lacking: list[str] = []
    for url in urls:
        with Client(url, access) as client:
            try:
                has_transactions = _has_transactions(client)
                name = _name(client)
            except Unreachable as error:
                raise _Away(str(error)) from error
            except Refused as error:
                if error.status < 500:
                    raise
                raise _Away(str(error)) from error
            # It may have sent us to its HTTPS port.
            nodes.setdefault(name, SinkNode(name, client.url))
        if not has_transactions:
            lacking.append(without_secrets(url))
    found = tuple(nodes[name] for name in sorted(nodes))
    if not lacking:
        return Plan(found, True)
    if options.delivery == "exactly-once":
        raise OptionError(
            f"option delivery: exactly-once needs the transactions of nsparq's nsqd, and "
            f"{', '.join(lacking)} has none; write to another nsqd, or settle for at-least-once"
        )
    if (key := tuple(lacking)) not in _warned:
        _warned.add(key)
        logger.warning(
            "the sink delivers AT LEAST ONCE: %s has no transactions, so that what is repeated after a "
            "failure is published again",
            ", ".join(lacking),
        )
    return Plan(found, False)


def _discover(options: NsqOptions, access: Access) -> list[str]:
    """What the nsqlookupds know, put together."""
    urls: list[str] = []
    failures: list[Exception] = []
    for address in options.nsqlookupd:
        with Client(address, access) as client:
            try:
                for one in client.nodes():
                    found = heard_address(one.get("broadcast_address"), one.get("http_port"))
                    if found is not None:
                        urls.append(f"http://{found}")
            except (Unreachable, Refused) as error:
                failures.append(error)
    if failures and len(failures) == len(options.nsqlookupd):
        raise _Away(str(failures[0])) from failures[0]
    for failure in failures:
        logger.warning("%s", failure)
    return sorted(set(urls))


def _has_transactions(client: Client) -> bool:
    try:
        client.get("/transaction", producer="anybody", sequence=0)
    except Refused as refused:
        if refused.status == 404:
            return False
        raise
    return True


def _name(client: Client) -> str:
    try:
        info = client.info()
    except Refused as refused:
        if refused.status not in (401, 403):
            raise
        # We may publish and not look: then it is called by its address.
        info = {}
    found = heard_address(info.get("broadcast_address"), info.get("http_port"))
    return found or without_secrets(client.url).partition("://")[2]
