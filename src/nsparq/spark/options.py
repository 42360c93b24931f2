"""Every option of `format("nsq")`, in one table: name, type, default, help, and where it applies.

Each field of NsqOptions is an option: `max_rows_per_trigger` is written `maxRowsPerTrigger`, in any
case. The table parses what Spark passes, names the option in every error, and prints the reference
page:

    python -m nsparq.spark.options --markdown
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from nsparq.errors import NsparqError
from nsparq.spark.option_fields import (
    ADDRESSES,
    BOOL,
    COUNT,
    DIRECTORY,
    DURATION,
    FILE,
    LOG,
    NAME,
    NAMES,
    PATTERN,
    PATTERNS,
    PRODUCER,
    QUEUE,
    SEQUENCE,
    SINK,
    SIZE,
    SOURCE,
    STORE,
    TEXT,
    Use,
    camel,
    choice,
    markdown,
    opt,
    refused,
    table_of,
)

__all__ = ["TABLE", "NsqOptions", "OptionError", "Use", "mode_of"]

logger = logging.getLogger(__name__)


class OptionError(NsparqError, ValueError):
    """An invalid or missing option. The text names it."""

    retry_helps = False


OF_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname", "outputmode"})
"""Options that Spark itself adds or uses, in lower case."""
_OF_SPARK_PREFIXES: Final = ("_", "spark.", "asyncprogresstracking")


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqOptions:
    """Parsed and checked options. Plain values, sent to the executors."""

    mode: str = opt(
        choice("log", "queue"),
        "log",
        "how a source reads: `log` reads ranges of the topic's log, exactly once, and needs nsparq's nsqd; "
        "`queue` consumes a channel of any nsqd, also NSQ's own",
        SOURCE,
        heading="What to read, what to write",
    )
    topic: str | None = opt(
        NAME, None, "one topic; for a sink, the topic of rows without a column `topic` or with null in it"
    )
    topics: tuple[str, ...] = opt(NAMES, (), "several topics, separated by commas", SOURCE)
    topics_pattern: re.Pattern[str] | None = opt(
        PATTERN,
        None,
        "topics whose whole name matches; a running stream also reads topics that are created later",
        SOURCE,
    )
    refuse_topics: re.Pattern[str] | None = opt(
        PATTERN,
        None,
        "a row for a topic whose whole name matches is an error. Name the topics that the query itself "
        "reads, so that it cannot feed itself; pipelines set this option",
        SINK,
    )
    channel: str | None = opt(
        NAME,
        None,
        "the query's channel: its depth is the query's lag, and nsqd keeps the messages after it. Required "
        "for a stream; a batch needs it only with `startingPosition` `channel`",
        SOURCE,
    )

    own_channel: bool = opt(
        BOOL,
        True,
        "make the query the owner of its channel: nsqd then refuses other queries that use the channel. Set "
        "`false` for a query without a lasting checkpoint: nobody could use its channel afterwards",
        {Use.LOG_STREAM},
    )

    columns: str = opt(
        TEXT,
        "",
        "the columns to read, separated by commas. Spark does not tell a source which columns a query uses; "
        "leaving some out saves the time to build them",
        SOURCE,
        default_text="all",
    )
    push_filters: bool = opt(
        BOOL,
        False,
        "use Spark's filters on `topic`, `node`, `offset` and `timestamp` to read less. **Only for a "
        "DataFrame that is used once**: Spark would apply the same filters to the next query on it. Requires "
        "Spark's setting `spark.sql.python.filterPushdown.enabled`",
        {Use.LOG_BATCH},
    )

    nsqlookupd: tuple[str, ...] = opt(
        ADDRESSES,
        (),
        "HTTP addresses of nsqlookupd, separated by commas; they name the nsqd that have the topics",
        heading="Where",
    )
    nsqd: tuple[str, ...] = opt(
        ADDRESSES, (), "HTTP addresses of nsqd, separated by commas; instead of `nsqlookupd`, or in addition"
    )
    archive: str | None = opt(
        STORE,
        None,
        "nsqd's `--archive`: tasks read what is archived from this store, and nsqd serves only the rest. "
        "Credentials come from the environment of the driver and the executors, as those of nsqd do",
        LOG,
    )
    discovery_interval: float = opt(DURATION, 5.0, "time between two searches for nodes and topics", SOURCE)

    starting_position: str = opt(
        TEXT,
        "earliest",
        "where a batch, or a stream without a checkpoint, begins: `earliest`, `latest`, `channel` (the "
        "channel's position), a time (RFC 3339 or Unix seconds), or JSON as in a checkpoint. Nodes and "
        "topics that a stream finds later begin at their earliest message",
        LOG,
        heading="From where to where",
    )
    ending_position: str = opt(
        TEXT, "latest", "where a batch ends, exclusive: `latest`, a time, or JSON", {Use.LOG_BATCH}
    )
    fail_on_data_loss: bool = opt(
        BOOL,
        True,
        "fail when unread messages are gone: removed by retention, damaged, or deleted with their topic; "
        "`false` logs how many, and continues",
        LOG,
    )

    max_rows_per_trigger: int | None = opt(
        COUNT,
        None,
        "limit on the rows of a micro-batch",
        {Use.LOG_STREAM, *QUEUE},
        heading="How much at a time",
    )
    max_bytes_per_trigger: int | None = opt(
        SIZE, None, "approximate limit on the bytes of a micro-batch", {Use.LOG_STREAM, *QUEUE}
    )
    min_rows_per_trigger: int | None = opt(
        COUNT,
        None,
        "a micro-batch waits for this many rows, up to `maxTriggerDelay`. The first one of a run does not "
        "wait, nor do those of the triggers `availableNow` and `once`",
        {Use.LOG_STREAM, *QUEUE},
    )
    max_trigger_delay: float = opt(
        DURATION,
        900.0,
        "with `minRowsPerTrigger`: the longest time between the starts of two micro-batches, if there are "
        "rows at all",
        {Use.LOG_STREAM, *QUEUE},
    )
    trigger_interval: float = opt(
        DURATION,
        0.0,
        "least time between the starts of two micro-batches, unless a limit has cut the first one short. Use "
        "it instead of the interval of Spark's trigger, which would make a backlog wait after each batch: "
        '`trigger(processingTime="0 seconds")`. Pipelines do',
        {Use.LOG_STREAM},
    )
    partition_bytes: int = opt(
        SIZE,
        64 << 20,
        "approximate limit on the bytes that a task reads; a batch of less than four times as much has four "
        "tasks of at least 8m each",
        LOG,
    )

    auth_token: str | None = opt(
        TEXT,
        None,
        "secret for nsqd and nsqlookupd, sent as a bearer token (in queue mode also with AUTH)",
        heading="Authentication and TLS",
        is_secret=True,
    )
    auth_token_for: tuple[str, ...] = opt(
        PATTERNS,
        ("*",),
        "which nsqd get the secret besides those of `nsqd`, separated by commas: hosts, `host:port`, "
        "networks such as `10.1.0.0/16`, patterns such as `*.nsq.example.com`; `*` is every nsqd that "
        "nsqlookupd names, and anybody who reaches nsqlookupd can register one there",
    )
    tls_ca_file: str | None = opt(
        FILE,
        None,
        "CA certificates for nsqd and nsqlookupd with `https://` addresses",
        default_text="the system's",
    )
    tls_cert_file: str | None = opt(FILE, None, "client certificate, if nsqd requires one")
    tls_key_file: str | None = opt(
        FILE, None, "key of the client certificate", default_text="in `tlsCertFile`"
    )
    tls_verify: bool = opt(BOOL, True, "verify certificates; `false` only for tests")
    request_timeout: float = opt(
        DURATION, 10.0, "time limit for an answer of nsqd or nsqlookupd", heading="Timeouts and retries"
    )
    retry_for: float = opt(
        DURATION, 120.0, "how long a task or a batch tries to reach an nsqd before it fails"
    )

    delivery: str = opt(
        choice("auto", "exactly-once", "at-least-once"),
        "auto",
        "delivery guarantee: `exactly-once` requires nsparq's nsqd and fails with another; `auto` is "
        "exactly-once if all nsqd support it, and otherwise at-least-once, with a warning in the log",
        SINK,
        heading="The sink",
    )
    chunk_bytes: int = opt(
        SIZE,
        256 << 10,
        "approximate bytes per publishing request; less than nsqd's `--max-body-size`",
        SINK,
    )
    producer: str | None = opt(
        PRODUCER,
        None,
        "name of the producer whose transactions these are: by default the query, or the single batch job. A "
        "name that was used before continues its transactions; a batch also needs `sequence`",
        SINK,
    )
    sequence: int | None = opt(
        SEQUENCE,
        None,
        "number of the batch among the transactions of `producer`: a batch that was committed before is not "
        "published again. In `foreachBatch`, pass the batch id",
        {Use.SINK_BATCH},
    )
    fingerprint: str | None = opt(
        PRODUCER,
        None,
        "short text that identifies the content of the batch: if the last transaction of `producer` is "
        "repeated with another fingerprint, the write fails instead of being skipped",
        {Use.SINK_BATCH},
    )

    staging: str | None = opt(
        DIRECTORY,
        None,
        "directory for messages that are finished in nsqd and not yet in the sink. Each query needs its own, "
        "best inside its checkpoint directory: as durable as that, and shared by all executors. Pipelines "
        "set it; otherwise it is required",
        QUEUE,
        heading="Queue mode",
    )
    connections_per_node: int = opt(
        COUNT,
        1,
        "limit on tasks that take from one nsqd at the same time; each may have nsqd's `--max-rdy-count` "
        "messages in flight",
        QUEUE,
    )
    batch_duration: float = opt(
        DURATION,
        5.0,
        "time limit for taking messages: a micro-batch takes the messages that waited when it began",
        QUEUE,
    )
    poll_interval: float = opt(
        DURATION, 0.2, "longest pause between two polls of an nsqd that has no messages", QUEUE
    )
    message_timeout: float = opt(
        DURATION,
        10.0,
        "time after which nsqd requeues a message that was not finished. A crash delays messages by at least "
        "this time; it must be longer than writing a few thousand messages takes",
        QUEUE,
    )
    dedupe: bool = opt(
        BOOL,
        True,
        "drop messages that nsqd delivers again after a crash, although they are staged",
        QUEUE,
    )
    tls: bool = opt(BOOL, False, "TLS for NSQ's TCP protocol; uses the other TLS options", QUEUE)
    snappy: bool = opt(BOOL, False, "snappy compression for NSQ's TCP protocol", QUEUE)

    @classmethod
    def parse(cls, given: Mapping[str, str], use: Use) -> NsqOptions:
        """Parse what Spark passes. Raises OptionError.

        An unknown option is an error, so that a misspelt `failOnDataLoss` is noticed. An option
        that does not apply here is only logged, so that the same options can serve for reading and
        writing.
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
                logger.warning("option %s has no effect on a %s", option.name, use)
                continue
            try:
                values[option.attribute] = option.kind.parse(str(text).strip())
            except ValueError as error:
                raise OptionError(f"option {option.name} {error}{refused(option, str(text))}") from None
        parsed = cls(**values)
        parsed._check(use)
        return parsed

    def _check(self, use: Use) -> None:
        if not self.nsqd and not self.nsqlookupd:
            raise OptionError(
                "option nsqlookupd (or nsqd) is missing: give the HTTP addresses of nsqlookupd or of nsqd"
            )
        if self.tls_key_file and not self.tls_cert_file:
            raise OptionError("option tlsKeyFile needs tlsCertFile")
        if use in SOURCE:
            self._check_source(use)
        if self.topic and self.refuse_topics and self.refuse_topics.fullmatch(self.topic):
            raise OptionError(f"option topic names a topic that refuseTopics refuses: {self.topic}")
        if use is Use.SINK_BATCH and (self.producer is None) != (self.sequence is None):
            missing = "producer" if self.producer is None else "sequence"
            raise OptionError(
                f"option {missing} is missing: a batch needs both producer and sequence, or neither"
            )

    def _check_source(self, use: Use) -> None:
        given = [name for name in ("topic", "topics", "topics_pattern") if getattr(self, name)]
        if len(given) != 1:
            problem = "is missing" if not given else f"cannot be combined with {camel(given[1])}"
            raise OptionError(
                f"option {given[0] if given else 'topic'} {problem}: use one of topic, topics, topicsPattern"
            )
        if self.channel is None and use in (Use.LOG_STREAM, *QUEUE):
            raise OptionError(
                "option channel is missing: a stream needs a channel of its own. Its depth is the stream's "
                "lag, and nsqd keeps the messages after it"
            )
        if self.staging is None and use in QUEUE:
            raise OptionError(
                "option staging is missing: queue mode stores messages there from when it finishes them "
                "until the sink has them. Name a directory for this query alone, best inside its checkpoint "
                "directory"
            )
        if use in QUEUE and "://" in (self.staging or ""):
            raise OptionError("option staging must be a directory that executors share, not an object store")
        if use in QUEUE and (self.channel or "").endswith("#ephemeral"):
            raise OptionError(
                "option channel cannot be ephemeral in queue mode: nsqd would delete it with its messages "
                "after each micro-batch"
            )
        if (self.min_rows_per_trigger or 0) > (self.max_rows_per_trigger or inf):
            raise OptionError("option minRowsPerTrigger is larger than maxRowsPerTrigger")
        if not 1 <= self.message_timeout <= 900:
            raise OptionError("option messageTimeout must be from 1s to 15m")
        if not self.batch_duration:
            raise OptionError("option batchDuration must be more than 0")

    @property
    def wanted_topics(self) -> tuple[str, ...]:
        return (self.topic,) if self.topic else self.topics

    def topic_filter(self) -> Callable[[str], object]:
        """A function that returns something true for a topic to be read."""
        pattern = self.topics_pattern
        return frozenset(self.wanted_topics).__contains__ if pattern is None else pattern.fullmatch


def mode_of(given: Mapping[str, str]) -> str:
    """The value of option mode, which decides how the other options are parsed."""
    option = TABLE["mode"]
    text = next((text for name, text in given.items() if name.lower() == "mode"), "log")
    try:
        return str(option.kind.parse(text.strip()))
    except ValueError as error:
        raise OptionError(f"option mode {error}, not {text[:100]!r}") from None


TABLE: Final = table_of(NsqOptions)
"""By lower-case name."""


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), TABLE, 1)
    hint = f": did you mean {TABLE[near[0]].name}?" if near else "; see the reference of options"
    return f"there is no option {name}{hint}"


def main(arguments: list[str]) -> int:
    if arguments != ["--markdown"]:
        sys.stderr.write("usage: python -m nsparq.spark.options --markdown\n")
        return 2
    sys.stdout.write(markdown(TABLE.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
