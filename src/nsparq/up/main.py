"""`nsparq up`: the whole stack in one terminal, until Ctrl-C.

Exit status 0 after a signal, 1 if something could not be started, kept running or stopped cleanly,
2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nsparq.errors import NsparqError, StartError
from nsparq.flags import parse_duration
from nsparq.tasks import cancel_all
from nsparq.tools.parser import Parser
from nsparq.up.members import Cluster, Plan
from nsparq.up.output import LEVELS, Output
from nsparq.up.ports import BASE, MAX_NSQD, MAX_PIPELINES, Ports
from nsparq.up.stack import Stack

__all__ = ["banner", "main", "make_parser", "run_until_signal"]

OK, FAILED, WRONG = 0, 1, 2
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

DESCRIPTION: Final = """\
Runs the whole stack in this terminal: nsqlookupd (the directory), nsqd (the broker; one or more),
nsqadmin (the web pages) and, with --pipeline, Spark pipelines. Ctrl-C stops all of it cleanly.

When everything answers, it prints the addresses. Publish a message, and look at it:

  nsparq up
  echo 'hello' | nsparq publish --topic=greetings --nsqd-tcp-address=127.0.0.1:4150
  open http://127.0.0.1:4171/ in a browser

A process that dies is restarted. Data stays in one folder and is used again by the next run.
"""
EPILOG: Final = """\
Examples:
  nsparq up                                       NSQ's usual ports, data in ./nsparq-data
  nsparq up --nsqd=3 --port-base=5150             three brokers; nsqd 5150 to 5155, nsqadmin 5171
  nsparq up --port-base=0                         any free ports
  nsparq up --pipeline=shop.toml                  also run the pipelines of a file
  nsparq up --replicas=2                          one broker with a copy that takes over (needs etcd)
"""


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        plan = _plan(arguments)
        _check_pipelines(plan.pipelines)
        output = Output(level=plan.log_level)
        return asyncio.run(run_until_signal(Stack(plan, output), output))
    except NsparqError as error:
        _complain(error)
        return FAILED


def _complain(error: Exception) -> None:
    first, *more = str(error).splitlines()
    sys.stderr.write("\n".join([f"nsparq up: {first}", *(f"           {line}" for line in more)]) + "\n")


# the command line


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nsparq up",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nsqd", type=_count, default=1, metavar="N", help="number of brokers (%(default)s)")
    add(
        "--replicas", type=_count, default=1, metavar="N",
        help="keep each message on N nsqds, of which one serves and the others can take over; 2 or 3",
    )  # fmt: skip
    add(
        "--coordinator", default="", metavar="URL",
        help="coordinator of the replicas, etcd://host:port or postgresql://user@host/database; "
        "without it, etcd is started if it is installed",
    )  # fmt: skip
    add(
        "--pipeline", action="append", default=[], type=Path, metavar="FILE",
        help="also run the pipelines of this file, with the addresses of this stack; repeatable",
    )  # fmt: skip
    add(
        "--data-path", type=Path, default=Path("nsparq-data"), metavar="DIR",
        help="folder for messages and checkpoints; created if missing (%(default)s)",
    )  # fmt: skip
    add(
        "--host", default="127.0.0.1", metavar="HOST",
        help="address to listen on (%(default)s: this machine only; 0.0.0.0: everybody)",
    )  # fmt: skip
    add(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="lowest level that is shown (%(default)s)",
    )
    add(
        "--stop-timeout", type=_duration, default=15.0, metavar="DURATION",
        help="time that each may take to stop before it is killed (15s)",
    )  # fmt: skip
    ports = parser.add_argument_group("ports", "0 is any free port.")
    add = ports.add_argument
    add(
        "--port-base", type=_port, default=BASE, metavar="N",
        help="first port (%(default)s): nsqd +0 and +1, the next +2 and +3, …; nsqlookupd +10 and "
        "+11; nsqadmin +21; status of pipelines +30, …; from the sixth nsqd on +50, …",
    )  # fmt: skip
    for flag, what in (
        ("--nsqd-tcp-port", "nsqd, for clients; further nsqds +2 each"),
        ("--nsqd-http-port", "nsqd, for HTTP; further nsqds +2 each"),
        ("--lookupd-tcp-port", "nsqlookupd, for nsqds"),
        ("--lookupd-http-port", "nsqlookupd, for consumers"),
        ("--admin-port", "nsqadmin, for your browser"),
        ("--pipeline-port", "status of the first pipeline file; further files +1 each"),
    ):
        add(flag, type=_port, metavar="N", help=what)
    return parser


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_NSQD:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {MAX_NSQD}, not {text!r}")
    return int(text)


def _duration(text: str) -> float:
    try:
        found = parse_duration(text)
    except ValueError:
        found = 0.0
    if found <= 0:
        raise argparse.ArgumentTypeError(f"must be a duration such as 15s, not {text!r}")
    return found


def _plan(arguments: argparse.Namespace) -> Plan:
    """Raises StartError."""
    if arguments.replicas > 1 and arguments.nsqd > 1:
        raise StartError("--replicas and --nsqd do not go together: the replicas are one nsqd to clients")
    if arguments.coordinator and arguments.replicas == 1:
        raise StartError("--coordinator needs --replicas")
    return Plan(
        data_path=arguments.data_path.absolute(),
        nsqd=arguments.nsqd,
        replicas=arguments.replicas,
        coordinator=arguments.coordinator,
        pipelines=tuple(arguments.pipeline),
        host=arguments.host,
        ports=Ports(
            base=arguments.port_base,
            lookupd_tcp=arguments.lookupd_tcp_port,
            lookupd_http=arguments.lookupd_http_port,
            nsqd_tcp=arguments.nsqd_tcp_port,
            nsqd_http=arguments.nsqd_http_port,
            admin=arguments.admin_port,
            pipeline=arguments.pipeline_port,
        ),
        log_level=arguments.log_level,
        stop_timeout=arguments.stop_timeout,
    )


def _check_pipelines(files: Sequence[Path]) -> None:
    """Checks that need no Spark, before anything is started. Raises NsparqError."""
    if not files:
        return
    if len(files) > MAX_PIPELINES:
        raise StartError(f"--pipeline: at most {MAX_PIPELINES} files; a file may have many pipelines")
    from nsparq.pipeline.file.reading import load

    for file in files:
        load(file)
    if importlib.util.find_spec("pyspark") is None:
        raise StartError("--pipeline needs Spark, which is not installed: pip install 'nsparq[spark]'")


# running


async def run_until_signal(stack: Stack, output: Output) -> int:
    """Returns the exit status. A second Ctrl-C kills all at once."""
    output.expect(member.name for member in stack.cluster.members)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal(number: int) -> None:
        if asked.is_set() and number == signal.SIGINT:
            output.say("killing all")
            stack.kill()
        asked.set()

    # Under nohup SIGHUP is ignored: the stack outlives its terminal.
    handled = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    work = asyncio.create_task(_work(stack, output))
    waiting = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        is_over = work.done()
        await cancel_all([work, waiting])
        if not is_over:
            output.say("stopping")
        is_clean = await stack.stop()
        if is_over:
            # Raises the error that ended the work.
            work.result()
        output.say("stopped")
        return OK if is_clean else FAILED
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def _work(stack: Stack, output: Output) -> None:
    """Start, print the addresses, and watch. Raises StartError."""
    output.say(f"starting; data is in {stack.plan.data_path}")
    await stack.start()
    sys.stdout.write(banner(stack.cluster))
    sys.stdout.flush()
    await stack.watch()


def banner(cluster: Cluster) -> str:
    """The addresses of all members."""
    lines = ["", "ready: everything answers", ""]
    rows = [(cluster.admin.name, f"http  {cluster.admin.page}   <- open this")]
    rows += [
        (one.name, f"tcp   {one.address('TCP')}    http  http://{one.address('HTTP')}")
        for one in (*cluster.nsqds, cluster.lookupd)
    ]
    rows += [(one.name, f"http  http://{one.address('metrics')}/status") for one in cluster.pipelines]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}   {where}" for name, where in rows]
    lookupd = f"--lookupd-http-address={cluster.lookupd.address('HTTP')}"
    if cluster.is_replicated:
        lines += ["", f"  nsparq replication status {lookupd}"]
        lines += [f"  nsparq publish greetings hello {lookupd}"]
    else:
        first = cluster.nsqds[0].address("TCP")
        lines += ["", f"  echo hello | nsparq publish --topic=greetings --nsqd-tcp-address={first}"]
    lines += ["", "Ctrl-C stops it.", ""]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
