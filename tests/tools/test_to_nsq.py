"""to_nsq: every record of the input is published, or the status is 1."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator

import pytest

from nsparq.client import ClientError, NotConnected, Producer, PublishTimeout
from nsparq.tools import to_nsq
from nsparq.tools.json_lines import with_headers as with_headers_of_flags
from nsparq.tools.run import Ending
from nsparq.tools.to_nsq import Throttle, delimiter_byte, read_records
from tests.support import TestBroker, start_broker
from tests.support.polling import DEADLINE

from .processes import (
    Finished,
    Tool,
    command,
    consume,
    environment,
    free_address,
    run_tool,
    tcp,
    with_headers,
)


def publish(broker: TestBroker, topic: str, *arguments: str, input: bytes) -> Finished:
    return run_tool(
        "to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}", *arguments, input=input
    )


def count(broker: TestBroker, topic: str) -> int:
    stats = broker.topic_stats(topic)
    return int(stats["message_count"]) if stats else 0


def test_each_line_is_a_message_and_the_last_needs_no_delimiter(broker: TestBroker, topic: str) -> None:
    done = publish(broker, topic, input=b"one\n\n\ntwo\r\n\xff\x00 binary\nthree")
    assert (done.status, done.out) == (0, b"")
    assert consume(broker, topic, 4) == [b"one", b"two\r", b"\xff\x00 binary", b"three"]


@pytest.mark.parametrize(
    ("delimiter", "data"),
    [
        (";", b"one;two\nlines;"),
        (r"\0", b"one\0two\nlines"),
        (r"\t", b"one\t\ttwo\nlines"),
        ("\t", b"one\ttwo\nlines"),
    ],
)
def test_the_delimiter_can_be_another_byte(
    broker: TestBroker, topic: str, delimiter: str, data: bytes
) -> None:
    assert publish(broker, topic, f"--delimiter={delimiter}", input=data).status == 0
    assert consume(broker, topic, 2) == [b"one", b"two\nlines"]


def test_empty_input_needs_no_broker(topic: str) -> None:
    arguments = (f"--topic={topic}", f"--nsqd-tcp-address={free_address()}")
    assert run_tool("to_nsq", *arguments, input=b"").status == 0
    assert run_tool("to_nsq", *arguments, input=b"\n\n").status == 0


def test_a_line_is_published_while_the_input_is_still_open(broker: TestBroker, topic: str) -> None:
    with Tool("to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}") as tool:
        tool.write(b"one\ntw")
        assert consume(broker, topic, 1) == [b"one"]
        tool.write(b"o\n")
        assert consume(broker, topic, 1) == [b"two"]
        tool.write(b"three")
        tool.end_input()
        assert tool.wait() == 0
        assert consume(broker, topic, 1) == [b"three"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_the_input_is_open(broker: TestBroker, topic: str, signum: int) -> None:
    with Tool("to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}") as tool:
        tool.write(b"one\nhalf")
        assert consume(broker, topic, 1) == [b"one"]
        tool.signal(signum)
        assert tool.wait(DEADLINE) == 0
        assert "Traceback" not in tool.err()
    assert count(broker, topic) == 1


def test_the_input_may_be_a_file(broker: TestBroker, topic: str, tmp_path: os.PathLike[str]) -> None:
    lines = [b"line %d " % number + b"x" * (number % 700) for number in range(3000)]
    path = os.path.join(tmp_path, "input")
    with open(path, "wb") as file:
        file.write(b"\n".join(lines))
    arguments = [f"--topic={topic}", f"--nsqd-tcp-address={tcp(broker)}"]
    with open(path, "rb") as file:
        done = subprocess.run(
            [*command("to_nsq"), *arguments], stdin=file, env=environment(), timeout=DEADLINE
        )
    assert done.returncode == 0
    assert consume(broker, topic, len(lines)) == lines


def test_every_address_gets_every_message(broker: TestBroker, topic: str) -> None:
    with start_broker() as second:
        done = publish(broker, topic, f"--nsqd-tcp-address={tcp(second)}", input=b"one\ntwo\n")
        assert done.status == 0
        assert consume(broker, topic, 2) == consume(second, topic, 2) == [b"one", b"two"]


def test_an_unreachable_address_is_fatal(broker: TestBroker, topic: str) -> None:
    done = publish(broker, topic, f"--nsqd-tcp-address={free_address()}", input=b"one\n")
    assert done.status == 1
    assert "FATAL: record 1 of the input was not published: " in done.err


@pytest.mark.parametrize("error", [NotConnected("lost"), PublishTimeout("no answer")])
def test_a_record_that_may_be_published_is_not_called_unpublished(
    error: ClientError, caplog: pytest.LogCaptureFixture
) -> None:
    class Unsure(Producer):
        async def publish(self, *_: object, **__: object) -> None:
            raise error

    async def records() -> AsyncIterator[list[bytes]]:
        yield [b"one"]

    async def main() -> None:
        ending = Ending()
        await to_nsq.pump("t", records(), [Unsure("127.0.0.1:1")], ending)
        assert ending.status == 1

    asyncio.run(main())
    assert caplog.messages == [f"record 1 of the input was not acknowledged: {error}"]


def test_only_records_before_a_refused_one_are_published(topic: str) -> None:
    with start_broker(max_msg_size=100) as broker:
        records = [b"%03d" % number for number in range(50)]
        lines = [*records[:20], b"x" * 101, *records[20:]]
        done = publish(broker, topic, input=b"\n".join(lines))
        assert done.status == 1
        assert "FATAL: record 21 of the input was not published: E_BAD_MESSAGE " in done.err
        assert count(broker, topic) == 20
        assert consume(broker, topic, 20) == records[:20]


def test_records_that_do_not_fit_one_command_are_published(topic: str) -> None:
    with start_broker(max_msg_size=4000, max_body_size=5000) as broker:
        lines = [b"%d" % number * 1000 for number in range(10)]
        assert publish(broker, topic, input=b"\n".join(lines)).status == 0
        assert consume(broker, topic, 10) == lines


def test_the_rate_is_kept(broker: TestBroker, topic: str) -> None:
    began = time.monotonic()
    done = publish(broker, topic, "--rate=100", input=b"".join(b"%d\n" % number for number in range(60)))
    assert done.status == 0
    assert time.monotonic() - began >= 0.59
    assert count(broker, topic) == 60


def test_the_throttle_lets_a_second_of_messages_through_after_a_pause() -> None:
    throttle = Throttle(10, now=0.0)
    assert throttle.take(5, 0.0) == (1, 0.0)
    assert throttle.take(5, 0.0) == (0, 0.1)
    assert throttle.take(5, 0.1) == (1, 0.0)
    assert throttle.take(50, 100.0) == (10, 0.0)
    assert throttle.take(50, 100.05) == (0, pytest.approx(0.05))
    assert Throttle(0, now=0.0).take(50, 0.0) == (50, 0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_records_do_not_depend_on_how_the_input_is_split(size: int) -> None:
    data = b"a\n\nbc\ndefgh\n\nlast one"

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    async def read() -> list[bytes]:
        return [record async for records in read_records(chunks(), b"\n") for record in records]

    assert asyncio.run(read()) == [b"a", b"bc", b"defgh", b"last one"]


def test_a_record_that_never_ends_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.tools.to_nsq.MAX_RECORD", 100)

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 30

    async def read() -> None:
        async for _ in read_records(chunks(), b"\n"):
            pass

    with pytest.raises(OSError, match="a record has more than 100 bytes"):
        asyncio.run(read())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--topic required"),
        (("--topic=t",), "--nsqd-tcp-address required"),
        (("--topic=b ad", "--nsqd-tcp-address=127.0.0.1:1"), "--topic 'b ad' is not a valid topic name"),
        (
            ("--topic=t", "--nsqd-tcp-address=nowhere"),
            "--nsqd-tcp-address 'nowhere' is not host:port",
        ),
        (
            ("--topic=t", "--nsqd-tcp-address=127.0.0.1:1", "--delimiter=ab"),
            "--delimiter must be a single byte",
        ),
        (
            ("--topic=t", "--nsqd-tcp-address=127.0.0.1:1", "--delimiter="),
            "--delimiter must be a single byte",
        ),
        (("--topic=t", "--rate=-1"), "--rate must not be negative"),
    ],
)
def test_invalid_options_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert to_nsq.main(arguments) == 1
    assert f"FATAL: {text}" in capsys.readouterr().err


def test_a_delimiter_is_one_byte_whatever_its_character() -> None:
    assert delimiter_byte("\udcff") == b"\xff"


def test_every_message_gets_the_headers_of_the_flags(broker: TestBroker, topic: str) -> None:
    done = publish(broker, topic, "--header=Tenant=acme", "--header=note=a=b", input=b"one\ntwo")
    assert done.status == 0
    headers = {"tenant": "acme", "note": "a=b"}
    assert with_headers(broker, topic, 2) == [(b"one", headers), (b"two", headers)]


def test_lines_of_json_have_their_own_headers(broker: TestBroker, topic: str) -> None:
    lines = b"""{"body": "one", "headers": {"k": "1"}, "timestamp": 5}
{"body_base64": "/w==", "headers": {"tenant": "b"}}
{"body": "three"}"""
    assert publish(broker, topic, "--json-lines", "--header=tenant=a", input=lines).status == 0
    assert with_headers(broker, topic, 3) == [
        (b"one", {"tenant": "a", "k": "1"}),
        (b"\xff", {"tenant": "b"}),
        (b"three", {"tenant": "a"}),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"two", "not JSON"),
        (b"[2]", "not a JSON object"),
        (b"{}", "there must be a text `body` or `body_base64`"),
        (b'{"body": "x", "body_base64": "eA=="}', "there must be a text"),
        (b'{"body": 2}', "there must be a text"),
        (b'{"body": ""}', "the body is empty"),
        (b'{"body_base64": "x"}', "`body_base64` is not base64"),
        (b'{"body": "x", "headers": []}', ""),
        (b'{"body": "x", "headers": [1]}', "`headers` is not an object"),
        (b'{"body": "x", "headers": {"k": 1}}', "the header 'k' is a int, not a text"),
        (b'{"body": "x", "headers": {"no good": ""}}', "not a header name"),
    ],
)
def test_a_line_that_is_no_message_ends_it_after_those_before(line: bytes, reason: str) -> None:
    async def lines() -> AsyncIterator[list[bytes]]:
        yield [b'{"body": "one"}', line, b'{"body": "three"}']

    async def main() -> None:
        published = []
        try:
            async for records in with_headers_of_flags(lines(), [], is_json=True):
                published += [body for body, _ in records]  # type: ignore[misc]
        except OSError as error:
            assert reason and str(error).startswith(f"record 2: {reason}")
            assert published == [b"one"]
        else:
            assert not reason and published == [b"one", b"x", b"three"]

    asyncio.run(main())


@pytest.mark.parametrize("header", ["novalue", "no good=x", "=x"])
def test_bad_headers_are_refused_at_the_start(header: str) -> None:
    done = run_tool("to_nsq", "--topic=t", "--nsqd-tcp-address=127.0.0.1:1", f"--header={header}")
    assert done.status == 1 and "--header" in done.err
