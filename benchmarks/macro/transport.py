"""Publishing and consuming over TLS and compression: `python -m benchmarks.macro.transport --help`.

Each transport is compared with plain TCP in the same run, and with the same on a second broker if
there is one. Broker and load share the machine, so the processor time that each spends is told too.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.macro.brokers import OURS, BrokerFailed, Spawned
from benchmarks.macro.crew import Crew, LoadFailed
from benchmarks.macro.layered import TRANSPORTS, LayeredConsumer, LayeredPublisher, Transport, make_bodies
from benchmarks.macro.loads import Figure, Figures, check_delivery, consumed_rate, fresh_name, rate
from benchmarks.macro.report import Results, describe_machine, median, print_facts, print_table, ratio
from benchmarks.macro.roles import Span
from benchmarks.macro.wire import BrokerRefused, create_channel
from tests.support.certificates import certificates

PEER_IN_MEMORY = "--mem-queue-size=10000000"
CHANNEL = "load"
BODIES = ("random", "json")
DIRECTIONS = ("publish", "consume")
HELP = {
    "random_messages": "messages of 100 bytes that cannot be compressed",
    "json_messages": "messages of 400 bytes of JSON",
    "batch": "messages in an MPUB",
    "producers": "producing processes",
    "consumers": "consuming processes",
    "rdy": "RDY of each consuming connection",
    "window": "MPUBs a producer may have unanswered",
    "deflate_level": "level that clients ask for, and publish with",
    "deadline": "seconds after which a step of a load has failed",
    "rounds": "rounds of each transport",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything that shapes the loads; printed before any figure. Each is a flag of the same
    name."""

    random_messages: int = 800_000
    json_messages: int = 400_000
    batch: int = 200
    producers: int = 2
    consumers: int = 2
    rdy: int = 2500
    window: int = 4
    deflate_level: int = 6
    deadline: float = 120.0
    rounds: int = 3


@dataclass
class Round:
    """One transport with one kind of bodies on one broker."""

    broker: Spawned
    crew: Crew
    parameters: Parameters
    transport: Transport
    kind: str
    ca_file: str

    def measure(self) -> Figures:
        p = self.parameters
        wanted = p.random_messages if self.kind == "random" else p.json_messages
        # Whole MPUBs from each producer.
        count = max(1, wanted // (p.batch * p.producers)) * p.batch * p.producers
        topic = fresh_name()
        create_channel(self.broker.address, topic, CHANNEL)
        spans, spent = self._work(self._publishers(topic, count))
        figures = self._figures("publish", rate(count, spans), count, spans, spent)
        spans, spent = self._work(self._consumers(topic, count))
        check_delivery(spans, count)
        speed = consumed_rate(spans, p.rdy * p.consumers)
        return figures | self._figures("consume", speed, count, spans, spent)

    def _work(self, roles: Sequence[tuple[type, dict[str, Any]]]) -> tuple[list[Span], float]:
        """What the processes report, and the processor time of the broker meanwhile."""
        before = self.broker.cpu_seconds()
        spans = self.crew.work(roles, self.parameters.deadline)
        return spans, self.broker.cpu_seconds() - before

    def _figures(
        self, direction: str, speed: float, count: int, spans: Sequence[Span], spent: float
    ) -> Figures:
        name = figure_name(self.kind, direction, self.transport)
        millions = count / 1e6
        return {
            name: Figure(speed, "msg/s"),
            f"{name}, broker CPU": Figure(spent / millions, "s"),
            f"{name}, load CPU": Figure(sum(span.cpu_s for span in spans) / millions, "s"),
        }

    @property
    def _common(self) -> dict[str, Any]:
        p = self.parameters
        return {
            "address": self.broker.address,
            "transport": self.transport,
            "level": p.deflate_level,
            "ca_file": self.ca_file,
            "deadline": p.deadline,
        }

    def _publishers(self, topic: str, count: int) -> list[tuple[type, dict[str, Any]]]:
        p = self.parameters
        own = {
            "topic": topic,
            "kind": self.kind,
            "count": count // p.producers,
            "batch": p.batch,
            "window": p.window,
        }
        return [(LayeredPublisher, {**self._common, **own})] * p.producers

    def _consumers(self, topic: str, count: int) -> list[tuple[type, dict[str, Any]]]:
        p = self.parameters
        own = {
            "subscriptions": [(topic, CHANNEL)],
            "size": len(make_bodies(self.kind, 1, 0)[0]),
            "rdy": p.rdy,
            "total": count,
        }
        return [(LayeredConsumer, {**self._common, **own, "slot": slot}) for slot in range(p.consumers)]


def figure_name(kind: str, direction: str, transport: Transport) -> str:
    return f"{kind} {direction}, {transport.name}"


def print_costs(
    results: Results, transports: Sequence[Transport], kinds: Sequence[str], sides: Sequence[str]
) -> None:
    """Medians once more: what each transport leaves of the plain rate, and the processor time it
    takes."""
    columns = [(kind, direction) for kind in kinds for direction in DIRECTIONS]
    for side in sides:
        print(f"\n{side}: rate, times plain; seconds of processor time per million messages, broker + load")
        print(" " * 12 + "".join(f"{kind + ' ' + direction:>24}" for kind, direction in columns))
        for transport in transports:
            cells = []
            for kind, direction in columns:
                name = figure_name(kind, direction, transport)
                plain = median_of(results, figure_name(kind, direction, TRANSPORTS[0]), side)
                broker, load = (median_of(results, f"{name}, {who} CPU", side) for who in ("broker", "load"))
                spent = "-" if broker is None or load is None else f"{broker:.2f} + {load:.2f}"
                cells.append(f"{ratio(median_of(results, name, side), plain)}; {spent}")
            print(f"{transport.name:12}" + "".join(f"{cell:>24}" for cell in cells))


def median_of(results: Results, name: str, side: str) -> float | None:
    row = results.rows.get(name)
    return median(getattr(row, side)) if row else None


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.transport", description=__doc__)
    parser.add_argument(
        "--peer-command",
        metavar="COMMAND",
        help="compare with this broker, started for each measurement; {data}, {tcp} and {http} stand for its "
        f"data path and addresses. {PEER_IN_MEMORY} is appended, which spares it the disk, and the flags "
        "for the certificate",
    )
    parser.add_argument("--ours-command", metavar="COMMAND", default=OURS, help="what to measure (our nsqd)")
    names = [transport.name for transport in TRANSPORTS]
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"besides plain, of {', '.join(names)}",
    )
    parser.add_argument("--bodies", choices=BODIES, help="only this kind of bodies")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure of every round there too"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where data paths are made")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="multiply counts, for a quick look"
    )
    for parameter in fields(Parameters):
        parser.add_argument(
            f"--{parameter.name.replace('_', '-')}",
            type=type(parameter.default),
            default=parameter.default,
            metavar="N",
            help=f"{HELP[parameter.name]} (default: {parameter.default})",
        )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    parameters = Parameters(**{field.name: getattr(options, field.name) for field in fields(Parameters)})
    parameters = replace(
        parameters,
        random_messages=max(1, int(parameters.random_messages * options.scale)),
        json_messages=max(1, int(parameters.json_messages * options.scale)),
    )
    found = certificates()
    tls = [f"--tls-cert={found.server.cert}", f"--tls-key={found.server.key}"]
    sides = {"ours": (options.ours_command, tls)}
    if options.peer_command:
        sides["peer"] = (options.peer_command, [*tls, PEER_IN_MEMORY])
    machine = describe_machine({"ours": options.ours_command, "peer": options.peer_command or "none"})
    transports = [t for t in TRANSPORTS if not options.only or t.name in ("plain", *options.only)]
    kinds = [options.bodies] if options.bodies else list(BODIES)
    # Ended from outside: still stop what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    values = [(field.name, getattr(parameters, field.name)) for field in fields(parameters)]
    print_facts([*machine.items(), *values])
    print()
    results = Results()
    with Crew() as crew:
        for number in range(parameters.rounds):
            for kind in kinds:
                for transport in transports:
                    # Whoever goes first gets the colder or the warmer machine: take turns.
                    for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
                        template, extra = sides[side]
                        try:
                            with Spawned(template, extra, options.data_dir) as broker:
                                figures = Round(
                                    broker, crew, parameters, transport, kind, str(found.ca.cert)
                                ).measure()
                        except (LoadFailed, BrokerFailed, BrokerRefused, OSError) as error:
                            what = f"{kind}, {transport.name}, {side}, round {number + 1}"
                            results.failures.append(f"{what}: {error}")
                            print(f"FAILED: {results.failures[-1]}", file=sys.stderr)
                            continue
                        results.add(side, figures)
                        shown = ", ".join(f"{what}: {value:,.2f}" for what, (value, _) in figures.items())
                        print(f"round {number + 1}, {side:>4}: {shown}", file=sys.stderr)
    rates = Results()
    rates.rows = {
        name: results.rows[name]
        for kind in kinds
        for direction in DIRECTIONS
        for transport in transports
        if (name := figure_name(kind, direction, transport)) in results.rows
    }
    print_table(rates)
    print_costs(results, transports, kinds, list(sides))
    return results.finish(options.json, parameters, machine)


if __name__ == "__main__":
    sys.exit(main())
