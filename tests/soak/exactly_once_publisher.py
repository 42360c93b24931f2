"""A publisher of numbered messages that knows what it has published, even if nsqd dies.

It alternates between `/mpub` and transactions. A transaction puts each number into the log exactly
once: a request without an answer is sent again. After an `/mpub` without an answer, each of its
numbers is in the log once or not at all.
"""

from __future__ import annotations

import http.client
import json
import struct
import threading
import time
from collections import deque
from typing import Any, NamedTuple
from urllib.parse import urlencode

BLOCK = 100
"""Numbers that are published together."""
SIZE = 200
"""Bytes of a body."""
DIGITS = 12


def body_of(number: int) -> bytes:
    return b"%0*d" % (DIGITS, number) + b"." * (SIZE - DIGITS)


def packed(numbers: range) -> bytes:
    """As MPUB and transactions take them."""
    bodies = b"".join(struct.pack(">I", SIZE) + body_of(number) for number in numbers)
    return struct.pack(">I", len(numbers)) + bodies


class _NotSent(Exception):
    """Nobody listens, or only a copy does, so nothing was published."""


class _Answer(NamedTuple):
    status: int
    fields: dict[str, Any]

    @property
    def code(self) -> str:
        return str(self.fields.get("message", ""))


class Publisher(threading.Thread):
    """One for each nsqd, which may have several addresses. Of `count` publishers number `index` has
    each `count`th block of numbers."""

    def __init__(self, addresses: list[str], topic: str, index: int, count: int, rate: float) -> None:
        super().__init__(name=f"publisher-{index}")
        self._addresses = deque(addresses)
        self._topic = topic
        self._count = count
        self._pause = BLOCK / rate
        self._connection: http.client.HTTPConnection | None = None
        self._is_over = threading.Event()
        self._block = index
        self._sequence = 0
        self._attempts = 0
        self.certain: list[range] = []
        """What is in the log, once."""
        self.uncertain: list[range] = []
        """What is in the log once, or not at all."""
        self.error: BaseException | None = None

    def run(self) -> None:
        due = time.monotonic()
        try:
            while not self._is_over.wait(max(0.0, due - time.monotonic())):
                self._publish(range(self._block * BLOCK, (self._block + 1) * BLOCK))
                self._block += self._count
                # What could not be published while nsqd was away is not made up for.
                due = max(due + self._pause, time.monotonic() - 1)
        except BaseException as error:
            self.error = error
        finally:
            self._close()

    def stop(self) -> None:
        """The block that is under way is published to its end."""
        self._is_over.set()
        self.join()
        if self.error is not None:
            raise self.error

    def _publish(self, numbers: range) -> None:
        is_plain = (self._block // self._count) % 2
        while not (self._by_mpub(numbers) if is_plain else self._by_transaction(numbers)):
            time.sleep(0.02)

    def _by_mpub(self, numbers: range) -> bool:
        try:
            answer = self._post("/mpub", packed(numbers), topic=self._topic, binary="true")
        except _NotSent:
            return False
        except (OSError, http.client.HTTPException):
            self.uncertain.append(numbers)
            return True
        if answer.status >= 500:
            # A node that is replaced does not know what the other one has.
            self.uncertain.append(numbers)
            return True
        if answer.status == 200:
            self.certain.append(numbers)
        return answer.status == 200

    def _by_transaction(self, numbers: range) -> bool:
        which: dict[str, Any] = {"producer": self.name, "sequence": self._sequence}
        self._attempts += 1
        part = f"part-{self._attempts}"
        half = len(numbers) // 2
        try:
            for some in (numbers[:half], numbers[half:]):
                answer = self._post("/transaction/stage", packed(some), **which, part=part, topic=self._topic)
                if answer.code == "ALREADY_COMMITTED":
                    break
                if answer.status != 200:
                    return False
            else:
                parts = json.dumps({"parts": {part: len(numbers)}}).encode()
                answer = self._post("/transaction/commit", parts, **which)
        except (_NotSent, OSError, http.client.HTTPException):
            return False
        if answer.status != 200 and answer.code != "ALREADY_COMMITTED":
            return False
        self._sequence += 1
        self.certain.append(numbers)
        return True

    def _post(self, path: str, body: bytes, **query: Any) -> _Answer:
        """On a connection that is kept; after a failure on another."""
        if self._connection is None:
            host, port = self._addresses[0].split(":")
            connection = http.client.HTTPConnection(host, int(port), timeout=20)
            try:
                connection.connect()
            except OSError as error:
                self._addresses.rotate()
                raise _NotSent from error
            self._connection = connection
        try:
            self._connection.request("POST", f"{path}?{urlencode(query)}", body)
            response = self._connection.getresponse()
            content = response.read()
        except BaseException:
            self._close()
            raise
        try:
            fields = json.loads(content)
        except ValueError:
            fields = {}
        answer = _Answer(response.status, fields if isinstance(fields, dict) else {})
        if answer.code == "NOT_PRIMARY":
            self._close()
            self._addresses.rotate()
            raise _NotSent
        return answer

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
