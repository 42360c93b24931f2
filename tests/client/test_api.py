"""The API reference is made from docstrings: every public name has one."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

MODULES = ("nsparq.client", "nsparq.client.sync", "nsparq.client.metrics", "nsparq.testing")
EVENTS = {"on_messages", "on_response", "on_error", "on_closed"}
"""How a connection calls a Consumer; described by Listener."""


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """Names and objects of a module, and the methods and properties of its classes."""
    for name in module.__all__:
        found = getattr(module, name)
        if not callable(found):
            continue
        yield name, found
        if not inspect.isclass(found):
            continue
        for key, member in inspect.getmembers(found):
            function = member.fget if isinstance(member, property) else member
            is_ours = str(getattr(function, "__module__", "")).startswith("nsparq")
            if is_ours and callable(function) and not key.startswith("_") and key not in EVENTS:
                yield f"{name}.{key}", function


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    found = [*public(module)]
    assert len(found) >= len(module.__all__) - 4  # constants and aliases of types
    # A dataclass without a docstring gets its signature as one.
    bare = [
        key
        for key, value in found
        if not inspect.getdoc(value)
        or (dataclasses.is_dataclass(value) and str(value.__doc__).startswith(f"{key}("))
    ]
    assert not bare


@pytest.mark.parametrize("name", ("nsparq.client", "nsparq.testing"))
def test_all_is_sorted_and_has_no_private_name(name: str) -> None:
    exported = importlib.import_module(name).__all__
    assert exported == sorted(exported)
    assert not [one for one in exported if one.startswith("_")]


@pytest.mark.parametrize(
    "name",
    ("nsparq.client.producer", "nsparq.client.consumer", "nsparq.client.sync", "nsparq.client.subscription"),
)
def test_the_example_of_a_module_is_python(name: str) -> None:
    text = inspect.getdoc(importlib.import_module(name)) or ""
    example = "\n".join(re.findall(r"^(?: {4}.*|)$", text, re.MULTILINE))
    assert example.strip()
    compile(inspect.cleandoc("\n" + example), name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
