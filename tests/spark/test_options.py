"""The options of format("nsq"): read, checked, explained; errors name the option."""

from __future__ import annotations

import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsparq.spark.option_fields import LOG, QUEUE, SINK
from nsparq.spark.options import TABLE, NsqOptions, OptionError, Use, mode_of
from tests.support.polling import DEADLINE

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "spark-options.md"
NEEDED = {"topic": "t", "nsqd": "127.0.0.1:4151", "channel": "c"}


def parse(use: Use = Use.LOG_STREAM, **given: Any) -> NsqOptions:
    return NsqOptions.parse(NEEDED | given, use)


def test_names_are_written_in_any_case() -> None:
    options = NsqOptions.parse(
        {"TOPIC": "t", "NSQD": "a:1", "channel": "c", "maxrowspertrigger": "5", "FAILONDATALOSS": "False"},
        Use.LOG_STREAM,
    )
    assert (options.topic, options.max_rows_per_trigger, options.fail_on_data_loss) == ("t", 5, False)


def test_an_option_that_is_not_given_has_its_default() -> None:
    options = parse()
    for option in TABLE.values():
        if option.name not in NEEDED:
            assert getattr(options, option.attribute) == option.default


def test_an_option_that_does_not_exist_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match="no option failOnDataLos: did you mean failOnDataLoss?"):
        parse(failOnDataLos="false")
    with pytest.raises(OptionError, match="there is no option sound; see"):
        parse(sound="loud")


def test_options_that_spark_adds_are_ignored() -> None:
    parse(Use.SINK_STREAM, path="/out", checkpointLocation="/c", queryName="q")
    parse(__internal="x", asyncProgressTrackingEnabled="true")


def test_an_option_without_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert parse(endingPosition="latest").ending_position == "latest"
    assert "option endingPosition has no effect on a log stream" in caplog.text


def test_min_rows_cannot_be_more_than_max_rows() -> None:
    with pytest.raises(OptionError, match="option minRowsPerTrigger is larger than maxRowsPerTrigger"):
        parse(minRowsPerTrigger="6", maxRowsPerTrigger="5")
    assert parse(minRowsPerTrigger="5", maxRowsPerTrigger="5").max_trigger_delay == 900


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("topic", "no good", "must be an NSQ name"),
        ("channel", "x" * 65, "must be an NSQ name"),
        ("topics", "a,b c", "must be an NSQ name"),
        ("nsqd", "nowhere", "must be host:port"),
        ("nsqlookupd", "ftp://a:1", "must be host:port"),
        ("nsqd", ",", "must name at least one"),
        ("topicsPattern", "(", "must be a regular expression"),
        ("mode", "stack", "must be one of log, queue"),
        ("maxRowsPerTrigger", "0", "must be a whole number"),
        ("maxRowsPerTrigger", "many", "must be a whole number"),
        ("maxBytesPerTrigger", "5 apples", "must be a size"),
        ("partitionBytes", "0", "must be a size"),
        ("maxBytesPerTrigger", "1048576t", "must be a size"),
        ("discoveryInterval", "-5s", "must be a duration"),
        ("retryFor", "soon", "must be a duration"),
        ("retryFor", "9" * 90, "must be a duration"),
        ("retryFor", "876001h", "must be a duration"),
        ("failOnDataLoss", "perhaps", "must be true or false"),
        ("tlsVerify", "1", "must be true or false"),
    ],
)
def test_an_invalid_value_is_an_error_that_names_the_option(name: str, value: str, reason: str) -> None:
    with pytest.raises(OptionError, match=rf"option {name} {reason}.*, not {re.escape(repr(value))}"):
        parse(**{name: value})


@pytest.mark.parametrize(
    "address",
    ["http://me:secret@host", "me:secret@host", "http://me:sec@re/t@host:0x1", "a:1,http://:secret@h"],
)
def test_the_password_in_an_invalid_address_is_not_shown(address: str) -> None:
    with pytest.raises(OptionError, match="must be host:port") as caught:
        parse(nsqd=address)
    assert "sec" not in str(caught.value) and "h" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("100", 100), ("1k", 1024), ("64m", 64 << 20), ("2GB", 2 << 30), ("1 MiB", 1 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse(partitionBytes=text).partition_bytes == size


@pytest.mark.parametrize(("text", "seconds"), [("250ms", 0.25), ("5s", 5.0), ("1m", 60.0), ("1500", 1.5)])
def test_durations(text: str, seconds: float) -> None:
    assert parse(retryFor=text).retry_for == seconds


def test_lists_may_have_spaces_and_repetitions() -> None:
    options = parse(topic=None, topics=" a, b ,a", nsqd="h:1, http://h:2 ,https://h:3")
    assert options.wanted_topics == ("a", "b")
    assert options.nsqd == ("h:1", "http://h:2", "https://h:3")


def test_what_a_source_needs() -> None:
    with pytest.raises(OptionError, match="option topic is missing"):
        parse(topic="")
    with pytest.raises(OptionError, match="option topic cannot be combined with topicsPattern"):
        parse(topicsPattern=".*")
    with pytest.raises(OptionError, match=r"option nsqlookupd \(or nsqd\) is missing"):
        parse(nsqd="")
    with pytest.raises(OptionError, match="option channel is missing"):
        parse(channel="")
    assert parse(Use.LOG_BATCH, channel="").channel is None
    with pytest.raises(OptionError, match="option tlsKeyFile needs tlsCertFile"):
        parse(tlsKeyFile="/key")


def test_a_secret_is_not_in_the_representation_of_the_options() -> None:
    from nsparq.spark.cluster.http_client import Access

    assert "hush" not in repr(Access.of(parse(authToken="hush")))
    assert "hush" not in repr(parse(authToken="hush"))


def test_options_can_be_pickled_for_the_executors() -> None:
    options = parse(topic=None, topicsPattern="a.*", partitionBytes="1m")
    assert pickle.loads(pickle.dumps(options)) == options


def test_the_mode_is_known_before_everything_else() -> None:
    assert mode_of({}) == "log"
    assert mode_of({"MODE": "Queue"}) == "queue"
    with pytest.raises(OptionError, match="option mode must be one of log, queue, not 'x'"):
        mode_of({"mode": "x"})


# the table and its page


def test_every_option_says_what_it_is_for() -> None:
    for option in TABLE.values():
        assert re.match(r"[a-z`A-Z]", option.help) and not option.help.endswith("."), option.name
        assert option.uses and option.uses <= LOG | QUEUE | SINK
        assert option.heading
        if option.default not in (None, (), ""):
            shown = option.kind.show(option.default)
            assert option.kind.parse(shown) == option.default, option.name


def test_the_checked_in_page_is_what_the_table_gives() -> None:
    command = [sys.executable, "-W", "error", "-m", "nsparq.spark.options"]
    result = subprocess.run([*command, "--markdown"], capture_output=True, text=True, timeout=DEADLINE)
    assert (result.returncode, result.stderr) == (0, "")
    assert REFERENCE.read_text(encoding="utf-8") == result.stdout, "stale: run `make docs`"
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert result.returncode != 0 and "usage: python -m nsparq.spark.options --markdown" in result.stderr
