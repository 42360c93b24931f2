"""Command lines: the checks that NSQ makes of each command's parameters, in NSQ's order.

Each parser takes the line's parameters and gives a command. A bad line raises FatalClientError with
NSQ's text.
"""

from __future__ import annotations

import binascii
import re
from typing import Final

import numpy as np

from nsparq import kernel
from nsparq.errors import ClientError, FatalClientError
from nsparq.names import is_valid_name, quote
from nsparq.wire.commands import Command, Finish, Ready, Refusal, Requeue, StartClose, Subscribe, Touch
from nsparq.wire.limits import Limits

FIN_WIDTH: Final = len("FIN 0123456789abcdef\n")

_DIGITS = frozenset(b"0123456789")
_HEX_DIGITS = b"0123456789abcdef"
_HEX = frozenset(_HEX_DIGITS)
_NOT_HEX = re.compile(b"[^0-9a-f]")
_FIN_LINE = np.dtype([("word", "<u4"), ("id", "S16"), ("end", "u1")])
_FIN_WORD = int.from_bytes(b"FIN ", "little")
_MIN_FINS = 8
"""Fewer FIN lines are decoded faster one by one than as an array."""
_MAX_FINS = 512
"""FIN lines decoded together. Without a limit, a line that ends a run would be looked at again and
again."""


def invalid(description: str) -> FatalClientError:
    return FatalClientError("E_INVALID", description)


def show(raw: bytes) -> str:
    """Bytes of the client inside an error text. They go back to the client unchanged."""
    return raw.decode("utf-8", "surrogateescape")


def parse_subscribe(params: list[bytes], limits: Limits) -> Command:
    if len(params) < 2:
        raise invalid("SUB insufficient number of parameters")
    topic, channel = params[0], params[1]
    if not is_valid_name(topic):
        raise FatalClientError("E_BAD_TOPIC", f"SUB topic name {quote(topic)} is not valid")
    if not is_valid_name(channel):
        raise FatalClientError("E_BAD_CHANNEL", f"SUB channel name {quote(channel)} is not valid")
    return Subscribe(topic.decode(), channel.decode())


def parse_ready(params: list[bytes], limits: Limits) -> Command:
    count = 1
    if params:
        parsed = _parse_number(params[0])
        if parsed is None:
            raise invalid(f"RDY could not parse count {show(params[0])}")
        count = parsed
    if not 0 <= count <= limits.max_rdy_count:
        raise invalid(f"RDY count {count} out of range 0-{limits.max_rdy_count}")
    return Ready(count)


def parse_finish(params: list[bytes], limits: Limits) -> Command:
    if not params:
        raise invalid("FIN insufficient number of params")
    number = _parse_id(params[0])
    return _not_in_flight("FIN", params[0]) if number is None else Finish([(number, number + 1)])


def parse_requeue(params: list[bytes], limits: Limits) -> Command:
    if len(params) < 2:
        raise invalid("REQ insufficient number of params")
    number = _parse_id(params[0])
    timeout_ms = _parse_number(params[1])
    if timeout_ms is None:
        raise invalid(f"REQ could not parse timeout {show(params[1])}")
    if number is None:
        return _not_in_flight("REQ", params[0])
    return Requeue(number, min(max(timeout_ms, 0), limits.max_req_timeout_ms))


def parse_touch(params: list[bytes], limits: Limits) -> Command:
    if not params:
        raise invalid("TOUCH insufficient number of params")
    number = _parse_id(params[0])
    return _not_in_flight("TOUCH", params[0]) if number is None else Touch(number)


def parse_close(params: list[bytes], limits: Limits) -> Command:
    return StartClose()


def parse_nop(params: list[bytes], limits: Limits) -> None:
    """NOP: there is nothing to execute."""


def parse_topic(verb: str, params: list[bytes]) -> str:
    """The topic of a PUB, MPUB or DPUB."""
    if len(params) < (2 if verb == "DPUB" else 1):
        raise invalid(f"{verb} insufficient number of parameters")
    if not is_valid_name(params[0]):
        # NSQ prints the code twice for MPUB, and clients expect that.
        prefix = "E_BAD_TOPIC " if verb == "MPUB" else ""
        raise FatalClientError("E_BAD_TOPIC", f"{prefix}{verb} topic name {quote(params[0])} is not valid")
    return params[0].decode()


def parse_delay(text: bytes, limits: Limits) -> int:
    """The delay of a DPUB in milliseconds."""
    defer_ms = _parse_number(text)
    if defer_ms is None:
        raise invalid(f"DPUB could not parse timeout {show(text)}")
    if not 0 <= defer_ms <= limits.max_req_timeout_ms:
        raise invalid(f"DPUB timeout {defer_ms} out of range 0-{limits.max_req_timeout_ms}")
    return defer_ms


def decode_fins(buffer: bytes, start: int) -> tuple[list[tuple[int, int]], int]:
    """Consecutive FIN lines from `start` on: spans of consecutive ids, and the position behind the
    lines.

    Gives no spans where the lines are few or irregular.
    """
    if kernel.decode_fins is not None:
        return kernel.decode_fins(buffer, start)
    count = min((len(buffer) - start) // FIN_WIDTH, _MAX_FINS)
    if count < _MIN_FINS:
        return [], start
    lines = np.frombuffer(buffer, _FIN_LINE, count, start)
    regular = (lines["word"] == _FIN_WORD) & (lines["end"] == ord("\n"))
    if not regular.all():
        count = int(regular.argmin())
    digits = lines["id"][:count].tobytes()
    bad_digit = _NOT_HEX.search(digits) if digits.translate(None, _HEX_DIGITS) else None
    if bad_digit is not None:
        count = bad_digit.start() // 16
        digits = digits[: 16 * count]
    if count < _MIN_FINS:
        return [], start
    ids = np.frombuffer(binascii.unhexlify(digits), ">u8").astype(np.uint64)
    # The difference wraps: zero does not follow the largest id.
    breaks = np.flatnonzero((np.diff(ids) != 1) | (ids[1:] == 0))
    firsts = ids[np.concatenate(([0], breaks + 1))].tolist()
    lasts = ids[np.concatenate((breaks, [count - 1]))].tolist()
    spans = [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
    return spans, start + count * FIN_WIDTH


def _parse_number(text: bytes) -> int | None:
    """An unsigned decimal as NSQ reads it: empty is 0, and overflow wraps into a signed 64-bit
    number."""
    if not _DIGITS.issuperset(text):
        return None
    value = 0
    for start in range(0, len(text), 1000):
        part = text[start : start + 1000]
        value = (value * 10 ** len(part) + int(part)) & 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _parse_id(raw: bytes) -> int | None:
    """The message id as a number. None if this server cannot have made it."""
    if len(raw) != 16:
        raise invalid("invalid message ID")
    return int(raw, 16) if _HEX.issuperset(raw) else None


def _not_in_flight(verb: str, raw: bytes) -> Refusal:
    return Refusal(ClientError(f"E_{verb}_FAILED", f"{verb} {show(raw)} failed ID not in flight"))
