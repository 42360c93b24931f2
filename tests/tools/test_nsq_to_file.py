"""nsq_to_file: every message is in a file before it is finished."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nsparq.tools import nsq_to_file
from nsparq.tools.nsq_to_file import Archives, NsqToFileOptions
from nsparq.tools.run import Ending
from nsparq.tools.topic_files import TopicFiles
from tests.support import DEADLINE, TestBroker, start_broker, unique_name, wait_until
from tests.support.aio import run, until
from tests.support.lookupd import start_lookupd
from tests.support.scripted_nsqd import ScriptedNsqd, message_id

from .processes import (
    Tool,
    free_address,
    http,
    publish_with_headers,
    run_tool,
    tcp,
    wait_for_channel,
    wait_until_drained,
    with_headers,
)

HOST = socket.gethostname().partition(".")[0]
HOUR = r"\d{4}-\d\d-\d\d_\d\d"
QUICK = "--sync-interval=50ms"


def archive(broker: TestBroker, out: Path, *arguments: str, **more: Any) -> Tool:
    addresses = (f"--nsqd-tcp-address={tcp(broker)}", f"--output-dir={out}", "--channel=c")
    return Tool("nsq_to_file", *addresses, *arguments, **more)


def files(path: Path) -> dict[str, bytes]:
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            try:
                data = file.read_bytes()
            except FileNotFoundError:  # just moved
                continue
            found[file.relative_to(path).as_posix()] = gzip.decompress(data) if file.suffix == ".gz" else data
    return found


def in_flight(broker: TestBroker, topic: str) -> int:
    stats = broker.channel_stats(topic, "c")
    return int(stats["in_flight_count"]) if stats else 0


def test_messages_are_lines_of_a_file_named_after_topic_host_and_hour(
    broker: TestBroker, topic: str, tmp_path: Path
) -> None:
    with archive(broker, tmp_path, f"--topic={topic}", QUICK) as tool:
        broker.publish(topic, b"one", b"two", b"\xff\x00binary")
        wait_until_drained(broker, topic, "c", 3)
        assert tool.terminate() == 0
        assert tool.out() == b""
    ((name, content),) = files(tmp_path).items()
    assert re.fullmatch(rf"{topic}\.{re.escape(HOST)}\.{HOUR}\.log", name)
    assert content == b"one\ntwo\n\xff\x00binary\n"


def test_lines_of_json_keep_headers_and_can_be_published_again(
    broker: TestBroker, topic: str, tmp_path: Path
) -> None:
    publish_with_headers(broker, topic, b"two\nlines", b"\xff", tenant="acme")
    broker.publish(topic, b"plain")
    with archive(broker, tmp_path, f"--topic={topic}", "--json-lines", QUICK) as tool:
        wait_until_drained(broker, topic, "c", 3)
        assert tool.terminate() == 0
    (content,) = files(tmp_path).values()
    lines = [json.loads(line) for line in content.splitlines()]
    assert all(line.pop("timestamp") > 0 for line in lines)
    assert lines == [
        {"headers": {"tenant": "acme"}, "body": "two\nlines"},
        {"headers": {"tenant": "acme"}, "body_base64": "/w=="},
        {"headers": {}, "body": "plain"},
    ]
    again = unique_name("again")
    address = f"--nsqd-tcp-address={tcp(broker)}"
    assert run_tool("to_nsq", f"--topic={again}", "--json-lines", address, input=content).status == 0
    tenant = {"tenant": "acme"}
    assert with_headers(broker, again, 3) == [(b"two\nlines", tenant), (b"\xff", tenant), (b"plain", {})]


def test_messages_are_written_at_once_and_finished_by_the_end(
    broker: TestBroker, topic: str, tmp_path: Path
) -> None:
    with archive(broker, tmp_path, f"--topic={topic}", "--sync-interval=1h") as tool:
        wait_for_channel(broker, topic, "c")
        broker.publish(topic, b"one", b"two")
        wait_until(lambda: [*files(tmp_path).values()] == [b"one\ntwo\n"])
        assert in_flight(broker, topic) == 2
        assert tool.terminate() == 0
    wait_until_drained(broker, topic, "c", 2)


def test_when_no_more_can_come_messages_are_finished_without_waiting(
    broker: TestBroker, topic: str, tmp_path: Path
) -> None:
    with archive(broker, tmp_path, f"--topic={topic}", "--sync-interval=1h", "--max-in-flight=10") as tool:
        broker.publish(topic, *[b"x"] * 100)
        wait_until(lambda: b"".join(files(tmp_path).values()).count(b"x") == 100)
        wait_until(lambda: in_flight(broker, topic) < 10)
        assert tool.terminate() == 0
    wait_until_drained(broker, topic, "c", 100)


def test_sighup_closes_the_file_and_the_next_message_starts_another(
    broker: TestBroker, topic: str, tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    with archive(broker, out, f"--topic={topic}", f"--work-dir={work}", "--sync-interval=1h") as tool:
        for number in range(3):
            broker.publish(topic, b"%d" % number)
            wait_until(lambda: [*files(work).values()] == [b"%d\n" % number])  # noqa: B023  # called here only
            tool.signal(signal.SIGHUP)
            wait_until(lambda: len(files(out)) == number + 1)  # noqa: B023
            wait_until(lambda: not files(work))
        wait_until_drained(broker, topic, "c", 3)
        tool.signal(signal.SIGHUP)  # no file, nothing to do
        assert tool.terminate() == 0
    assert [*files(out).values()] == [b"0\n", b"1\n", b"2\n"]
    assert [name.removeprefix(f"{topic}.{HOST}")[:7] for name in files(out)] == [
        "-000000",
        "-000001",
        "-000002",
    ]


def test_a_file_that_was_moved_away_is_not_written_to_after_sighup(
    broker: TestBroker, topic: str, tmp_path: Path
) -> None:
    with archive(broker, tmp_path, f"--topic={topic}", "--filename-format=log", QUICK) as tool:
        broker.publish(topic, b"one")
        wait_until_drained(broker, topic, "c", 1)
        (tmp_path / "log").rename(tmp_path / "log.1")
        tool.signal(signal.SIGHUP)
        tool.wait_for_log("SIGHUP")
        broker.publish(topic, b"two")
        wait_until(lambda: files(tmp_path) == {"log": b"two\n", "log.1": b"one\n"})
        assert tool.terminate() == 0


def test_compressed_rotated_and_moved(broker: TestBroker, topic: str, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    flags = ("--gzip", "--gzip-level=9", "--rotate-size=1000", f"--work-dir={work}", "--skip-empty-files")
    template = "--filename-format=<TOPIC>/<DATETIME>/x<REV>"
    bodies = [b"%03d" % number * 30 for number in range(100)]
    with archive(broker, out, f"--topic={topic}", *flags, template, "--datetime-format=%Y", QUICK) as tool:
        broker.publish(topic, *bodies)
        wait_until_drained(broker, topic, "c", 100)
        assert tool.terminate() == 0
    found = files(out)
    year = time.strftime("%Y")
    assert [*found] == [f"{topic}/{year}/x-{number:06d}.gz" for number in range(len(found))]
    assert b"".join(found.values()) == b"\n".join(bodies) + b"\n"
    assert all(1000 < len(content) <= 1100 for content in [*found.values()][:-1])
    assert files(work) == {}


@pytest.mark.parametrize("skip", [True, False])
def test_idle_topics_have_empty_files_unless_these_are_skipped(
    broker: TestBroker, topic: str, tmp_path: Path, skip: bool
) -> None:
    flags = ("--rotate-interval=100ms", QUICK, f"--skip-empty-files={str(skip).lower()}")
    with archive(broker, tmp_path, f"--topic={topic}", *flags) as tool:
        broker.publish(topic, b"one")
        wait_until_drained(broker, topic, "c", 1)
        while len(files(tmp_path)) < 3:
            if skip:
                broker.publish(topic, b"more")
            time.sleep(0.01)
        assert tool.terminate() == 0
    assert (b"" in files(tmp_path).values()) is not skip


def test_topics_are_found_and_new_ones_too_and_chosen_by_a_pattern(tmp_path: Path) -> None:
    with start_lookupd() as lookupd:
        flags = {
            "lookupd_tcp_address": ("{}:{}".format(*lookupd.address),),
            "broadcast_address": "127.0.0.1",
        }
        with start_broker(**flags) as broker:
            broker.publish("shop.orders", b"order")
            broker.publish("other", b"other")
            broker.publish("..", b"out of here")
            wait_until(lambda: len(lookupd.topics()) == 3)
            arguments = (
                r"--topic-pattern=^shop\.|\.\.",
                "--topic-refresh=100ms",
                f"--lookupd-http-address={http(lookupd)}",
                f"--lookupd-http-address={free_address()}",
                f"--output-dir={tmp_path}/out",
                "--filename-format=<TOPIC>/log",
                "--consumer-opt=lookupd_poll_interval,100ms",
                QUICK,
            )
            with Tool("nsq_to_file", *arguments) as tool:
                wait_until_drained(broker, "shop.orders", "nsq_to_file", 1)
                broker.publish("shop.refunds", b"refund")
                wait_until_drained(broker, "shop.refunds", "nsq_to_file", 1)
                tool.wait_for_log("cannot archive the topic ..")
                assert tool.terminate() == 0
                assert "cannot look up topics" in tool.err()
    assert files(tmp_path) == {"out/shop.orders/log": b"order\n", "out/shop.refunds/log": b"refund\n"}


def test_the_pattern_also_chooses_among_given_topics(broker: TestBroker, tmp_path: Path) -> None:
    wanted, unwanted = unique_name("wanted"), unique_name("unwanted") + "x"
    pattern = "--topic-pattern=^wanted"
    broker.publish(unwanted, b"x")
    with archive(broker, tmp_path, f"--topic={wanted}", f"--topic={unwanted}", pattern, QUICK) as tool:
        broker.publish(wanted, b"y")
        wait_until_drained(broker, wanted, "c", 1)
        assert tool.terminate() == 0
    assert [*files(tmp_path).values()] == [b"y\n"]
    assert broker.topic_stats(unwanted)["channels"] == []  # type: ignore[index]


def test_a_full_disk_ends_it_without_loss(broker: TestBroker, topic: str, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    bodies = [b"%04d" % number * 20 for number in range(200)]
    broker.publish(topic, *bodies)
    flags = (f"--topic={topic}", QUICK, "--max-in-flight=20", "--filename-format=log")
    with archive(broker, tmp_path, *flags, preexec_fn=limit) as tool:
        assert tool.wait() == 1
        assert f"FATAL: {topic}/c: [Errno 27] File too large" in tool.err()
    stats = broker.channel_stats(topic, "c")
    assert stats is not None
    written = (tmp_path / "log").read_bytes()
    assert stats["depth"] + stats["in_flight_count"] >= 200 - written.count(b"\n") > 0
    with archive(broker, tmp_path, *flags) as tool:
        wait_until_drained(broker, topic, "c", 200)
        assert tool.terminate() == 0
    lines = (tmp_path / "log").read_bytes().split(b"\n")
    assert set(bodies) <= set(lines)
    # The line at which the disk became full was ended, so that nothing is appended to it.
    assert len([line for line in lines if line and line not in bodies]) <= 1


def test_attempts_do_not_make_it_give_up(topic: str, tmp_path: Path) -> None:
    with start_broker() as broker:
        broker.publish(topic, b"often")
        with broker.connect() as connection:
            connection.identify()
            connection.sub(topic, "c", rdy=1)
            for _ in range(8):
                connection.req(connection.read_message().id, 0)
            last = connection.read_message()
            connection.rdy(0)
            connection.req(last.id, 0)
            connection.barrier()
        with archive(broker, tmp_path, f"--topic={topic}", QUICK) as tool:
            wait_until_drained(broker, topic, "c", 1)
            assert tool.terminate() == 0
    assert [*files(tmp_path).values()] == [b"often\n"]


# Internals


def run_inside(options: NsqToFileOptions, during: Any) -> None:
    """Archive in this process, while during() runs in a thread."""

    async def run() -> None:
        ending = Ending()
        running = asyncio.create_task(Archives(options, ending).run())
        try:
            await asyncio.to_thread(during)
        finally:
            ending.end()
            await running
        assert ending.status == 0

    asyncio.run(run())


@pytest.mark.usefixtures("signals_restored")
def test_nothing_is_finished_before_it_is_synced(
    broker: TestBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished: list[int] = []
    sync = TopicFiles.sync

    def watched(self: TopicFiles) -> None:
        if self.path is not None:
            written = self.path.read_bytes().count(b"\n")
            stats = broker.channel_stats(topic, "c")
            assert stats is not None
            finished = stats["message_count"] - stats["depth"] - stats["in_flight_count"]
            assert finished <= sum(unfinished)
            unfinished.append(written - sum(unfinished))
        sync(self)

    monkeypatch.setattr(TopicFiles, "sync", watched)
    options = NsqToFileOptions(
        topic=(topic,),
        channel="c",
        nsqd_tcp_address=(tcp(broker),),
        output_dir=str(tmp_path),
        max_in_flight=20,
        sync_interval=0.05,
    )
    options.validate()

    def publish() -> None:
        for number in range(10):
            broker.publish(topic, *[b"%d" % number] * 30)
        wait_until_drained(broker, topic, "c", 300)

    run_inside(options, publish)
    assert sum(unfinished) == 300


@pytest.mark.usefixtures("signals_restored")
def test_a_slow_disk_does_not_hold_up_the_event_loop(
    broker: TestBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    is_syncing, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        is_syncing.set()
        assert go_on.wait(DEADLINE), "the event loop waits for the disk"
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    options = NsqToFileOptions(
        topic=(topic,),
        channel="c",
        nsqd_tcp_address=(tcp(broker),),
        output_dir=str(tmp_path),
        sync_interval=0.05,
    )

    async def run() -> None:
        ending = Ending()
        running = asyncio.create_task(Archives(options, ending).run())
        await asyncio.to_thread(broker.publish, topic, *[b"x"] * 100)
        while not is_syncing.is_set():  # noqa: ASYNC110  # set in a thread
            await asyncio.sleep(0.01)
        go_on.set()
        ending.end()
        await running

    asyncio.run(run())
    wait_until_drained(broker, topic, "c", 100)


@pytest.mark.usefixtures("signals_restored")
def test_messages_that_wait_for_a_sync_are_touched(tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedNsqd({"msg_timeout": 60}) as nsqd:
            options = NsqToFileOptions(
                topic=("t",),
                channel="c",
                nsqd_tcp_address=(nsqd.address,),
                output_dir=str(tmp_path),
                sync_interval=3600.0,
            )
            ending = Ending()
            running = asyncio.create_task(Archives(options, ending).run())
            peer = await nsqd.peer()
            await nsqd.told("IDENTIFY", "SUB t c", "RDY 200")
            peer.send_message("m1")
            touch, finish = (f"{verb} {message_id('m1')}" for verb in ("TOUCH", "FIN"))
            await until(lambda: nsqd.commands.count(touch) >= 3)
            assert finish not in nsqd.commands
            ending.end()
            await running
            assert nsqd.commands[-1] == finish

    run(main())


# The command line

GOOD = ("--topic=t", "--nsqd-tcp-address=127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--topic=t",), "--nsqd-tcp-address or --lookupd-http-address required"),
        (("--nsqd-tcp-address=127.0.0.1:1",), "--topic or --topic-pattern required"),
        (
            ("--topic-pattern=t", "--nsqd-tcp-address=127.0.0.1:1"),
            "--lookupd-http-address must be specified when no --topic specified",
        ),
        ((*GOOD, "--channel="), "--channel is required"),
        ((*GOOD, "--gzip-level=0"), "invalid --gzip-level value (0), should be 1-9"),
        ((*GOOD, "--topic-pattern=("), "--topic-pattern (: missing ), unterminated subpattern at position 0"),
        ((*GOOD, "--topic-pattern=u"), "--topic-pattern matches none of the given topics"),
        ((*GOOD, "--sync-interval=0s"), "--sync-interval must be positive"),
        ((*GOOD, "--filename-format=<REV><REV>"), "--filename-format has <REV> more than once"),
        *(
            (
                (*GOOD, "--filename-format=x", flag),
                "missing <REV> in --filename-format when gzip, rotation, or work dir enabled",
            )
            for flag in ("--gzip", "--rotate-size=1", "--rotate-interval=1s", "--work-dir=/nowhere")
        ),
    ],
)
def test_invalid_options_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str], root_logger_restored: None
) -> None:
    assert nsq_to_file.main(arguments) == 1
    assert capsys.readouterr().err.endswith(f"FATAL: {text}\n")


def test_an_invalid_output_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    done = run_tool("nsq_to_file", *GOOD, f"--output-dir={path}")
    assert done.status == 1 and f"FATAL: cannot use {path}: " in done.err


def test_directories_on_two_file_systems_are_refused(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    others = [one for one in (Path("/dev/shm"), Path(__file__).parent) if one.exists()]
    other = next((one for one in others if one.stat().st_dev != device), None)
    if other is None:
        pytest.skip("no second file system")
    done = run_tool("nsq_to_file", *GOOD, f"--output-dir={tmp_path}", f"--work-dir={other}")
    assert done.status == 1
    assert "FATAL: --work-dir and --output-dir must be on the same file system" in done.err


def test_log_level_and_prefix(broker: TestBroker, topic: str, tmp_path: Path) -> None:
    with archive(broker, tmp_path, f"--topic={topic}", QUICK, "--log-prefix=> ", "--log-level=warn") as tool:
        broker.publish(topic, b"one")
        wait_until_drained(broker, topic, "c", 1)
        assert tool.terminate() == 0
        assert tool.err() == ""
    done = run_tool("nsq_to_file", *GOOD, f"--output-dir={tmp_path}", "--log-prefix=> ")
    assert done.status == 1 and done.err.splitlines()[-1].startswith("> 2")


def test_the_host_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box.example.com")

    def host(identifier: str) -> str:
        return NsqToFileOptions(filename_format="<HOST>", host_identifier=identifier).names("t").at(0.0)

    assert host("") == "box"
    assert host("<HOSTNAME>") == "box.example.com"
    assert host("a-<SHORT_HOST>-b") == "a-box-b"
