"""Seeded garbage for the TCP port, and the judge of what comes back.

A case is bytes, cut into pieces as they are sent, made from its seed alone: random bytes, or a
valid conversation that was mutated. The broker must answer with frames that the protocol knows, or
close; `play` says what else it did.
"""

from __future__ import annotations

import json
import math
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from tests.support import ERROR, MESSAGE, RESPONSE, multi, sized

CODES: Final = frozenset(
    "E_INVALID E_BAD_BODY E_BAD_TOPIC E_BAD_CHANNEL E_BAD_MESSAGE E_BAD_PROTOCOL E_PUB_FAILED E_MPUB_FAILED "
    "E_DPUB_FAILED E_FIN_FAILED E_REQ_FAILED E_TOUCH_FAILED E_SUB_FAILED E_IDENTIFY_FAILED "
    "E_AUTH_DISABLED".split()
)
# After these the connection goes on; every other error ends it.
GOES_ON: Final = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})

_IDS = [b"0123456789abcdef", b"", b"short", b"0" * 17, b"\xff" * 16, b"000000000000000g"]
_NUMBERS = [
    b"0",
    b"1",
    b"5",
    b"-1",
    b"",
    b"2500",
    b"2501",
    b"99999999999999999999",
    b"1e3",
    b" 7",
    b"\x00",
    b"0x10",
]
_SIZES = [-(2**31), -1, 0, 1, 3, 4, 5, 100, 65536, 1 << 20, (1 << 20) + 1, 5 << 20, (5 << 20) + 1, 2**31 - 1]
_NAMES = [
    b"t",
    b"fuzz",
    b"fuzz#ephemeral",
    b"t!",
    b"",
    b"n" * 64,
    b"n" * 65,
    b"..",
    b"#ephemeral",
    b"a/b",
    b"\xc3\xa9",
]
_CHANNELS = [b"c", b"c#ephemeral", b"c!", b""]
_DOCUMENTS: list[object] = [
    {},
    {"feature_negotiation": True},
    {"feature_negotiation": True, "heartbeat_interval": -1},
    {"heartbeat_interval": 1},
    {"output_buffer_size": 64, "output_buffer_timeout": 25},
    {"output_buffer_size": 63},
    {"sample_rate": 50},
    {"sample_rate": -1},
    {"msg_timeout": 1000, "client_id": "fuzz", "hostname": "h", "user_agent": "u"},
    {"client_id": 1},
    {"heartbeat_interval": 1e300},
    {"heartbeat_interval": 10**30},
    [],
    None,
    "text",
    {"deflate": True, "snappy": True, "feature_negotiation": True},
    {"nested": {"deep": [[[[[]]]]]}},
]


def _line(choose: random.Random, *parts: bytes) -> bytes:
    return b" ".join(parts) + choose.choice([b"\n", b"\n", b"\n", b"\r\n", b" \n", b" extra\n"])


def _body(choose: random.Random) -> bytes:
    return choose.randbytes(choose.choice([1, 1, 4, 30, 300]))


def _command(choose: random.Random) -> bytes:
    """One command, mostly well formed."""
    topic = choose.choice(_NAMES) if choose.random() < 0.2 else b"fuzz"
    match choose.randrange(12):
        case 0:
            document = json.dumps(choose.choice(_DOCUMENTS)).encode()
            return _line(choose, b"IDENTIFY") + sized(document)
        case 1:
            return _line(choose, b"SUB", topic, choose.choice(_CHANNELS))
        case 2 | 3:
            return _line(choose, b"PUB", topic) + sized(_body(choose))
        case 4:
            bodies = [_body(choose) for _ in range(choose.randrange(5))]
            return _line(choose, b"MPUB", topic) + sized(multi(bodies))
        case 5:
            return _line(choose, b"DPUB", topic, choose.choice(_NUMBERS)) + sized(_body(choose))
        case 6:
            return _line(choose, b"RDY", choose.choice(_NUMBERS))
        case 7:
            return _line(choose, choose.choice([b"FIN", b"TOUCH"]), choose.choice(_IDS))
        case 8:
            return _line(choose, b"REQ", choose.choice(_IDS), choose.choice(_NUMBERS))
        case 9:
            return _line(choose, choose.choice([b"NOP", b"CLS", b"AUTH", b"nop", b""]))
        case 10:
            return _line(choose, choose.choice([b"PUB", b"MPUB", b"IDENTIFY", b"AUTH"]), topic) + struct.pack(
                ">i", choose.choice(_SIZES)
            )
        case _:
            return choose.randbytes(choose.randrange(40)) + b"\n"


def _conversation(choose: random.Random) -> bytes:
    start = choose.choice(
        [
            b"",
            b"IDENTIFY\n" + sized(b'{"feature_negotiation":true}'),
            b"SUB fuzz c\nRDY 5\n",
            b"IDENTIFY\n" + sized(b"{}") + b"SUB fuzz#ephemeral c#ephemeral\nRDY 100\n",
        ]
    )
    return b"  V2" + start + b"".join(_command(choose) for _ in range(choose.randint(1, 8)))


def _mutate(choose: random.Random, data: bytes) -> bytes:
    mutable = bytearray(data)
    for _ in range(choose.choice([1, 1, 2, 5])):
        at = choose.randrange(len(mutable) + 1)
        match choose.randrange(7):
            case 0 if mutable:
                mutable[at % len(mutable)] ^= 1 << choose.randrange(8)
            case 1:
                del mutable[at : at + choose.randint(1, 8)]
            case 2:
                mutable[at:at] = choose.randbytes(choose.randint(1, 8))
            case 3:
                mutable[at : at + 4] = struct.pack(">i", choose.choice(_SIZES))
            case 4:
                end = at + choose.randint(1, 30)
                mutable[at:at] = mutable[at:end]
            case 5:
                del mutable[at:]
            case _:
                mutable[at:at] = choose.choice(
                    [b"\n", b"\x00", b" ", b"A" * 20_000, b"\xff\xff\xff\xff", b"  V2"]
                )
    return bytes(mutable)


def case(seed: int) -> list[bytes]:
    """The pieces to send for this seed."""
    choose = random.Random(seed)
    kind = choose.random()
    if kind < 0.1:
        data = choose.randbytes(choose.randint(0, 2000))
    elif kind < 0.2:
        data = b"  V2" + choose.randbytes(choose.randint(0, 2000))
    elif kind < 0.4:
        data = _conversation(choose)
    else:
        data = _mutate(choose, _conversation(choose))
    return cut(choose, data)


def cut(choose: random.Random, data: bytes) -> list[bytes]:
    """The bytes in pieces, as a network might deliver them."""
    pieces = []
    while data:
        size = choose.choice([len(data), len(data), choose.randint(1, len(data)), choose.randint(1, 10)])
        pieces.append(data[:size])
        data = data[size:]
        if len(pieces) > 30:
            return [*pieces, data]
    return pieces


def play(address: tuple[str, int], pieces: list[bytes], timeout: float = 5.0) -> list[str]:
    """Send the pieces and the end of the stream; what the broker did that it must not do."""
    return play_against(judge, address, pieces, timeout)


def play_against(
    judged: Callable[[bytes, bool], list[str]], address: tuple[str, int], pieces: list[bytes], timeout: float
) -> list[str]:
    """The same, with whatever judges what the broker said."""
    deadline = time.monotonic() + timeout
    with socket.create_connection(address, timeout=timeout) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reset = False
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            reset = True
        received = bytearray()
        try:
            while block := connection.recv(1 << 16):
                received += block
                if time.monotonic() > deadline:
                    return ["goes on after the end of the stream"]
        except TimeoutError:
            return ["does not close after the end of the stream"]
        except OSError:
            reset = True
    return judged(bytes(received), reset)


def judge(received: bytes, reset: bool) -> list[str]:
    """Everything in these bytes that no broker says. A reset may have cost the end of them."""
    problems = []
    ended = ""
    position = 0
    while len(received) - position >= 8:
        size, frame_type = struct.unpack_from(">ii", received, position)
        data = received[position + 8 : position + 4 + size]
        if size < 4 or len(data) < size - 4:
            break
        position += 4 + size
        if ended:
            problems.append(f"goes on after {ended}")
        problem, fatal = _judge_frame(frame_type, data)
        if problem:
            problems.append(problem)
        ended = fatal
    if position != len(received) and not reset:
        problems.append(f"half a frame: {received[position : position + 40]!r}")
    return problems


def _judge_frame(frame_type: int, data: bytes) -> tuple[str, str]:
    """A problem if there is one, and the code of an error that ends the connection."""
    if frame_type == RESPONSE:
        if data in (b"OK", b"CLOSE_WAIT", b"_heartbeat_") or _is_json(data):
            return "", ""
        return f"unknown response {data!r}", ""
    if frame_type == MESSAGE:
        return ("" if len(data) > 26 else f"message without a body {data!r}"), ""
    if frame_type != ERROR:
        return f"unknown frame type {frame_type}", ""
    code = (re.match(rb"E_[A-Z_]+(?= |$)", data) or [b""])[0].decode()
    if code not in CODES:
        return f"unknown error {data!r}", ""
    return "", "" if code in GOES_ON else code


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False


def run_cases(
    make: Callable[[int], list[bytes]],
    play_one: Callable[[tuple[str, int], list[bytes]], list[str]],
    address: tuple[str, int],
    first: int,
    count: int,
    deadline: float = math.inf,
) -> tuple[int, list[str]]:
    """Play `count` cases from seed `first` on, or as many as there is time for. Gives how many were
    played, and their problems."""
    problems: list[str] = []
    for seed in range(first, first + count):
        if time.monotonic() > deadline:
            return seed - first, problems
        try:
            problems += [f"seed {seed}: {problem}" for problem in play_one(address, make(seed))]
        except OSError as error:
            return seed - first, [*problems, f"seed {seed}: {error!r} at connecting"]
    return count, problems


run = partial(run_cases, case, play)
