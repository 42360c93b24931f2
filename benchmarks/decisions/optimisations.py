"""What each optimisation is worth: `python -m benchmarks.decisions.optimisations`.

Rounds with and without an optimisation alternate, so that a busy machine is busy for both. The
table shows the ratio with / without for the rate, and for the broker's processor time per message.
A rate above 1 and a processor time below 1 speak for the optimisation. Processor time is the
steadier of the two.

Two cores, medians of three rounds with `--scale 0.1`, on a machine that was not idle:

    lanes                     single_pub  rate 1.66   processor time 0.61
    busy poll                 single_pub       1.02                  0.93
    appends at once           publish          1.40                  0.85
                              both             1.53                  0.80
    delivery in parts         fanout8          0.96                  0.92
    segments that grow ahead  publish          1.29                  0.69
    freed memory kept         publish          1.68                  1.10
                              fanout8          0.86                  0.94
    OKs with one system call  single_pub       1.27                  0.74   (median of nine)

So all of them stay. Waiting for more publishers without lanes gained nothing.

An optimisation is left out by replacing a constant before nsqd starts (`LEFT_OUT`); nsqd has no
flag for it. `--serve NAME` followed by nsqd's flags starts such an nsqd. `--base COMMAND` compares
whole programs instead: the present nsqd with that one, under every load.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

from benchmarks.macro.brokers import OURS, launcher
from benchmarks.macro.crew import Crew
from benchmarks.macro.loads import LOADS, Parameters, Round

ENDLESS = 1 << 62


def _no_busy_poll() -> None:
    from nsparq.server import daemon

    daemon.BUSY_POLL_S = 0.0


def _no_lanes() -> None:
    from nsparq.server import lane

    lane.JOIN_AFTER = ENDLESS  # type: ignore[misc]  # not final here


def _no_eager_appends() -> None:
    from nsparq.broker import turn

    turn.EAGER_BATCH = turn.COMPANY_BATCH = ENDLESS  # type: ignore[misc]  # not final here


def _no_delivery_parts() -> None:
    from nsparq.broker import turn

    turn.DELIVERY_PARTS = 1  # type: ignore[misc]  # not final here


def _no_growing_ahead() -> None:
    from nsparq.storage import batch

    batch.PREPARE_FROM = ENDLESS  # type: ignore[misc]  # not final here


def _no_compiled_code() -> None:
    from nsparq import kernel

    kernel.pack_messages = kernel.take_publishes = kernel.build_frames = kernel.decode_fins = None
    kernel.send_each = kernel.read_publishes = None


def _no_ring() -> None:
    from nsparq import kernel

    kernel.open_ring = None


def _no_kept_memory() -> None:
    from nsparq.server import memory

    memory.keep_freed_memory = lambda: None


LEFT_OUT: dict[str, Callable[[], None]] = {
    "busy poll": _no_busy_poll,
    "lanes": _no_lanes,
    "appends at once": _no_eager_appends,
    "delivery in parts": _no_delivery_parts,
    "segments that grow ahead": _no_growing_ahead,
    "all compiled code": _no_compiled_code,
    "freed memory kept": _no_kept_memory,
    "OKs with one system call": _no_ring,
}
LOADS_OF = {
    "busy poll": ("single_pub",),
    "lanes": ("single_pub",),
    "appends at once": ("publish", "both"),
    "delivery in parts": ("fanout8",),
    "segments that grow ahead": ("publish",),
    "all compiled code": ("publish", "both", "single_pub"),
    "freed memory kept": ("publish", "fanout8"),
    "OKs with one system call": ("single_pub",),
}
COUNTS = {"publish": "messages", "both": "messages", "fanout8": "fanout_messages"}


def measure(load: str, command: str, crew: Crew, parameters: Parameters) -> tuple[float, float]:
    """The rate, and the broker's processor time in microseconds for each message."""
    with launcher(template=command)([]) as broker:
        run = Round(broker, crew, parameters)
        before = run.cpu_seconds() or 0.0
        figures = LOADS[load].run(run)
        spent = (run.cpu_seconds() or 0.0) - before
    rate = next(figure.value for figure in figures.values() if figure.unit == "msg/s")
    return rate, 1e6 * spent / getattr(parameters, COUNTS.get(load, "single_messages"))


def compare(name: str, load: str, without: str, crew: Crew, parameters: Parameters) -> None:
    commands = {"with": OURS, "without": without}
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for number in range(parameters.rounds):
        for side in [*commands] if number % 2 == 0 else [*reversed(commands)]:
            found[side].append(measure(load, commands[side], crew, parameters))
    (rate, time_us), (other_rate, other_us) = (
        [statistics.median(values) for values in zip(*found[side], strict=True)] for side in commands
    )
    print(
        f"{name:26} {load:11} {rate:11,.0f} {other_rate:11,.0f} {rate / other_rate:6.2f}"
        f" {time_us:8.2f} {other_us:8.2f} {time_us / other_us:6.2f}",
        flush=True,
    )


def serve(arguments: list[str]) -> int:
    """Run nsqd without one optimisation."""
    LEFT_OUT[arguments[0]]()
    from nsparq.server.main import main as nsqd

    return nsqd(arguments[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decisions.optimisations")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LEFT_OUT)}; all if none")
    parser.add_argument("--base", metavar="COMMAND", help="compare with this nsqd instead")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--scale", type=float, default=0.2, metavar="X", help="multiply all counts")
    given = parser.parse_args()
    defaults = Parameters()
    parameters = replace(
        defaults,
        rounds=given.rounds,
        messages=int(defaults.messages * given.scale),
        fanout_messages=int(defaults.fanout_messages * given.scale),
        single_messages=int(defaults.single_messages * given.scale),
    )
    print(f"{'':38} {'msg/s':>11} {'without':>11} {'ratio':>6} {'us/msg':>8} {'without':>8} {'ratio':>6}")
    with Crew() as crew:
        if given.base:
            for load in ("publish", "both", "fanout8", "single_pub"):
                compare("the base", load, given.base, crew, parameters)
            return
        for name in given.names or LEFT_OUT:
            without = f"{sys.executable} -m benchmarks.decisions.optimisations --serve '{name}'"
            for load in LOADS_OF[name]:
                compare(name, load, without, crew, parameters)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2:]))
    main()
