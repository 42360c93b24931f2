"""Names for the messages of an idempotent producer, so that nsqd knows a repeat: the producer, its
epoch, and a number that counts the producer's messages in each topic."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from typing import Any, Final
from uuid import uuid4

from nsparq import kernel
from nsparq.headers import MAX_BLOCK, ORIGIN, Headers, HeadersOfMany, encode_headers, without_origin
from nsparq.wire.client import WITH_HEADERS, mpub, pub, with_headers

__all__ = ["Numbers", "name_in_child"]

MAX_NAME: Final = 200

_NUMBER: Final = b"\x0ansq-number"
_pack_size = struct.Struct(">H").pack


class Numbers:
    """Counts the messages of one producer. Not for use in two processes at a time."""

    def __init__(self, name: str = "") -> None:
        """Without a name the producer gets a random one, which nobody used before."""
        if len(name) > MAX_NAME:
            raise ValueError(f"the name of a producer has at most {MAX_NAME} characters")
        self.name = name or uuid4().hex
        self.epoch = time_ns() // 1000
        """Grows with each start, so that numbers begin anew. An older process of the same name is
        refused from then on."""
        self._next: Counter[str] = Counter()
        # First and in this order: nsqd reads them quickest there.
        values = self.name, str(self.epoch)
        self._prefix = encode_headers(dict(zip(ORIGIN, values, strict=False))) + _NUMBER

    def pub(self, topic: str, line: bytes, body: bytes, headers: Headers | None = None) -> bytes:
        """A PUB or DPUB of a message with the next number. Raises ValueError, TypeError."""
        number = self._next[topic]
        command = self._compiled(line, body, headers, number)
        if command is None:
            command = pub(line + WITH_HEADERS, self._numbered(number, self._own(headers), body))
        self._next[topic] = number + 1
        return command

    def mpub(
        self,
        topic: str,
        line: bytes,
        bodies: Any,
        headers: HeadersOfMany | None,
        encode: Callable[[Any], Sequence[bytes]],
    ) -> bytes:
        """An MPUB of messages with consecutive numbers. `encode` makes bytes of bodies. Raises
        ValueError, TypeError."""
        first = self._next[topic]
        command = self._compiled(line, bodies, headers, first)
        if command is None:
            bodies = encode(bodies)
            command = mpub(line + WITH_HEADERS, self._messages(first, bodies, headers))
        self._next[topic] = first + len(bodies)
        return command

    def _compiled(self, line: bytes, bodies: Any, headers: HeadersOfMany | None, first: int) -> bytes | None:
        if kernel.encode_with_headers is None:
            return None
        return kernel.encode_with_headers(line, bodies, headers, self._prefix, first)

    def _messages(self, first: int, bodies: Sequence[bytes], headers: HeadersOfMany | None) -> list[bytes]:
        if not all(bodies):
            raise ValueError("there must be messages, and none of them empty")
        if headers is None or isinstance(headers, Mapping):
            blocks = [self._own(headers)] * len(bodies)
        else:
            blocks = [self._own(one) for one in headers]
            if len(blocks) != len(bodies):
                raise ValueError(f"{len(bodies)} messages, but {len(blocks)} headers")
        return [
            self._numbered(number, block, body)
            for number, (block, body) in enumerate(zip(blocks, bodies, strict=True), first)
        ]

    def _own(self, headers: Headers | None) -> bytes:
        """The headers of the user."""
        block = encode_headers(without_origin(headers or {}))
        if len(block) + len(self._prefix) + 20 > MAX_BLOCK:
            raise ValueError(f"the headers of a message must not exceed {MAX_BLOCK} bytes")
        return block

    def _numbered(self, number: int, block: bytes, body: bytes) -> bytes:
        digits = b"%d" % number
        return with_headers(b"%b%b%b%b" % (self._prefix, _pack_size(len(digits)), digits, block), body)


def name_in_child(name: str) -> str:
    """The name of a producer in the child of a fork. With the same name, nsqd would refuse what the
    parent publishes."""
    return f"{name[: MAX_NAME - 33]}-{uuid4().hex}"
