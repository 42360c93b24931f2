"""Loads on a broker, and on a second one beside it: `python -m benchmarks.macro.broker --help`.

Rounds of the two sides alternate, so that a machine that gets busier or slower does so for both.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.macro.brokers import OURS, Broker, BrokerFailed, External, launcher
from benchmarks.macro.crew import Crew, LoadFailed
from benchmarks.macro.loads import LOADS, Load, Parameters, Round
from benchmarks.macro.report import Results, describe_machine, print_facts, print_table
from benchmarks.macro.wire import Address, BrokerRefused

PEER_IN_MEMORY = "--mem-queue-size=10000000"
HELP = {
    "messages": "messages of publish, consume, both and, each time, policy",
    "backlog_messages": "messages of backlog",
    "fanout_messages": "messages of fanout8",
    "single_messages": "messages of single_pub",
    "memory_messages": "messages of memory; it also looks at a fifth of them",
    "idle_topics": "topics of idle, with a channel each",
    "size": "bytes in a message",
    "batch": "messages in an MPUB",
    "producers": "producing processes",
    "consumers": "consuming processes",
    "rdy": "RDY of each consuming connection",
    "encode": "build every MPUB anew from its messages, as a client library would, not once for all",
    "headers": "give each message of publish, consume, both, backlog, fanout8 and single_pub a header",
    "window": "MPUBs a producer may have unanswered; 1 is how NSQ's own load tool works",
    "channels": "channels of fanout8",
    "connections": "connections of single_pub, over all producing processes",
    "latency_seconds": "how long latency runs at each rate",
    "idle_seconds": "how long idle watches the CPU time",
    "deadline": "seconds after which a step of a load has failed",
    "rounds": "rounds of each load; memory and idle are run once",
}


def parse_address(text: str) -> Address:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.broker", description=__doc__)
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument(
        "--peer", type=parse_address, metavar="HOST:PORT", help="compare with a broker that runs there"
    )
    peer.add_argument(
        "--peer-command",
        metavar="COMMAND",
        help="compare with this broker, started for each round; {data}, {tcp} and {http} stand for its data "
        "path and addresses, and NSQ's flags for them are appended where they are missing. For loads that "
        f"are to fit into its memory {PEER_IN_MEMORY} is appended too",
    )
    parser.add_argument(
        "--ours-command",
        metavar="COMMAND",
        default=OURS,
        help="what to measure, in the same way (default: our nsqd)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=LOADS,
        metavar="NAME",
        help=f"only this load, repeatable: {', '.join(LOADS)}",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure of every round there too"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where data paths are made (default: the directory for temporaries)",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="multiply all counts, for a quick look"
    )
    for parameter in fields(Parameters):
        flag = f"--{parameter.name.replace('_', '-')}"
        if isinstance(parameter.default, bool):
            parser.add_argument(flag, action="store_true", help=HELP[parameter.name])
            continue
        parser.add_argument(
            flag,
            type=type(parameter.default),
            default=parameter.default,
            metavar="N",
            help=f"{HELP[parameter.name]} (default: {parameter.default})",
        )
    return parser.parse_args(arguments)


def parameters_from(options: argparse.Namespace) -> Parameters:
    values = {parameter.name: getattr(options, parameter.name) for parameter in fields(Parameters)}
    for name in values:
        if name.endswith("messages") or name == "idle_topics":
            values[name] = max(1, int(values[name] * options.scale))
    return replace(Parameters(), **values)


def run_load(
    name: str,
    load: Load,
    sides: dict[str, Callable[[list[str]], Broker]],
    crew: Crew,
    parameters: Parameters,
    results: Results,
) -> None:
    for number in range(1 if load.once else parameters.rounds):
        # Whoever goes first gets the colder or the warmer machine: take turns.
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for side in order:
            extra = [PEER_IN_MEMORY] if side == "peer" and load.peer_in_memory else []
            try:
                with sides[side](extra) as broker:
                    if load.needs_process and isinstance(broker, External):
                        print(
                            f"{name}: not on {side}, it needs a broker that this tool starts", file=sys.stderr
                        )
                        continue
                    figures = load.run(Round(broker, crew, parameters))
            except (LoadFailed, BrokerFailed, BrokerRefused, OSError) as error:
                results.failures.append(f"{name}, {side}, round {number + 1}: {error}")
                print(f"FAILED: {results.failures[-1]}", file=sys.stderr)
                continue
            results.add(side, figures)
            shown = ", ".join(f"{figure}: {value:,.2f} {unit}" for figure, (value, unit) in figures.items())
            print(f"round {number + 1}, {side:>4}: {shown}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    parameters = parameters_from(options)
    sides = {"ours": launcher(template=options.ours_command, parent=options.data_dir)}
    if options.peer:
        sides["peer"] = launcher(external=options.peer)
    elif options.peer_command:
        sides["peer"] = launcher(template=options.peer_command, parent=options.data_dir)
    peer = options.peer_command or (":".join(map(str, options.peer)) if options.peer else "none")
    machine = describe_machine({"ours": options.ours_command, "peer": peer})
    selected = {name: load for name, load in LOADS.items() if not options.only or name in options.only}

    # Ended from outside: still stop what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print_facts(
        [*machine.items(), *((field.name, getattr(parameters, field.name)) for field in fields(parameters))]
    )
    print()
    results = Results()
    with Crew() as crew:
        for name, load in selected.items():
            run_load(name, load, sides, crew, parameters, results)
    print_table(results)
    return results.finish(options.json, parameters, machine)


if __name__ == "__main__":
    sys.exit(main())
