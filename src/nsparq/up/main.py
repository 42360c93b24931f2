"""`nsparq up`: the whole stack in one terminal, until Ctrl-C.

Status 0 when a signal has ended it, 1 when something could not be started, kept running or stopped cleanly,
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
from nsparq.up.members import Cluster, Plan
from nsparq.up.output import LEVELS, Output
from nsparq.up.ports import BASE, MAX_NSQD, MAX_PIPELINES, Ports
from nsparq.up.stack import Stack

__all__ = ["banner", "main", "run_until_signal"]

OK, FAILED, WRONG = 0, 1, 2
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

DESCRIPTION: Final = """\
Runs the whole stack in this terminal: nsqlookupd (the directory), nsqd (the broker; one or more),
nsqadmin (the pages) and, if you like, Spark pipelines. Ctrl-C stops all of it, cleanly.

Once everything answers, the addresses are printed. Publish something, and look at it:

  nsparq up
  echo 'hello' | nsparq publish --topic=greetings --nsqd-tcp-address=127.0.0.1:4150
  open http://127.0.0.1:4171/ in a browser

What dies is started again. Data stays in one folder, and is there again next time.
"""
EPILOG: Final = """\
Examples:
  nsparq up                                       NSQ's usual ports, data in ./nsparq-data
  nsparq up --nsqd=3 --port-base=5150             three brokers; nsqd 5150 to 5155, nsqadmin 5171
  nsparq up --port-base=0                         any ports that are free
  nsparq up --pipeline=shop.toml                  and the pipelines of a file
"""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nsparq up",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nsqd", type=_count, default=1, metavar="N", help="how many brokers (%(default)s)")
    add(
        "--pipeline", action="append", default=[], type=Path, metavar="FILE",
        help="run the pipelines of this file too; repeatable. The addresses in it give way to ours",
    )  # fmt: skip
    add(
        "--data-path", type=Path, default=Path("nsparq-data"), metavar="DIR",
        help="folder for messages and checkpoints; made if need be (%(default)s)",
    )  # fmt: skip
    add(
        "--host", default="127.0.0.1", metavar="HOST",
        help="address to listen on (%(default)s: this machine only; 0.0.0.0: everybody)",
    )  # fmt: skip
    add("--log-level", choices=LEVELS, default="info", help="least severe lines that are shown (%(default)s)")
    add(
        "--stop-timeout", type=_duration, default=15.0, metavar="DURATION",
        help="how long each may take to stop before it is killed (15s)",
    )  # fmt: skip
    ports = parser.add_argument_group("ports", "0 is any that is free.")
    add = ports.add_argument
    add(
        "--port-base", type=_port, default=BASE, metavar="N",
        help="where the ports begin (%(default)s): nsqd +0 and +1, the next +2 and +3, …; nsqlookupd +10 and "
        "+11; nsqadmin +21; figures of pipelines +30, …; from the sixth nsqd on +50, …",
    )  # fmt: skip
    for flag, what in (
        ("--nsqd-tcp-port", "nsqd, for clients; further nsqds +2 each"),
        ("--nsqd-http-port", "nsqd, for HTTP; further nsqds +2 each"),
        ("--lookupd-tcp-port", "nsqlookupd, where nsqds register"),
        ("--lookupd-http-port", "nsqlookupd, for consumers that look for nsqds"),
        ("--admin-port", "nsqadmin, for your browser"),
        ("--pipeline-port", "figures of the first pipeline file; further files +1 each"),
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
    return Plan(
        data_path=arguments.data_path.absolute(),
        nsqd=arguments.nsqd,
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
    """What can be said about them without Spark is said before anything is started. Raises NsparqError."""
    if not files:
        return
    if len(files) > MAX_PIPELINES:
        raise StartError(f"--pipeline: {MAX_PIPELINES} files at the most; a file may have many pipelines")
    from nsparq.pipeline.file.reading import load

    for file in files:
        load(file)
    if importlib.util.find_spec("pyspark") is None:
        raise StartError("--pipeline needs Spark, which is not installed: pip install 'nsparq[spark]'")


# running


async def run_until_signal(stack: Stack, output: Output) -> int:
    """The status of the command. Somebody at a keyboard who asks twice does not want to wait."""
    output.expect(member.name for member in stack.cluster.members)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal(number: int) -> None:
        if asked.is_set() and number == signal.SIGINT:
            output.say("all are killed")
            stack.kill()
        asked.set()

    # Under nohup it is to go on when the terminal is closed.
    heard = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, on_signal, number)
    work = asyncio.create_task(_work(stack, output))
    waiting = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        is_over = work.done()
        for task in (work, waiting):
            task.cancel()
        await asyncio.gather(work, waiting, return_exceptions=True)
        if not is_over:
            output.say("stopping")
        is_clean = await stack.stop()
        if is_over:
            # What it raises is why we stop.
            work.result()
        output.say("stopped")
        return OK if is_clean else FAILED
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


async def _work(stack: Stack, output: Output) -> None:
    """Start, say so, and watch. Raises StartError."""
    output.say(f"starting; data is in {stack.plan.data_path}")
    await stack.start()
    sys.stdout.write(banner(stack.cluster))
    sys.stdout.flush()
    await stack.watch()


def banner(cluster: Cluster) -> str:
    """Where everything is, once it is."""
    lines = ["", "ready: everything answers", ""]
    rows = [(cluster.admin.name, f"http  {cluster.admin.page}   <- open this")]
    rows += [
        (one.name, f"tcp   {one.address('TCP')}    http  http://{one.address('HTTP')}")
        for one in (*cluster.nsqds, cluster.lookupd)
    ]
    rows += [(one.name, f"http  http://{one.address('metrics')}/status") for one in cluster.pipelines]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}   {where}" for name, where in rows]
    first = cluster.nsqds[0].address("TCP")
    lines += ["", f"  echo hello | nsparq publish --topic=greetings --nsqd-tcp-address={first}"]
    lines += ["", "Ctrl-C stops it.", ""]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
