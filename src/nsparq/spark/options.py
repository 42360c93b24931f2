"""Every option of `format("nsq")`, in one table: name, type, default, help, and where it applies.

A field of NsqOptions is an option: `max_rows_per_trigger` is written `maxRowsPerTrigger`, in any case. The
same table reads what Spark passes, names the culprit when something is wrong, and prints the reference page:

    python -m nsparq.spark.options --markdown
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from math import inf
from typing import Any, Final

from nsparq.errors import NsparqError
from nsparq.spark.option_kinds import (
    ADDRESSES,
    BOOL,
    COUNT,
    DIRECTORY,
    DURATION,
    FILE,
    NAME,
    NAMES,
    PATTERN,
    PATTERNS,
    PRODUCER,
    SEQUENCE,
    SIZE,
    TEXT,
    Kind,
    choice,
)

__all__ = [
    "COUNT",
    "DURATION",
    "LOG",
    "NAME",
    "QUEUE",
    "SINK",
    "SOURCE",
    "TABLE",
    "Kind",
    "NsqOptions",
    "OptionError",
    "SparkOption",
    "Use",
    "mode_of",
]

logger = logging.getLogger(__name__)


class OptionError(NsparqError, ValueError):
    """An option that cannot be; the text names it."""

    retry_helps = False


class Use(StrEnum):
    """What the options are read for."""

    LOG_STREAM = "log stream"
    LOG_BATCH = "log batch"
    QUEUE_STREAM = "queue stream"
    SINK_STREAM = "sink stream"
    SINK_BATCH = "sink batch"


LOG: Final = frozenset({Use.LOG_STREAM, Use.LOG_BATCH})
QUEUE: Final = frozenset({Use.QUEUE_STREAM})
SOURCE: Final = LOG | QUEUE
SINK: Final = frozenset({Use.SINK_STREAM, Use.SINK_BATCH})
EVERYWHERE: Final = SOURCE | SINK

OF_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname", "outputmode"})
"""What Spark itself puts among the options, or takes from them; lower case."""
_OF_SPARK_PREFIXES: Final = ("_", "spark.", "asyncprogresstracking")


# the table


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOption:
    """What is known about one field of NsqOptions."""

    name: str
    attribute: str
    kind: Kind[Any]
    default: Any
    help: str
    uses: frozenset[Use]
    heading: str
    default_text: str
    is_secret: bool

    @property
    def default_shown(self) -> str:
        if self.default_text:
            return self.default_text
        return f"`{self.kind.show(self.default)}`" if self.default not in (None, (), "") else ""


def opt(
    kind: Kind[Any],
    default: Any,
    help: str,
    uses: Iterable[Use] = EVERYWHERE,
    *,
    heading: str = "",
    default_text: str = "",
    is_secret: bool = False,
) -> Any:
    """A field of NsqOptions. `help` is a phrase that begins with a small letter and has no final full stop;
    `heading` opens a group of the reference page."""
    metadata = {
        "kind": kind,
        "help": help,
        "uses": frozenset(uses),
        "heading": heading,
        "default_text": default_text,
        "is_secret": is_secret,
    }
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqOptions:
    """What was asked for, read and checked. Plain values: it travels to the executors as it is."""

    mode: str = opt(
        choice("log", "queue"),
        "log",
        "how a source reads: `log` takes ranges of the topic's log, exactly once, and needs nsparq's nsqd; "
        "`queue` consumes a channel of any nsqd, NSQ's own included",
        SOURCE,
        heading="What to read, what to write",
    )
    topic: str | None = opt(
        NAME, None, "one topic; for a sink where rows go that have no column `topic` or none in it"
    )
    topics: tuple[str, ...] = opt(NAMES, (), "several topics, separated by commas", SOURCE)
    topics_pattern: re.Pattern[str] | None = opt(
        PATTERN,
        None,
        "topics whose whole name matches this; new ones are taken up while the query runs",
        SOURCE,
    )
    refuse_topics: re.Pattern[str] | None = opt(
        PATTERN,
        None,
        "a row for a topic whose whole name matches this is an error. Name the topics that the query itself "
        "reads, so that it cannot feed itself; a pipeline does so",
        SINK,
    )
    channel: str | None = opt(
        NAME,
        None,
        "the query's channel: its depth is the query's lag, and nsqd keeps what the query has yet to read. "
        "A stream needs one; a batch only with `startingPosition` `channel`",
        SOURCE,
    )

    own_channel: bool = opt(
        BOOL,
        True,
        "make the channel the query's own: nsqd then refuses any other query that uses it. `false` is for a "
        "query without a lasting checkpoint, which would leave its channel behind to nobody",
        {Use.LOG_STREAM},
    )

    columns: str = opt(
        TEXT,
        "",
        "the columns that rows have, separated by commas. Spark does not tell a source which ones a query "
        "uses: those that are not named here are not made",
        SOURCE,
        default_text="all",
    )
    push_filters: bool = opt(
        BOOL,
        False,
        "let Spark's filters on `topic`, `node`, `offset` and `timestamp` decide what is read. **Only for a "
        "DataFrame that is used once**: Spark would read the same part for the next query too. Needs Spark's "
        "setting `spark.sql.python.filterPushdown.enabled`",
        {Use.LOG_BATCH},
    )

    nsqlookupd: tuple[str, ...] = opt(
        ADDRESSES,
        (),
        "HTTP addresses of nsqlookupd, separated by commas; they are asked for the nsqd that have the topics",
        heading="Where",
    )
    nsqd: tuple[str, ...] = opt(
        ADDRESSES, (), "HTTP addresses of nsqd, separated by commas: instead of `nsqlookupd`, or besides"
    )
    discovery_interval: float = opt(
        DURATION, 5.0, "how often nsqlookupd is asked again, and new topics are looked for", SOURCE
    )

    starting_position: str = opt(
        TEXT,
        "earliest",
        "where a batch, or a stream without a checkpoint, begins: `earliest`, `latest`, `channel` (where the "
        "channel is), a time (RFC 3339, or Unix seconds), or JSON as it stands in a checkpoint. Nodes and "
        "topics that a stream finds later begin at their earliest message",
        LOG,
        heading="From where to where",
    )
    ending_position: str = opt(
        TEXT,
        "latest",
        "where a batch ends, itself not included: `latest`, a time, or JSON",
        {Use.LOG_BATCH},
    )
    fail_on_data_loss: bool = opt(
        BOOL,
        True,
        "fail when messages that should be read are gone: removed by retention, lost to damage, or with a "
        "topic that was deleted; `false` logs how many, and goes on",
        LOG,
    )

    max_rows_per_trigger: int | None = opt(
        COUNT,
        None,
        "at most so many rows in a micro-batch",
        {Use.LOG_STREAM, *QUEUE},
        heading="How much at a time",
    )
    max_bytes_per_trigger: int | None = opt(
        SIZE, None, "at most about so many bytes in a micro-batch", {Use.LOG_STREAM, *QUEUE}
    )
    min_rows_per_trigger: int | None = opt(
        COUNT,
        None,
        "a micro-batch waits until there are so many rows for it, but no longer than `maxTriggerDelay`. The "
        "first one of a run does not wait, nor do those of the triggers `availableNow` and `once`",
        {Use.LOG_STREAM, *QUEUE},
    )
    max_trigger_delay: float = opt(
        DURATION,
        900.0,
        "with `minRowsPerTrigger`: after this time since the last micro-batch began, the next one takes "
        "what there is",
        {Use.LOG_STREAM, *QUEUE},
    )
    partition_bytes: int = opt(
        SIZE,
        64 << 20,
        "about how many bytes a task reads at the most; a batch of less than four times that is four tasks, "
        "of 8m or more each",
        LOG,
    )

    auth_token: str | None = opt(
        TEXT,
        None,
        "secret shown to nsqd and nsqlookupd, as a bearer token (and with AUTH in queue mode)",
        heading="Who we are, whom we trust",
        is_secret=True,
    )
    auth_token_for: tuple[str, ...] = opt(
        PATTERNS,
        ("*",),
        "which nsqd are shown it besides those of `nsqd`, separated by commas: hosts, `host:port`, networks "
        "such as `10.1.0.0/16`, patterns such as `*.nsq.example.com`; `*` is every nsqd that nsqlookupd "
        "names, and anybody who reaches nsqlookupd can register one there",
    )
    tls_ca_file: str | None = opt(
        FILE,
        None,
        "certificates that nsqd and nsqlookupd are checked against; `https://` addresses",
        default_text="what the system trusts",
    )
    tls_cert_file: str | None = opt(FILE, None, "our own certificate, if nsqd asks for one")
    tls_key_file: str | None = opt(FILE, None, "the key to it", default_text="in `tlsCertFile`")
    tls_verify: bool = opt(BOOL, True, "check certificates; `false` only for a test")
    request_timeout: float = opt(
        DURATION, 10.0, "how long nsqd may take for an answer", heading="When something is away"
    )
    retry_for: float = opt(
        DURATION, 120.0, "how long a task, or a batch, goes on trying to reach an nsqd before it fails"
    )

    delivery: str = opt(
        choice("auto", "exactly-once", "at-least-once"),
        "auto",
        "what is promised: `exactly-once` needs nsparq's nsqd, and fails with another; `auto` is "
        "exactly-once where all nsqd can do it, and otherwise at-least-once, which the log says",
        SINK,
        heading="The sink",
    )
    chunk_bytes: int = opt(
        SIZE,
        256 << 10,
        "about how many bytes one request publishes; less than nsqd's `--max-body-size`",
        SINK,
    )
    producer: str | None = opt(
        PRODUCER,
        None,
        "whose transactions these are: by default the query's, or those of a single job. One that was used "
        "before goes on where it was; a batch needs `sequence` too",
        SINK,
    )
    sequence: int | None = opt(
        SEQUENCE,
        None,
        "which transaction of `producer` a batch is: one that was committed before is not published again. "
        "For `foreachBatch`, whose batch number it is",
        {Use.SINK_BATCH},
    )
    fingerprint: str | None = opt(
        PRODUCER,
        None,
        "what the batch consists of, as a short text: the last transaction of `producer` repeated with "
        "another fingerprint is an error, and not passed over",
        {Use.SINK_BATCH},
    )

    staging: str | None = opt(
        DIRECTORY,
        None,
        "where messages are kept from the moment they are finished until the sink has them: a directory of "
        "this query's own, best in its checkpoint's, as durable as that, and one that all executors share. A "
        "pipeline brings one along; otherwise it must be given",
        QUEUE,
        heading="Queue mode",
    )
    connections_per_node: int = opt(
        COUNT,
        1,
        "how many tasks take from one nsqd at a time, when there is enough for them; each may have nsqd's "
        "`--max-rdy-count` messages in flight",
        QUEUE,
    )
    batch_duration: float = opt(
        DURATION,
        5.0,
        "a micro-batch takes what was there when it began, and ends at the latest after this time",
        QUEUE,
    )
    poll_interval: float = opt(
        DURATION,
        0.2,
        "how often each nsqd is asked whether there is anything, when there has been nothing for a while",
        QUEUE,
    )
    message_timeout: float = opt(
        DURATION,
        10.0,
        "when nsqd gives a message to somebody else that was neither finished nor requeued. The least that "
        "a crash delays messages by; it must be longer than writing a few thousand messages takes",
        QUEUE,
    )
    dedupe: bool = opt(
        BOOL,
        True,
        "drop messages that come again though they are staged, since a crash swallowed their FIN",
        QUEUE,
    )
    tls: bool = opt(BOOL, False, "TLS for NSQ's own protocol; see the other options about TLS", QUEUE)
    snappy: bool = opt(BOOL, False, "compress NSQ's own protocol", QUEUE)

    @classmethod
    def parse(cls, given: Mapping[str, str], use: Use) -> NsqOptions:
        """Read what Spark passes. Raises OptionError, which names the option.

        An option that nobody has is an error, since a misspelt `failOnDataLoss` must not pass in silence; one
        that does not apply here is mentioned in the log, so that the same set may serve to read and to write.
        """
        values: dict[str, Any] = {}
        for name, text in given.items():
            key = name.lower()
            option = TABLE.get(key)
            if option is None:
                if key in OF_SPARK or key.startswith(_OF_SPARK_PREFIXES):
                    continue
                raise OptionError(_unknown(name))
            if text is None or (not str(text).strip() and option.kind is not TEXT):
                continue
            if use not in option.uses:
                logger.warning("option %s means nothing for a %s", option.name, use)
                continue
            try:
                values[option.attribute] = option.kind.parse(str(text).strip())
            except ValueError as error:
                shown = "" if option.is_secret else f", not {str(text)[:100]!r}"
                raise OptionError(f"option {option.name} {error}{shown}") from None
        parsed = cls(**values)
        parsed._check(use)
        return parsed

    def _check(self, use: Use) -> None:
        if not self.nsqd and not self.nsqlookupd:
            raise OptionError(
                "option nsqlookupd (or nsqd) is missing: the HTTP addresses of nsqlookupd, or of nsqd"
            )
        if self.tls_key_file and not self.tls_cert_file:
            raise OptionError("option tlsKeyFile needs tlsCertFile")
        if use in SOURCE:
            self._check_source(use)
        if self.topic and self.refuse_topics and self.refuse_topics.fullmatch(self.topic):
            raise OptionError(f"option topic is one that refuseTopics refuses: {self.topic}")
        if use is Use.SINK_BATCH and (self.producer is None) != (self.sequence is None):
            missing = "producer" if self.producer is None else "sequence"
            raise OptionError(
                f"option {missing} is missing: a batch has both producer and sequence, or neither"
            )

    def _check_source(self, use: Use) -> None:
        ways = [
            name
            for name, value in (
                ("topic", self.topic),
                ("topics", self.topics),
                ("topicsPattern", self.topics_pattern),
            )
            if value
        ]
        if len(ways) != 1:
            said = "is missing" if not ways else f"cannot be together with {ways[1]}"
            raise OptionError(
                f"option {ways[0] if ways else 'topic'} {said}: name one of topic, topics, topicsPattern"
            )
        if self.channel is None and use in (Use.LOG_STREAM, *QUEUE):
            raise OptionError(
                "option channel is missing: a stream has a channel of its own, whose depth is its lag and "
                "for whose sake nsqd keeps what it has yet to read"
            )
        if self.staging is None and use in QUEUE:
            raise OptionError(
                "option staging is missing: in queue mode messages are kept there from the moment they are "
                "finished until the sink has them. Name a directory of this query's own, best in its "
                "checkpoint's"
            )
        if use in QUEUE and (self.channel or "").endswith("#ephemeral"):
            raise OptionError(
                "option channel cannot be ephemeral in queue mode: nsqd would drop it, with its messages, "
                "after each micro-batch"
            )
        if (self.min_rows_per_trigger or 0) > (self.max_rows_per_trigger or inf):
            raise OptionError("option minRowsPerTrigger is more than maxRowsPerTrigger allows")
        if not 1 <= self.message_timeout <= 900:
            raise OptionError("option messageTimeout must be from 1s to 15m")
        if not self.batch_duration:
            raise OptionError("option batchDuration must be more than nothing")

    @property
    def wanted_topics(self) -> tuple[str, ...]:
        """Those named one by one."""
        return (self.topic,) if self.topic else self.topics

    def topic_filter(self) -> Callable[[str], object]:
        """Tells whether a topic is one of those to be read."""
        pattern = self.topics_pattern
        return frozenset(self.wanted_topics).__contains__ if pattern is None else pattern.fullmatch


def mode_of(given: Mapping[str, str]) -> str:
    """The one option that decides who reads the others."""
    option = TABLE["mode"]
    text = next((text for name, text in given.items() if name.lower() == "mode"), "log")
    try:
        return str(option.kind.parse(text.strip()))
    except ValueError as error:
        raise OptionError(f"option mode {error}, not {text[:100]!r}") from None


def _camel(attribute: str) -> str:
    first, *rest = attribute.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _table() -> dict[str, SparkOption]:
    heading = ""
    found = {}
    for one in fields(NsqOptions):
        metadata = dict(one.metadata)
        heading = metadata.pop("heading") or heading
        assert one.default is not MISSING
        option = SparkOption(
            name=_camel(one.name), attribute=one.name, default=one.default, heading=heading, **metadata
        )
        found[option.name.lower()] = option
    return found


TABLE: Final = _table()
"""By lower-case name."""


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), TABLE, 1)
    hint = f": did you mean {TABLE[near[0]].name}?" if near else "; see the reference of options"
    return f"there is no option {name}{hint}"


# the reference page

_COLUMNS: Final = (
    ("stream", frozenset({Use.LOG_STREAM})),
    ("batch", frozenset({Use.LOG_BATCH})),
    ("queue", QUEUE),
    ("sink", SINK),
)


_INTRODUCTION: Final = """\
# Options of `format("nsq")`

Generated from `nsparq.spark.options`. Names may be written in any case; one that does not exist is an error.
Sizes may end in `k`, `m`, `g` (1024 each); a duration is `250ms`, `5s`, `1m`, or a number of milliseconds.

*stream* and *batch* are the source in log mode, *queue* is the source in queue mode, *sink* is writing, both
as a batch and as a stream.
""".splitlines()


def markdown() -> str:
    lines = [*_INTRODUCTION]
    heading = ""
    for option in TABLE.values():
        if option.heading != heading:
            heading = option.heading
            lines += [
                "",
                f"## {heading}",
                "",
                "| option | value | default | for | |",
                "| --- | --- | --- | --- | --- |",
            ]
        uses = [name for name, uses in _COLUMNS if uses & option.uses]
        where = "all" if len(uses) == len(_COLUMNS) else ", ".join(uses)
        text = option.help.replace("|", "\\|")
        lines.append(f"| `{option.name}` | {option.kind.name} | {option.default_shown} | {where} | {text} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    if arguments != ["--markdown"]:
        sys.stderr.write("usage: python -m nsparq.spark.options --markdown\n")
        return 2
    sys.stdout.write(markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
