"""Publishing by HTTP, on our nsqd and on a second one beside it:
`python -m benchmarks.macro.http --help`.

Keep-alive connections with one request unanswered on each, driven by one process that sends bytes
made beforehand and looks at the answers no closer than it must. Rounds of the two sides alternate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.macro.brokers import HTTP_LISTENING, OURS, BrokerFailed, Spawned
from benchmarks.macro.loads import Figure, Figures
from benchmarks.macro.report import Results, describe_machine, print_facts, print_table
from benchmarks.macro.wire import Address

PEER_IN_MEMORY = "--mem-queue-size=10000000"
HELP = {
    "requests": "requests of pub",
    "messages": "messages of each mpub load",
    "size": "bytes in a message",
    "batch": "messages in an mpub",
    "connections": "keep-alive connections",
    "processes": "load processes, which share the connections",
    "deadline": "seconds after which a load has failed",
    "rounds": "rounds of each load",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything that shapes the loads; printed before any figure. Each is a flag of the same
    name."""

    requests: int = 200_000
    messages: int = 2_000_000
    size: int = 200
    batch: int = 200
    connections: int = 16
    processes: int = 1
    deadline: float = 120.0
    rounds: int = 3


class LoadFailed(Exception):
    """The broker refused something, or did not answer in time."""


class HttpBroker(Spawned):
    """A broker process that listens for HTTP too; its log may say so before or after TCP."""

    def start(self, timeout: float = 120.0) -> float:
        took = super().start(timeout)
        give_up = time.monotonic() + timeout
        while not HTTP_LISTENING.search(self.log.read_bytes()):
            if time.monotonic() > give_up or (self.process and self.process.poll() is not None):
                raise BrokerFailed(f"no HTTP address:\n{self.last_words()}")
            time.sleep(0.002)
        return took


def encode_post(target: str, body: bytes) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def make_request(load: str, topic: str, size: int, batch: int) -> bytes:
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    match load:
        case "pub":
            return encode_post(f"/pub?topic={topic}", body)
        case "mpub text":
            return encode_post(f"/mpub?topic={topic}", b"\n".join([body] * batch))
        case "mpub binary":
            records = (struct.pack(">i", size) + body) * batch
            return encode_post(f"/mpub?topic={topic}&binary=true", struct.pack(">i", batch) + records)
    raise AssertionError(load)


def drive(
    parent: Connection, address: Address, request: bytes, connections: int, count: int, deadline: float
) -> None:
    """A load process: connect, say so, wait for the word, send; answers with (first, last) or a
    text."""
    try:
        sockets = {}
        poll = select.epoll()
        for _ in range(connections):
            connection = socket.create_connection(address, timeout=10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets[connection.fileno()] = connection
            poll.register(connection, select.EPOLLIN)
        parent.send(None)
        parent.recv()
        parent.send(exchange(sockets, poll, request, count, deadline))
    except (LoadFailed, OSError) as error:
        parent.send(f"{type(error).__name__}: {error}")


def exchange(
    sockets: dict[int, socket.socket], poll: select.epoll, request: bytes, count: int, deadline: float
) -> tuple[int, int]:
    """So many requests, one unanswered per connection; when the first was sent and the last
    answered."""
    first = time.monotonic_ns()
    give_up = first + int(deadline * 1e9)
    to_send, unanswered = count, 0
    for connection in sockets.values():
        if to_send:
            connection.sendall(request)
            to_send -= 1
            unanswered += 1
    while unanswered:
        ready = poll.poll(1.0)
        if time.monotonic_ns() > give_up:
            raise LoadFailed(f"{unanswered + to_send} of {count} requests are not answered")
        for number, _ in ready:
            connection = sockets[number]
            answer = connection.recv(4096)
            # Every answer to a publish is the same few bytes in one piece; anything else is a
            # failure.
            if not answer.startswith(b"HTTP/1.1 200 OK\r\n") or not answer.endswith(b"\r\n\r\nOK"):
                raise LoadFailed(f"not what was expected: {answer[:200]!r}")
            if to_send:
                connection.sendall(request)
                to_send -= 1
            else:
                unanswered -= 1
    return first, time.monotonic_ns()


def measure(broker: HttpBroker, load: str, parameters: Parameters) -> Figures:
    """One round of one load."""
    p = parameters
    per_request = 1 if load == "pub" else p.batch
    count = p.requests if load == "pub" else max(p.connections, p.messages // p.batch)
    request = make_request(load, "load", p.size, p.batch)
    context = multiprocessing.get_context("spawn")
    team = []
    cpu_before = broker.cpu_seconds()
    try:
        for number in range(p.processes):
            ours, theirs = context.Pipe()
            share = [
                total // p.processes + (number < total % p.processes) for total in (p.connections, count)
            ]
            arguments = (theirs, broker.http_address, request, *share, p.deadline)
            process = context.Process(target=drive, args=arguments, daemon=True)
            process.start()
            team.append((process, ours))
        for _, pipe in team:
            answer_of(pipe, 30)
        for _, pipe in team:
            pipe.send("go")
        spans = [answer_of(pipe, p.deadline + 15) for _, pipe in team]
    finally:
        for process, _ in team:
            process.terminate()
            process.join()
    seconds = (max(last for _, last in spans) - min(first for first, _ in spans)) / 1e9
    cpu_us = (broker.cpu_seconds() - cpu_before) / count * 1e6
    if load == "pub":
        return {
            "pub": Figure(count / seconds, "requests/s"),
            "pub, processor time of the broker": Figure(cpu_us, "us"),
        }
    return {load: Figure(count * per_request / seconds, "messages/s")}


def answer_of(pipe: Connection, seconds: float) -> tuple[int, int]:
    if not pipe.poll(seconds):
        raise LoadFailed("a load process did not answer")
    answer = pipe.recv()
    if isinstance(answer, str):
        raise LoadFailed(answer)
    return answer


LOADS = ("pub", "mpub text", "mpub binary")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.http", description=__doc__)
    parser.add_argument(
        "--peer-command",
        metavar="COMMAND",
        help="compare with this broker, started for each round; {data}, {tcp} and {http} stand for its data "
        f"path and addresses. {PEER_IN_MEMORY} is appended, which spares it the disk",
    )
    parser.add_argument("--ours-command", metavar="COMMAND", default=OURS, help="what to measure (our nsqd)")
    parser.add_argument(
        "--only", action="append", choices=LOADS, metavar="NAME", help=f"of {', '.join(LOADS)}"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure of every round there too"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where data paths are made")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="multiply counts, for a quick look"
    )
    for parameter in fields(Parameters):
        parser.add_argument(
            f"--{parameter.name}",
            type=type(parameter.default),
            default=parameter.default,
            metavar="N",
            help=f"{HELP[parameter.name]} (default: {parameter.default})",
        )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    values = {field.name: getattr(options, field.name) for field in fields(Parameters)}
    for name in ("requests", "messages"):
        values[name] = max(1, int(values[name] * options.scale))
    parameters = Parameters(**values)
    sides = {"ours": (options.ours_command, [])}
    if options.peer_command:
        sides["peer"] = (options.peer_command, [PEER_IN_MEMORY])
    machine = describe_machine({"ours": options.ours_command, "peer": options.peer_command or "none"})
    # Ended from outside: still stop what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print_facts([*machine.items(), *values.items()])
    print()
    results = Results()
    for load in options.only or LOADS:
        for number in range(parameters.rounds):
            # Whoever goes first gets the colder or the warmer machine: take turns.
            for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
                template, extra = sides[side]
                try:
                    with HttpBroker(template, extra, options.data_dir) as broker:
                        figures = measure(broker, load, parameters)
                except (LoadFailed, BrokerFailed, OSError) as error:
                    results.failures.append(f"{load}, {side}, round {number + 1}: {error}")
                    print(f"FAILED: {results.failures[-1]}", file=sys.stderr)
                    continue
                results.add(side, figures)
                shown = ", ".join(f"{name}: {value:,.1f} {unit}" for name, (value, unit) in figures.items())
                print(f"round {number + 1}, {side:>4}: {shown}", file=sys.stderr)
    print_table(results)
    return results.finish(options.json, parameters, machine)


if __name__ == "__main__":
    sys.exit(main())
