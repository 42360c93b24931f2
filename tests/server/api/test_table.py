"""The reference pages and examples match the source, and the tables of endpoints are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsparq.http.api import Api
from nsparq.lookup.http_api import describe as describe_lookupd
from nsparq.lookup.options import TABLE as LOOKUPD_TABLE
from nsparq.lookup.options import NsqlookupdOptions
from nsparq.options import NsqdOptions
from nsparq.server.api.table import INTRODUCTION, NsqdApi
from nsparq.server.auth.grants import Permission
from nsparq.server.daemon import Nsqd
from tests.support.polling import DEADLINE

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"

# tests/test_options.py checks nsqd's options.
PAGES = {
    "nsqd-http.md": ("nsparq.server.api.table", "--markdown"),
    "nsqlookupd-http.md": ("nsparq.lookup.http_api", "--markdown"),
    "nsqlookupd-options.md": ("nsparq.lookup.options", "--markdown"),
    "nsqlookupd.example.toml": ("nsparq.lookup.options", "--toml"),
}


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_checked_in_page_is_what_the_source_generates(page: str) -> None:
    result = run_module(*PAGES[page])
    assert (result.returncode, result.stderr) == (0, "")
    assert (REFERENCE / page).read_text(encoding="utf-8") == result.stdout, "stale: run `make docs`"


def test_every_page_is_made_by_make_docs() -> None:
    makefile = (REFERENCE.parents[1] / "Makefile").read_text(encoding="utf-8")
    made = re.findall(r"-m (\S+) (--\w+) > docs/reference/(\S+)", makefile)
    # The site makes the Python API from docstrings. The format of headers is a specification.
    assert {page for _, _, page in made} | {"api.md", "headers.md"} == {
        path.name for path in REFERENCE.iterdir()
    }
    assert {page: (module, form) for module, form, page in made if page in PAGES} == PAGES


@pytest.mark.parametrize("module", sorted({module for module, _ in PAGES.values()}))
def test_a_wrong_argument_prints_the_usage(module: str) -> None:
    for arguments in ([], ["--nonsense"], ["--markdown", "--markdown"]):
        result = run_module(module, *arguments)
        assert result.returncode != 0 and f"usage: python -m {module} " in result.stderr


def test_the_description_can_be_printed_too() -> None:
    for module in ("nsparq.server.api.table", "nsparq.lookup.http_api"):
        assert run_module(module, "--openapi").stdout.startswith('{\n  "openapi": "3.1')


def test_the_example_file_of_nsqlookupd_gives_the_defaults() -> None:
    path = REFERENCE / "nsqlookupd.example.toml"
    options, warnings = LOOKUPD_TABLE.read_command_line([f"--config={path}"])
    assert (options, warnings) == (NsqlookupdOptions(), [])
    example = path.read_text(encoding="utf-8")
    for option in LOOKUPD_TABLE.options:
        assert f"\n{option.file_key} = " in example or f"\n# {option.file_key} = " in example


# The tables


def nsqd_api() -> Api:
    return NsqdApi(Nsqd(NsqdOptions()))


ENDPOINTS = {
    f"{api.title} {endpoint.method} {endpoint.path}": endpoint
    for api in (nsqd_api(), describe_lookupd())
    for endpoint in api.endpoints
}


def test_every_endpoint_says_what_it_is_for() -> None:
    for name, endpoint in ENDPOINTS.items():
        assert re.fullmatch(r"[A-Z].*[.]", endpoint.summary), f"{name}: not a sentence"
        assert endpoint.group and endpoint.success, name
        assert not endpoint.details or re.fullmatch(r"(?s)[A-Z0-9`].*[.]", endpoint.details), name
        for param in endpoint.params:
            assert param.help and not param.help.endswith("."), f"{name}: {param.name}"
        assert bool(endpoint.body_help) == endpoint.keeps_body, name
        assert not endpoint.success_schema or endpoint.success_type, name


def test_every_error_of_an_endpoint_is_listed_once_and_well_formed() -> None:
    for name, endpoint in ENDPOINTS.items():
        assert len(set(endpoint.errors)) == len(endpoint.errors), name
        params = {param.name.upper() for param in endpoint.params}
        for status, code in endpoint.errors:
            assert 400 <= status < 600, f"{name}: {code}"
            assert re.fullmatch(r"[A-Z][A-Z_]+", code) or " " in code, f"{name}: {code}"
            about = re.fullmatch(r"(?:MISSING|INVALID)_ARG_(\w+)", code)
            assert not about or about[1] in params | {"TARGET"}, f"{name}: {code} is of no parameter"


def test_every_endpoint_of_nsqd_names_its_permission() -> None:
    for name, endpoint in ENDPOINTS.items():
        if name.startswith("nsqd "):
            assert endpoint.permission in [*Permission], name
            if endpoint.method != "GET":
                changing = (Permission.ADMIN, Permission.PUBLISH, Permission.SUBSCRIBE)
                assert endpoint.permission in changing, f"{name} changes something"


def test_the_introduction_names_what_any_endpoint_may_answer() -> None:
    for code in ("INVALID_REQUEST", "NOT_FOUND", "METHOD_NOT_ALLOWED", "INTERNAL_ERROR", "OVERLOADED"):
        assert f"`{code}`" in INTRODUCTION
    for code in ("AUTH_REQUIRED", "UNAUTHORIZED", "TLS_REQUIRED"):
        assert f"`{code}`" in INTRODUCTION


def test_the_limits_in_the_introduction_are_the_real_ones() -> None:
    from nsparq.http import limits

    assert f"{limits.MAX_HEAD >> 10} KiB and {limits.HEAD_S:.0f} seconds" in INTRODUCTION.replace("\n", " ")
    assert f"a body {limits.BODY_S:.0f} seconds" in INTRODUCTION.replace("\n", " ")


def test_names_are_described_as_they_are_checked() -> None:
    from nsparq.names import is_valid_name
    from nsparq.server.api.parameters import NAME

    pattern: Any = NAME["pattern"]
    for name in ("a", "a.b-c_D9", "x#ephemeral", "", "#ephemeral", "a b", "a#", "ä", "a#ephemeral#ephemeral"):
        for full in (name, name * 40):
            fits = re.search(pattern, full) is not None and len(full) <= NAME["maxLength"]  # type: ignore[operator]
            assert fits == is_valid_name(full.encode()), full
