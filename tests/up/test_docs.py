"""docs/up.md says what is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nsparq.errors import StartError
from nsparq.up import ports
from nsparq.up.main import banner, make_parser
from nsparq.up.members import Cluster, Plan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "up.md").read_text(encoding="utf-8")


def test_the_banner_is_the_one_on_the_page() -> None:
    assert banner(Cluster(Plan(data_path=Path("data")))).strip() in PAGE


def test_the_page_has_every_flag_and_no_other() -> None:
    known = {
        one for action in make_parser()._actions for one in action.option_strings if one.startswith("--")
    }
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) == known - {"--help"}


def test_the_message_about_a_port_in_use_is_the_one_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_why_not", lambda host, port: "is in use" if port == 4151 else "")
    with pytest.raises(StartError) as caught:
        ports.check_free("127.0.0.1", Cluster(Plan(data_path=Path("data"))).wanted())
    first, second = str(caught.value).splitlines()
    assert f"nsparq up: {first}\n           {second}\n" in PAGE


def test_the_examples_of_the_help_are_commands() -> None:
    lines = re.findall(r"(?m)^  nsparq up( --[^ ]+.*?)?(?:  |$)", make_parser().epilog or "")
    assert len(lines) == 5
    for line in lines:
        make_parser().parse_args(shlex.split(line))
