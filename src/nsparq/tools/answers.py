"""What an nsqd answers to the commands of `nsparq`, by path, and the check of it.

An address may lead to another program, to an older nsqd, or to a node that anybody has registered
at nsqlookupd. Every answer is checked once, where it is read, so that commands can use its fields.
/stats is not here: `figures` and `cluster` leave out what they cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from nsparq.tools.cluster import AskFailed

__all__ = ["check_answer"]

MOST: Final = 2**63
"""Numbers are smaller: larger ones are no time, and no size."""


class Maybe(NamedTuple):
    """A value that may be missing or null. Commands read it with get()."""

    shape: Any


class Each(NamedTuple):
    """An object with any keys, whose values have this shape."""

    shape: Any


# A shape is a type (`float`: any number), [the shape of the elements], {key: shape}, Maybe or Each.
# Keys that no command uses are not listed.
NAMES: Final = [str]
POLICY: Final = Maybe(
    {
        "max_attempts": int,
        "count": str,
        "retry_delay": float,
        "retry_factor": float,
        "max_retry_delay": float,
        "retry_jitter": float,
        "dead_letters": str,
        "expire_after": float,
        "expired": str,
    }
)
MESSAGE: Final = {
    "sequence": int,
    "timestamp": int,
    "attempts": int,
    "size": int,
    "state": str,
    "due": Maybe(int),
    "body": Maybe(str),
}
PEEKED: Final = {"messages": [MESSAGE], "missing": int}
GROUP: Final = {
    "topic": str,
    "channel": str,
    "reason": str,
    "first": int,
    "last": int,
    "states": Each(int),
    "examples": [{"id": str, "given_up": int, "body": Maybe(str)}],
}
REDRIVE: Final = {
    "state": str,
    "start": int,
    "end": int,
    "position": int,
    "redriven": int,
    "skipped": Each(int),
    "waits_for": str,
}
FOLLOWER: Final = {
    "name": str,
    "is_in_sync": bool,
    "is_joining": bool,
    "changes_behind": int,
    "bytes_behind": int,
}
SHAPES: Final[Mapping[str, Any]] = {
    "/info": {"tcp_port": int},
    "/topic/peek": PEEKED,
    "/channel/peek": PEEKED,
    "/topic/positions": {
        "incarnation": str,
        "earliest": int,
        "latest": int,
        "first_timestamp": int,
        "bytes": int,
    },
    "/topics/positions": {
        "topics": Each(Maybe({"incarnation": str, "earliest": int, "state": int})),
    },
    "/channel/seek": {"cursor": int, "target": int, "again": int, "skipped": int},
    "/topic/settings": {
        "effective": {
            "durability": str,
            "retention_age": float,
            "retention_bytes": int,
            "archive_retention_age": Maybe(float),
            "archive_retention_bytes": Maybe(int),
            "archive_local_bytes": Maybe(int),
            "policy": POLICY,
        },
        "policy": POLICY,
        "channel_policies": Maybe(Each(POLICY)),
    },
    "/channel/settings": {"policy": POLICY, "effective": {"policy": POLICY}, "ordered_by": Maybe(str)},
    "/dead_letters": {"letters": int, "foreign": int, "next": Maybe(int), "groups": [GROUP]},
    "/dead_letters/redrive": REDRIVE,
    "/dead_letters/redrive/cancel": REDRIVE,
    "/replication": {
        "cluster": str,
        "node": str,
        "role": str,
        "epoch": int,
        "primary_http_address": str,
        "in_sync": NAMES,
        "problems": NAMES,
        "followers": [FOLLOWER],
    },
}


def check_answer(address: str, path: str, answer: Mapping[str, Any]) -> None:
    """Raises AskFailed if an nsqd does not answer this to the path."""
    for name in _misfits(answer, SHAPES.get(path, {}), ""):
        text = f"{address} is not an nsqd, or one of another version: {path} has no valid {name}"
        raise AskFailed(text, 200)


def _misfits(value: Any, shape: Any, name: str) -> Iterator[str]:
    """Names of what is missing, or of another shape."""
    if isinstance(shape, Maybe):
        if value is not None:
            yield from _misfits(value, shape.shape, name)
    elif isinstance(shape, type):
        if not _fits(value, shape):
            yield name
    elif isinstance(shape, list) and isinstance(value, list):
        for element in value:
            yield from _misfits(element, shape[0], name)
    elif isinstance(shape, list) or not isinstance(value, dict):
        yield name
    else:
        shapes = dict.fromkeys(value, shape.shape) if isinstance(shape, Each) else shape
        for key, wanted in shapes.items():
            yield from _misfits(value.get(key), wanted, f"{name}.{key}".lstrip("."))


def _fits(value: Any, kind: type) -> bool:
    # type() because True is an int, too.
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) < MOST
    return type(value) is kind
