"""A program that uses only the client needs no other package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nsparq.client
from nsparq.tools.reference import TABLES

HEAVY = (
    "OpenSSL",
    "cramjam",
    "crc32c",
    "cryptography",
    "httptools",
    "numpy",
    "pyspark",
    "re2",
    "rich",
    "uvloop",
)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_client_imports_nothing_but_the_standard_library() -> None:
    code = f"""
import sys
before = set(sys.modules)
import nsparq.client
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new & set({HEAVY})), sorted(new - set(sys.stdlib_module_names) - {{"nsparq"}}))
print("nsparq.server" in sys.modules, "nsparq.broker" in sys.modules, "nsparq.storage" in sys.modules)
"""
    assert run(code) == "[] []\nFalse False False\n"


def test_it_works_without_the_packages_of_the_extras() -> None:
    """Also with TLS and deflate; snappy names the packages it needs."""
    code = f"""
import asyncio, sys
sys.modules.update(dict.fromkeys({HEAVY}))
from nsparq.client import Config, ConfigError, ConnectFailed, Consumer, Producer
import nsparq.transport.deflate, nsparq.transport.tls_client
Config(tls_v1=True, deflate=True).ssl_context()
try:
    Config(snappy=True)
except ConfigError as error:
    print(error)

async def main():
    async with Producer("127.0.0.1:1") as producer:
        try:
            await producer.publish("t", b"x")
        except ConnectFailed as error:
            print(error)
    async with Consumer("t", "ch", nsqd=["127.0.0.1:1"], nsqlookupd=["127.0.0.1:1"]):
        await asyncio.sleep(0.05)

import logging
logging.disable()
asyncio.run(main())
"""
    assert run(code).splitlines() == [
        "snappy needs the packages cramjam and crc32c",
        "127.0.0.1:1: Connection refused",
    ]


def test_installing_the_client_installs_nothing_else() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []


@pytest.mark.parametrize("tool", [table.program for table in TABLES])
def test_the_tools_need_nothing_else_either(tool: str) -> None:
    module, *command = tool.split()
    code = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY}))
from nsparq.tools import {"main" if command else module} as tool
sys.exit(tool.main({command or ["--version"]} + ["--help"] * {len(command)}))
"""
    assert run(code).startswith(f"Usage: {tool}" if command else f"{tool} v")


def test_every_public_name_exists() -> None:
    assert sorted(nsparq.client.__all__) == nsparq.client.__all__
    assert all(hasattr(nsparq.client, name) for name in nsparq.client.__all__)
    assert {"Config", "Consumer", "Message", "Producer", "Reject", "Requeue"} <= set(nsparq.client.__all__)
