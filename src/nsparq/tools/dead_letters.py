"""`nsparq dead-letters`: shows dead letters, and puts them back into the channels they came from.

It first asks every nsqd which letters match, and shows that. It puts them back after a yes.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nsparq.dead_letter_groups import STATES_IN_WORDS, Groups, merge_groups
from nsparq.option_table import BOOL, FLOAT, INT, STRING, OptionError, choice, opt
from nsparq.tools.cluster import AskFailed
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.manage import can_ask, confirmed
from nsparq.tools.output import Column, amount, moment, print_json, print_rows
from nsparq.tools.source import Answers, Source, SourceFlags
from nsparq.tools.times import TIME_HELP, parse_time

__all__ = ["DEAD_LETTERS", "dead_letters"]

LIST, REDRIVE, CANCEL = "list", "redrive", "cancel"
POLL_S: Final = 0.5
BAR: Final = 30
"""Characters of the progress bar."""
MAX_BODY: Final = 200
"""Characters shown of an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFlags(SourceFlags):
    action: str = opt("", "`list`, `redrive` or `cancel`", choice(LIST, REDRIVE, CANCEL, empty=""))
    topic: str = opt("", "the topic of the dead letters, such as orders.dead", STRING)
    origin_topic: str = opt("", "only letters of this topic", STRING, heading="Which letters")
    channel: str = opt("", "only letters of this channel", STRING)
    reason: str = opt("", "only letters with this reason, such as `timed out`", STRING)
    since: str = opt("", f"only letters given up since then: {TIME_HELP}", STRING)
    until: str = opt("", "only letters given up before then", STRING)
    text: str = opt("", "only messages that contain this text", STRING)
    field: str = opt("", "only JSON messages with a value at this JSON pointer, such as /customer/id", STRING)
    value: str = opt("", "only if that value equals this one", STRING)
    examples: int = opt(1, "messages to show of each group", INT, bound="positive", heading="How")
    rate: float = opt(0.0, "messages per second to put back on each nsqd; 0 for no limit", FLOAT)
    dry_run: bool = opt(False, "only show what would happen", BOOL)
    yes: bool = opt(False, "put the messages back without asking", BOOL)

    def validate(self) -> None:
        SourceFlags.validate(self)
        if self.dry_run and self.yes:
            raise OptionError("use --dry-run or --yes, not both")
        if self.rate < 0:
            raise OptionError("--rate must not be negative")
        self.filter()

    def filter(self) -> dict[str, str]:
        """The query that chooses letters. Raises OptionError."""
        names = ("origin_topic", "channel", "reason", "text", "field", "value")
        found = {name: value for name in names if (value := getattr(self, name))}
        for name in ("since", "until"):
            try:
                found |= {name: f"{parse_time(text):.6f}"} if (text := getattr(self, name)) else {}
            except ValueError as error:
                raise OptionError(f"--{name}: {error}") from None
        return found


DEAD_LETTERS: Final = CommandTable(
    "dead-letters",
    DeadLetterFlags,
    words=("action", "topic"),
    required=2,
    about="""
Shows the dead letters that nsqd wrote, by channel and reason, and puts them back: each goes to the
channel that it came from, not to the topic's other channels. A letter is put back at most once.

`redrive` shows the effect and asks for confirmation. Without a terminal it only shows the effect;
--yes puts the messages back. The nsqds do the work: Ctrl-C ends this command, `cancel` ends the
redrive.
""",
    examples=(
        "nsparq dead-letters list orders.dead",
        'nsparq dead-letters redrive orders.dead --channel=billing --reason="timed out" --rate=100',
        "nsparq dead-letters redrive orders.dead --field=/customer/id --value=42 --yes",
        "nsparq dead-letters cancel orders.dead",
    ),
)
GROUPS: Final = (
    Column("topic", "TOPIC", left=True),
    Column("channel", "CHANNEL", left=True),
    Column("reason", "REASON", left=True),
    Column("ready", "CAN GO BACK", amount),
    Column("redriven", "PUT BACK", amount),
    Column("others", "OTHERS", amount),
    Column("last", "LAST", moment),
)
RESULTS: Final = (
    Column("node", "NODE", left=True),
    Column("state", "STATE", left=True),
    Column("redriven", "PUT BACK", amount),
    Column("skipped", "NOT PUT BACK", lambda skipped: states_in_words(skipped) or "0"),
)


def states_in_words(states: Mapping[str, int]) -> str:
    """Why letters cannot be put back."""
    return ", ".join(
        f"{amount(count)} {STATES_IN_WORDS.get(state, state)}" for state, count in states.items()
    )


def _scan(source: Source, options: DeadLetterFlags, address: str) -> dict[str, Any]:
    """All groups of one nsqd. It may take several requests."""
    query = {"topic": options.topic, "examples": str(options.examples), **options.filter()}
    found: dict[str, Any] = {"letters": 0, "foreign": 0, "groups": {}}
    start: int | None = 0
    while start is not None:
        part = source.ask("GET", address, "/dead_letters", start=str(start), **query)
        begun, start = start, part.get("next")
        if start is not None and start <= begun:
            raise AskFailed(f"{address} is not an nsqd: /dead_letters begins again", 200)
        found["letters"] += part["letters"]
        found["foreign"] += part["foreign"]
        merge_groups(found["groups"], part["groups"], options.examples)
    return found


def _all_groups(answers: Answers[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The groups of all nsqds, with the counts for the table."""
    merged: Groups = {}
    for found in answers.done.values():
        merge_groups(merged, found["groups"].values(), most)
    for group in merged.values():
        states = group["states"]
        group["ready"], group["redriven"] = states["ready"], states["redriven"]
        group["others"] = states.total() - group["ready"] - group["redriven"]
    return [merged[key] for key in sorted(merged)]


def _show(options: DeadLetterFlags, answers: Answers[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    if not groups:
        print(f"No dead letters match in {options.topic}.")
    else:
        print_rows(groups, GROUPS)
    why: Counter[str] = Counter()
    for group in groups:
        why.update({state: n for state, n in group["states"].items() if state not in ("ready", "redriven")})
        for example in group["examples"]:
            body = example.get("body")
            body = f"base64 {example.get('body_base64')}" if body is None else body
            body = body if len(body) <= MAX_BODY else body[:MAX_BODY] + "…"
            print(f"  {group['topic']}:{group['channel']} {group['reason']}, {example['id']}: {body!r}")
    if why:
        print(f"Others: {states_in_words(why)}.")
    foreign = sum(found["foreign"] for found in answers.done.values())
    if foreign:
        print(f"{amount(foreign)} messages of {options.topic} are not dead letters of nsqd: they stay there.")


def _list(options: DeadLetterFlags) -> int:
    source = Source(options)
    answers = source.each_of(options.topic, partial(_scan, source, options))
    groups = _all_groups(answers, options.examples)
    if options.json:
        foreign = sum(found["foreign"] for found in answers.done.values())
        print_json({"groups": groups, "foreign": foreign, "unreachable": answers.unreachable()})
    else:
        _show(options, answers, groups)
    return answers.report("nsparq dead-letters")


def _redrive(options: DeadLetterFlags) -> int:
    source = Source(options)
    answers = source.each_of(options.topic, partial(_scan, source, options))
    groups = _all_groups(answers, options.examples)
    if not options.json:
        _show(options, answers, groups)
    ready = sum(group["ready"] for group in groups)
    rows: list[dict[str, Any]] = []
    is_wanted = ready > 0 and _is_wanted(options, ready)
    if is_wanted:
        query = {**options.filter(), "origin_topic": _origin(options, groups), "rate": str(options.rate)}

        def start(address: str) -> Mapping[str, Any]:
            return source.ask("POST", address, "/dead_letters/redrive", topic=options.topic, **query)

        nodes = [
            node
            for node, found in answers.done.items()
            if any(group["states"]["ready"] for group in found["groups"].values())
        ]
        started = source.each(nodes, start)
        answers.failed |= started.failed
        rows = _follow(source, options, [*started.done], answers)
    if options.json:
        print_json({"groups": groups, "nodes": rows, "unreachable": answers.unreachable()})
    elif is_wanted:
        print_rows(rows, RESULTS)
    else:
        hint = " Add --yes to put them back." if ready and not (options.dry_run or can_ask()) else ""
        print(f"Nothing was put back.{hint}")
    return answers.report("nsparq dead-letters")


def _is_wanted(options: DeadLetterFlags, ready: int) -> bool:
    if options.dry_run or not (options.yes or (can_ask() and not options.json)):
        return False
    return confirmed(f"Put {amount(ready)} message{'' if ready == 1 else 's'} back?", yes=options.yes)


def _origin(options: DeadLetterFlags, groups: list[dict[str, Any]]) -> str:
    """The topic whose letters go back: nsqd needs its name for the permission."""
    origins: list[str] = sorted({group["topic"] for group in groups if group["ready"]})
    if len(origins) > 1:
        raise AskFailed(
            f"the letters are of several topics: choose one with --origin-topic={' or '.join(origins)}"
        )
    return origins[0]


def _follow(
    source: Source, options: DeadLetterFlags, nodes: list[str], answers: Answers[Any]
) -> list[dict[str, Any]]:
    """Show the progress until all nsqds are done; the results."""
    is_shown = sys.stderr.isatty() and not options.json
    try:
        while True:
            found = source.each(nodes, partial(_progress, source, options.topic))
            if is_shown:
                sys.stderr.write(f"\r{progress_bar(found.done.values())}\033[K")
                sys.stderr.flush()
            if found.failed or all(one["state"] != "running" for one in found.done.values()):
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nThe redrive goes on. To end it: nsparq dead-letters cancel {options.topic}\n")
        raise
    if is_shown:
        sys.stderr.write("\n")
    answers.failed |= found.failed
    return [{"node": node, **one} for node, one in found.done.items()]


def _progress(source: Source, topic: str, address: str) -> Mapping[str, Any]:
    return source.ask("GET", address, "/dead_letters/redrive", topic=topic)


def progress_bar(redrives: Iterable[Mapping[str, Any]]) -> str:
    """How far the redrives of all nsqds have come."""
    redrives = [*redrives]
    whole = sum(one["end"] - one["start"] for one in redrives)
    done = sum(min(one["position"], one["end"]) - one["start"] for one in redrives)
    share = done / whole if whole else 1.0
    bar = "#" * int(share * BAR)
    waits = "; ".join(dict.fromkeys(one["waits_for"] for one in redrives if one["waits_for"]))
    put_back = amount(sum(one["redriven"] for one in redrives))
    return f"[{bar:.<{BAR}}] {share:4.0%}  {put_back} put back" + (f"  (waits: {waits})" if waits else "")


def _cancel(options: DeadLetterFlags) -> int:
    source = Source(options)

    def cancel(address: str) -> Mapping[str, Any]:
        try:
            return source.ask("POST", address, "/dead_letters/redrive/cancel", topic=options.topic)
        except AskFailed as error:
            if error.code == "REDRIVE_NOT_FOUND":
                return {"state": "none", "redriven": 0, "skipped": {}}
            raise

    answers = source.each_of(options.topic, cancel)
    rows = [{"node": node, **one} for node, one in answers.done.items()]
    if options.json:
        print_json({"nodes": rows, "unreachable": answers.unreachable()})
    else:
        print_rows(rows, RESULTS)
    return answers.report("nsparq dead-letters")


def _run(options: DeadLetterFlags) -> int:
    return {LIST: _list, REDRIVE: _redrive, CANCEL: _cancel}[options.action](options)


dead_letters = partial(run_command, DEAD_LETTERS, _run)
