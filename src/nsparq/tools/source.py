"""Which daemons a command of `nsparq` works with: from flags, from the environment, or on this
machine.

Flags win over the environment. Without both, it is the nsqlookupd of this machine if that answers,
otherwise the nsqd of this machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from nsparq.client.connect.lookup import lookup_url
from nsparq.fetch import Answer, FetchError, fetch
from nsparq.option_table import BOOL, DURATION, STRINGS, OptionError, opt
from nsparq.tools.answers import check_answer
from nsparq.tools.cluster import NSQD, NSQLOOKUPD, AskFailed, Cluster
from nsparq.tools.options import check_sources, check_topics, client_config, lookupd_option

__all__ = ["Answers", "Source", "SourceFlags", "environment_addresses"]

NSQD_VARIABLE: Final = "NSQ_NSQD_HTTP_ADDRESS"
LOOKUPD_VARIABLE: Final = "NSQ_LOOKUPD_HTTP_ADDRESS"
LOCAL_NSQD: Final = "127.0.0.1:4151"
LOCAL_LOOKUPD: Final = "127.0.0.1:4161"
AT_A_TIME: Final = 16
MISSING: Final = ("TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND")

R = TypeVar("R")


def environment_addresses(variable: str) -> tuple[str, ...]:
    """The addresses in an environment variable, separated by commas."""
    return tuple(part.strip() for part in os.environ.get(variable, "").split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFlags:
    """The flags that all commands share."""

    json: bool = opt(False, "print JSON, with the keys that docs/tools.md lists", BOOL, heading="Output")
    nsqd_http_address: tuple[str, ...] = opt(
        (),
        f"`host:port` of an nsqd's HTTP API, instead of {NSQD_VARIABLE} in the environment",
        STRINGS,
        heading="Where to ask (by default this machine: nsqlookupd if it answers, otherwise nsqd)",
    )
    lookupd_http_address: tuple[str, ...] = lookupd_option(
        f"`host:port` of an nsqlookupd, which knows all nsqds, instead of {LOOKUPD_VARIABLE}"
    )
    timeout: float = opt(5.0, "time limit for each request", DURATION, bound="positive")

    def validate(self) -> None:
        if self.nsqd_http_address or self.lookupd_http_address:
            check_sources(self.nsqd_http_address, self.lookupd_http_address, "nsqd-http-address")
        if any("://" in address for address in self.nsqd_http_address):
            raise OptionError("--nsqd-http-address is host:port, without http://")
        topic, channel = getattr(self, "topic", ()), getattr(self, "channel", None)
        check_topics([topic] if isinstance(topic, str) else topic, channel or None)


@dataclass(slots=True)
class Answers(Generic[R]):
    """The answers of several daemons."""

    done: dict[str, R] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Those that do not have the topic or the channel."""
    failed: dict[str, AskFailed] = field(default_factory=dict)

    def unreachable(self) -> list[dict[str, str]]:
        """For JSON."""
        return [{"node": address, "reason": str(error)} for address, error in self.failed.items()]

    def require_one(self) -> None:
        """Raises AskFailed if several nsqds have answered a question about a sequence number."""
        if len(self.done) > 1:
            nodes = " or ".join(self.done)
            raise AskFailed(
                f"sequence numbers belong to one nsqd: choose one with --nsqd-http-address={nodes}"
            )

    def report(self, program: str) -> int:
        """Name those that failed on standard error. Returns the exit status."""
        for error in self.failed.values():
            sys.stderr.write(f"{program}: {error}\n")
        return 1 if self.failed else 0


class Source:
    """The daemons. Methods raise AskFailed."""

    def __init__(self, flags: SourceFlags) -> None:
        self.cluster = Cluster(min(flags.timeout, 2.0), flags.timeout, client_config("nsparq", ()))
        self.lookupds = flags.lookupd_http_address
        self._nsqds = flags.nsqd_http_address
        self.is_default = False
        if not self.lookupds and not self._nsqds:
            self.lookupds = environment_addresses(LOOKUPD_VARIABLE)
            self._nsqds = () if self.lookupds else environment_addresses(NSQD_VARIABLE)
        if not self.lookupds and not self._nsqds:
            self.is_default = True
            if _answers(LOCAL_LOOKUPD):
                self.lookupds = (LOCAL_LOOKUPD,)
            else:
                self._nsqds = (LOCAL_NSQD,)

    def nsqds(self, topic: str = "") -> list[str]:
        """HTTP addresses of all nsqds. With nsqlookupd, only of those that have the topic."""
        if not self.lookupds:
            return list(dict.fromkeys(self._nsqds))
        found = list(dict.fromkeys(node.http_address for node in self.cluster.nodes(self.lookupds, topic)))
        if not found and not topic:
            raise AskFailed(f"nsqlookupd {', '.join(self.lookupds)} knows no nsqd")
        return found

    def ask(
        self, method: str, address: str, path: str, body: object = None, **query: str
    ) -> Mapping[str, Any]:
        """The answer of one nsqd, checked. `body` is sent as JSON."""
        data = None if body is None else json.dumps(body).encode()
        with _explained(address, path):
            answer = self.cluster.call(method, _url(address, path, query), NSQD, data)
        check_answer(address, path, answer)
        return answer

    def require_nsqd(self, address: str) -> None:
        """Raises AskFailed for an nsqlookupd: it can create and delete topics, too, of its own."""
        try:
            self.ask("GET", address, "/info")
        except AskFailed as error:
            # A secret may permit changes, and no look.
            if error.status != 403:
                raise

    def fetch(self, address: str, path: str, **query: str) -> Answer:
        """The answer of one nsqd, with its headers."""
        with _explained(address, path):
            return self.cluster.exchange("GET", _url(address, path, query))

    def ask_lookupds(self, path: str, **query: str) -> Answers[Mapping[str, Any]]:
        """POST to all nsqlookupds."""

        def post(address: str) -> Mapping[str, Any]:
            return self.cluster.call("POST", lookup_url(address, path, **query), NSQLOOKUPD)

        return self._gather(self.lookupds, post)

    def each(self, addresses: Iterable[str], ask: Callable[[str], R]) -> Answers[R]:
        """Ask several nsqds at a time. Raises AskFailed if none of them answers."""
        found = self._gather(list(addresses), ask)
        if found.failed and not found.done and not found.missing:
            error = next(iter(found.failed.values()))
            raise AskFailed(f"{error}{self._advice(error)}", error.status, error.code) from error
        return found

    def each_of(self, topic: str, ask: Callable[[str], R], channel: str = "") -> Answers[R]:
        """Ask the nsqds that have the topic. Raises AskFailed if there is none."""
        found = self.each(self.nsqds(topic), ask)
        if not found.done and not found.failed:
            what = f"the topic {topic} has no channel {channel}" if channel else f"there is no topic {topic}"
            if channel and not self.has_topic(topic):
                what = f"there is no topic {topic}"
            raise AskFailed(what, 404)
        return found

    def has_topic(self, topic: str) -> bool:
        query = {"format": "json", "topic": topic, "include_clients": "false", "include_mem": "false"}
        found = self.each(self.nsqds(topic), lambda address: self.ask("GET", address, "/stats", **query))
        return any(answer.get("topics") for answer in found.done.values())

    def _gather(self, addresses: Sequence[str], ask: Callable[[str], R]) -> Answers[R]:
        found: Answers[R] = Answers()

        def attempt(address: str) -> R | AskFailed:
            try:
                return ask(address)
            except AskFailed as error:
                return error

        with ThreadPoolExecutor(AT_A_TIME) as threads:
            for address, answer in zip(addresses, threads.map(attempt, addresses), strict=True):
                if not isinstance(answer, AskFailed):
                    found.done[address] = answer
                elif answer.code in MISSING:
                    found.missing.append(address)
                else:
                    found.failed[address] = answer
        return found

    def _advice(self, error: AskFailed) -> str:
        if not self.is_default or error.status:
            return ""
        return (
            "\nNothing answers on this machine. Start it with `nsparq up`, or name another with "
            "--lookupd-http-address or --nsqd-http-address,\nor in the environment with "
            f"{LOOKUPD_VARIABLE} or {NSQD_VARIABLE}."
        )


def _url(address: str, path: str, query: Mapping[str, str]) -> str:
    return f"http://{address}{path}" + (f"?{urlencode(query)}" if query else "")


@contextmanager
def _explained(address: str, path: str) -> Iterator[None]:
    try:
        yield
    except AskFailed as error:
        if error.status == 404 and error.code in ("", "NOT_FOUND"):
            raise AskFailed(f"{address} has no {path}: this command needs nsparq's nsqd", 404) from error
        raise


def _answers(address: str) -> bool:
    try:
        return fetch(f"http://{address}/ping", connect_timeout=0.5, request_timeout=2.0).status == 200
    except FetchError:
        return False
