"""Writes the figures of benchmark runs into the documentation: `python -m benchmarks.figures`.

`benchmarks/results` has a JSON file for each run. Pages hold marked places, and nothing between the
marks is written by hand:

    <!-- figures: broker -->      a table
    <!-- /figures -->

With `--check` it writes nothing, and fails if a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- figures: ([\w -]+) -->\n)(.*?)(^<!-- /figures -->$)", re.MULTILINE | re.DOTALL)


class Row(NamedTuple):
    """A line of a table: figures of one run, shown together."""

    text: str
    run: str
    names: tuple[str, ...]
    ratio: bool = True


def row(text: str, run: str, *names: str, ratio: bool = True) -> Row:
    return Row(text, run, names, ratio)


MILLION, FIVE_MILLION = "memory, 1,000,000 messages", "memory, 5,000,000 messages"

LATENCY = [
    row(
        f"publish to receive at {rate}/s: p50, p99",
        "broker",
        f"latency at {rate}/s, p50",
        f"latency at {rate}/s, p99",
        ratio=False,
    )
    for rate in (200, 1000)
]

BROKER = [
    row("publish, MPUB of 200; NSQ all in memory", "broker", "publish"),
    row("every message to 8 channels, consumed live, per channel", "broker", "fanout8, live"),
    row("… CPU time of the broker per delivery", "broker", "fanout8, live, broker CPU", ratio=False),
    row("the same, published first, then consumed", "broker", "fanout8, piled up"),
    row("… CPU time of the broker per delivery", "broker", "fanout8, piled up, broker CPU", ratio=False),
    row("single PUB, one at a time, 16 connections; NSQ all in memory", "broker", "single_pub"),
    *LATENCY,
    row("consume; NSQ all in memory", "broker", "consume"),
    row("publish and consume at once; NSQ all in memory", "broker", "both"),
    row("publish a backlog beyond the memory queue", "broker", "backlog publish"),
    row("consume it", "broker", "backlog consume"),
    row("memory with 1 million, 5 million messages waiting", "broker", MILLION, FIVE_MILLION, ratio=False),
    row(
        "restart with 5 million waiting, to the first message: killed, clean",
        "broker",
        "restart after kill -9, first message",
        "restart after clean stop, first message",
        ratio=False,
    ),
    row("… delivered of those 5 million", "broker", "delivered after both restarts", ratio=False),
    row("10,000 idle topics: CPU time in 10 s", "broker", "CPU in 10 s, 10,000 idle", ratio=False),
    row("10,000 idle topics: memory", "broker", "memory, 10,000 idle", ratio=False),
]

SUMMARY = [
    row("publish in batches", "broker", "publish"),
    row("deliver every message to 8 channels, per channel", "broker", "fanout8, live"),
    row("publish one message at a time, 16 connections", "broker", "single_pub"),
    LATENCY[0],
    row("consume", "broker", "consume"),
    row("consume a backlog that does not fit into memory", "broker", "backlog consume"),
    row(
        "acknowledged messages that survive `kill -9`",
        "broker",
        "delivered after both restarts",
        ratio=False,
    ),
    row("memory with 5 million messages waiting", "broker", FIVE_MILLION, ratio=False),
]

LAYERS = ("TLS", "snappy", "deflate")
TRANSPORT = [
    row("`POST /pub`, 16 connections", "http", "/pub"),
    row("… CPU time of the broker per request", "http", "/pub, broker CPU", ratio=False),
    row("`POST /mpub`: text, binary", "http", "/mpub, text", "/mpub, binary"),
    *(
        row(
            f"{verb}, {bodies}: TLS, snappy, deflate",
            run,
            *(f"{verb}, {kind}, {layer}" for layer in LAYERS),
        )
        for run, kind, bodies in (
            ("transport-random", "random", "100 random bytes"),
            ("transport", "json", "400 bytes of JSON"),
        )
        for verb in ("publish", "consume")
    ),
    row(
        "publish, consume: JSON, TLS + snappy",
        "transport",
        "publish, json, TLS + snappy",
        "consume, json, TLS + snappy",
    ),
]

LOOKUPD = [
    *(
        row(f"{text}: p50, p99", "lookupd", f"{name}, p50", f"{name}, p99", ratio=False)
        for text, name in (
            ("`/lookup`, 1,000 producers", "/lookup"),
            ("`/nodes`, 2.7 MB", "/nodes"),
            ("`/nodes` after a change each time", "/nodes after a change"),
        )
    ),
    row("`/topics`: p50", "lookupd", "/topics, p50", ratio=False),
    row("REGISTER, pipelined", "lookupd", "REGISTER"),
    row("memory: idle, peak", "lookupd", "memory, idle", "memory, peak", ratio=False),
]

SPARK = [
    row("read a topic, drop the rows", "spark-source", "into nothing"),
    row("read a topic, write Parquet", "spark-source", "into Parquet"),
    row("a trigger with one row, with none", "spark-source", "trigger of one row", "trigger of none"),
    row("publish to a topic, exactly once", "spark-sink", "exactly once"),
    row("publish to a topic, at least once", "spark-sink", "at least once"),
    *(
        row(
            f"topic to topic at {rate}/s: p50, p90, p99",
            "spark-latency",
            *(f"{rate}/s, {point}" for point in ("p50", "p90", "p99")),
        )
        for rate in ("100", "10,000")
    ),
    row("archive to Parquet during publishing at full rate", "spark-archive", "archived"),
    row("… lag at most, and until it was gone", "spark-archive", "lag at most", "lag gone after"),
    row("… memory of nsqd, of Spark: at most", "spark-archive", "nsqd memory", "Spark memory"),
    row(
        "… CPU time per message: Spark, nsqd, publisher",
        "spark-archive",
        *(f"CPU per message, {part}" for part in ("Spark", "nsqd", "publisher")),
    ),
]

RATES = [
    row("published in MPUBs of 200", "broker", "publish"),
    row("consumed, RDY 2500", "broker", "consume"),
    row("both at once", "broker", "both"),
    row("every message to 8 channels, per channel", "broker", "fanout8, live"),
    row("published one at a time, 16 connections", "broker", "single_pub"),
    row("`POST /pub`, 16 connections", "http", "/pub"),
]

MEMORY = [
    row("nsqd, 1 million messages waiting on disk", "broker", MILLION),
    row("nsqd, 5 million messages waiting on disk", "broker", FIVE_MILLION),
    row("nsqd, 10,000 idle topics with a channel each", "broker", "memory, 10,000 idle"),
    row("nsqlookupd, 1,000 nsqds with the same 100 topics", "lookupd", "memory, peak"),
    row("nsqlookupd, 100,000 topics", "lookupd", "100,000 topics: memory, peak"),
]


@cache
def results(run: str) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((RESULTS / f"{run}.json").read_text(encoding="utf-8"))
    return whole


def shown(unit: str, values: list[float]) -> str:
    """The median, rounded to what repeats: three digits."""
    value = statistics.median(values)
    if unit in ("msg/s", "rows/s", "req/s"):
        return f"{value / 1000:,.0f} k/s"
    if unit == "%":
        return f"{value:.4g} %"
    unit = "µs" if unit == "us" else unit
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:,.{digits}f} {unit}"


def joined(texts: Iterable[str]) -> str:
    """Values with the same unit name it once."""
    parts = [text.rpartition(" ") for text in texts]
    if len({unit for _, _, unit in parts}) == 1:
        return ", ".join(value for value, _, _ in parts) + f" {parts[0][2]}"
    return ", ".join(f"{value} {unit}" for value, _, unit in parts)


def cell(line: Row, side: str) -> str:
    figures = [results(line.run)["figures"][name] for name in line.names]
    return joined(shown(one["unit"], one[side]) for one in figures) if figures[0][side] else ""


def ratio(line: Row) -> str:
    figures = [results(line.run)["figures"][name] for name in line.names]
    if not line.ratio or not figures[0]["peer"]:
        return ""
    values = [statistics.median(one["ours"]) / statistics.median(one["peer"]) for one in figures]
    return ", ".join(f"{value:.{0 if value >= 9.95 else 1 if value >= 1 else 2}f}" for value in values) + " ×"


MARKS = ("", " ¹", " ²", " ³", " ⁴")


def table(head: tuple[str, ...], lines: list[Row], cells: Callable[[Row], tuple[str, ...]]) -> str:
    """A table, and under it where its figures come from: rows of a second run have a mark."""
    order = [*dict.fromkeys(line.run for line in lines)]
    out = [f"| | {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}---|\n"]
    for line in lines:
        mark = MARKS[order.index(line.run)]
        out.append(f"| {line.text}{mark} | {' | '.join(cells(line))} |\n")
    sources = [f"{MARKS[number].strip()} {source(run)}".strip() for number, run in enumerate(order)]
    return "".join(out) + "\n" + "<br>\n".join(sources) + "\n"


def source(run: str) -> str:
    about = results(run)["machine"]
    cpu = about["cpu"].replace(" x ", " cores of ").replace("(R)", "").replace(" Processor", "")
    return f"{about['date']}, revision {about['revision']}, {cpu}, Python {about['python']}"


def compared(lines: list[Row], other: str = "NSQ") -> str:
    return table(
        ("nsparq", other, "ratio"),
        lines,
        lambda line: (cell(line, "ours"), cell(line, "peer"), ratio(line)),
    )


def alone(lines: list[Row]) -> str:
    return table(("nsparq", "command"), lines, lambda line: (cell(line, "ours"), command(line)))


def command(line: Row) -> str:
    """How to repeat it: the command of the run, without its flags."""
    return f"`{results(line.run)['machine']['command'].partition(' --')[0]}`"


def runs() -> str:
    """Command and origin of every run."""
    out = ["| command | date | revision | note |\n|---|---|---|---|\n"]
    for path in sorted(RESULTS.glob("*.json")):
        about = results(path.stem)["machine"]
        out.append(f"| `{about['command']}` | {about['date']} | `{about['revision']}` | {about['note']} |\n")
    return "".join(out)


PARTS: dict[str, Callable[[], str]] = {
    "summary": lambda: compared(SUMMARY),
    "broker": lambda: compared(BROKER),
    "transport": lambda: compared(TRANSPORT),
    "lookupd": lambda: compared(LOOKUPD),
    "spark": lambda: alone(SPARK),
    "rates": lambda: alone(RATES),
    "memory": lambda: alone(MEMORY),
    "runs": runs,
}


def filled(text: str) -> str:
    """A page with its marked places up to date."""
    return PLACE.sub(lambda place: f"{place[1]}{PARTS[place[2]]()}{place[4]}", text)


def without_figures(text: str) -> str:
    """What people wrote on a page."""
    return PLACE.sub("", text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def stale() -> list[Path]:
    return [page for page in pages() if filled(text := page.read_text(encoding="utf-8")) != text]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is stale")
    options = parser.parse_args(arguments)
    found = stale()
    for page in found:
        print(page.relative_to(ROOT), "is out of date" if options.check else "written")
        if not options.check:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if options.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
