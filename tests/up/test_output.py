"""What the children say, with their names in front."""

from __future__ import annotations

import io

from nsparq.up.output import Output


def lines(*said: tuple[str, str], level: str = "info", is_coloured: bool = False) -> list[str]:
    stream = io.StringIO()
    output = Output(level=level, stream=stream, is_coloured=is_coloured)
    for name, text in said:
        output.line(name, text)
    return stream.getvalue().splitlines()


def test_every_line_has_the_name_of_its_process() -> None:
    found = lines(("nsqd-1", "2026/11/15 12:00:00.000001 INFO: hello"), ("nsqlookupd", "x"))
    assert found == ["nsqd-1     | 2026/11/15 12:00:00.000001 INFO: hello", "nsqlookupd | x"]


def test_the_margin_is_as_wide_as_the_longest_name() -> None:
    stream = io.StringIO()
    output = Output(stream=stream)
    output.expect(["nsqd", "pipeline-shop"])
    output.line("nsqd", "x")
    assert stream.getvalue() == "nsqd          | x\n"


def test_log_lines_below_the_level_are_left_out_and_no_others() -> None:
    said = [
        ("nsqd", "2026/11/15 12:00:00.000001 DEBUG: a"),
        ("nsqd", "2026/11/15 12:00:00.000001 INFO: b"),
        ("nsqd", "2026/11/15 12:00:00.000001 WARNING: c"),
        ("nsqd", "Traceback (most recent call last):"),
        ("nsqd", "2026/11/15 12:00:00.000001 FATAL: d"),
    ]
    shown = lines(*said, level="warn")
    assert [line.rpartition(" ")[2] for line in shown] == ["c", "last):", "d"]
    assert len(lines(*said, level="debug")) == 5


def test_on_a_terminal_names_have_colours_and_errors_are_red() -> None:
    first, second, third = lines(
        ("nsqd-1", "hello"),
        ("nsqd-2", "2026/11/15 12:00:00.000001 ERROR: no"),
        ("nsqd-1", "again"),
        is_coloured=True,
    )
    assert first.startswith("\x1b[36mnsqd-1") and third.startswith("\x1b[36mnsqd-1")
    assert second.startswith("\x1b[32mnsqd-2") and "\x1b[31m" in second


def test_our_own_lines_are_always_shown() -> None:
    stream = io.StringIO()
    Output(level="fatal", stream=stream).say("stopping\nnow")
    assert stream.getvalue() == "up         | stopping\nup         | now\n"


def test_a_closed_output_does_not_stop_the_stack() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Output(stream=Gone()).line("nsqd", "hello")
