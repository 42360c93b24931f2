"""The format of log lines, which test suites of client libraries parse."""

from __future__ import annotations

import logging
import re

import pytest

from nsparq import logs

SHAPE = re.compile(r"\[x\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} ([A-Z]+): (.*)")


pytestmark = pytest.mark.usefixtures("root_logger_restored")


def logged(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    lines = capsys.readouterr().err.splitlines()
    found = [SHAPE.fullmatch(line) for line in lines]
    assert all(found), lines
    return [(match[1], match[2]) for match in found if match]


def test_every_level_is_printed_with_its_nsq_name(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "[x] ")
    logger = logging.getLogger("nsparq.test")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger.log(level, "value %d", level)
    assert logged(capsys) == [
        ("DEBUG", "value 10"),
        ("INFO", "value 20"),
        ("WARNING", "value 30"),
        ("ERROR", "value 40"),
        ("FATAL", "value 50"),
    ]


@pytest.mark.parametrize(
    ("level", "printed"),
    [("debug", 5), ("info", 4), ("warn", 3), ("error", 2), ("fatal", 1)],
)
def test_less_severe_levels_are_left_out(
    level: str, printed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(level, "[x] ")
    for name in ("debug", "info", "warning", "error", "critical"):
        getattr(logging.getLogger("nsparq.test"), name)("text")
    assert len(logged(capsys)) == printed


def test_text_with_line_breaks_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "[x] ")
    logging.getLogger("nsparq.test").info("from a client: %s", "a\r\nb")
    assert logged(capsys) == [("INFO", r"from a client: a\r\nb")]


def test_a_traceback_follows_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "[x] ")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("nsparq.test").exception("failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert SHAPE.fullmatch(first)
    assert rest[0].startswith("Traceback") and rest[-1] == "RuntimeError: broken"


def test_configuring_again_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "[old] ")
    logs.configure("info", "[x] ")
    logging.getLogger("nsparq.test").info("once")
    assert logged(capsys) == [("INFO", "once")]
