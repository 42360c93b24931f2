"""`nsparq auth`: create secrets for clients and their hashes, and check a policy file.

Data goes to standard output, explanations to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nsparq.errors import NsparqError
from nsparq.server.auth.grants import Authorization
from nsparq.server.auth.policy import StaticPolicy
from nsparq.server.auth.policy_file import Identity, Policy, hash_generated, hash_password, read_policy
from nsparq.tools.output import text_table
from nsparq.tools.parser import Parser

__all__ = ["main", "make_parser"]

SHORT_PASSWORD = 12

DESCRIPTION = """\
Secrets and permissions of an nsqd that was started with --auth-policy-file.

The file names identities, the hash of each one's secret, and what each may do:

  [[identity]]
  name = "billing"
  secret = "sha256:..."
  [[identity.allow]]
  topic = "^billing"
  permissions = ["publish", "subscribe"]

After a change of the file, `kill -HUP` makes nsqd read it again.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nsparq auth", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "secret",
        help="create a random secret, and its hash",
        description="Prints a random secret for a client, and its hash for the policy file.",
    )
    command.set_defaults(run=make_secret)
    command = commands.add_parser(
        "hash",
        help="print the hash of a chosen password",
        description="Asks for a password (or reads it from standard input) and prints its line for the file.",
    )
    command.add_argument(
        "--generated",
        action="store_true",
        help="the secret is long and random, not a password: use the fast hash, without a name in front",
    )
    command.set_defaults(run=hash_secret)
    command = commands.add_parser(
        "check",
        help="check a policy file and print what it permits",
        description="Checks a policy file, and prints what it permits to whom.",
    )
    command.add_argument("file", type=Path, help="the policy file")
    command.set_defaults(run=check)
    command = commands.add_parser(
        "who",
        help="print the identity of a secret and what it permits",
        description="Asks for a secret (or reads it from standard input), as a client would send it.",
    )
    command.add_argument("file", type=Path, help="the policy file")
    command.set_defaults(run=who)
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (NsparqError, _Refused) as error:
        print(f"nsparq auth: {error}", file=sys.stderr)
        return 1
    return status


class _Refused(Exception):
    """The typed secret cannot be used."""


def make_secret(arguments: argparse.Namespace) -> int:
    secret = secrets.token_hex(32)
    print(secret)
    print(f'secret = "{hash_generated(secret.encode())}"')
    print(
        "The first line is the client's secret; it is stored nowhere. The second is for the policy file.",
        file=sys.stderr,
    )
    return 0


def hash_secret(arguments: argparse.Namespace) -> int:
    secret = _read_secret("Secret: " if arguments.generated else "Password: ", confirm=True)
    if arguments.generated:
        print(f'secret = "{hash_generated(secret)}"')
        return 0
    if len(secret) < SHORT_PASSWORD:
        print("This password is short. `nsparq auth secret` creates a better one.", file=sys.stderr)
    print(f'secret = "{hash_password(secret)}"')
    print("The client's secret is name:password, with the name of the identity.", file=sys.stderr)
    return 0


def check(arguments: argparse.Namespace) -> int:
    policy = read_policy(arguments.file)
    print(_table(_policy_rows(policy)))
    for warning in policy.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def who(arguments: argparse.Namespace) -> int:
    with ThreadPoolExecutor(1) as threads:
        policy = StaticPolicy(arguments.file, threads)
        secret = _read_secret("Secret: ")
        grant = asyncio.run(policy.authenticate(secret, remote_ip="", tls=False, common_name=""))
    print(_table(_rows(grant.identity, "", grant.authorizations), HEADINGS_WHO))
    return 0


def _read_secret(prompt: str, *, confirm: bool = False) -> bytes:
    if not sys.stdin.isatty():
        secret = sys.stdin.buffer.read().removesuffix(b"\n").removesuffix(b"\r")
    else:
        typed = getpass.getpass(prompt)
        if confirm and typed != getpass.getpass("Again: "):
            raise _Refused("the two secrets differ")
        secret = typed.encode()
    if not secret:
        raise _Refused("nothing was typed")
    return secret


Row = tuple[str, ...]
HEADINGS: Row = ("identity", "secrets", "topic", "channels", "permissions")
HEADINGS_WHO: Row = ("identity", "", "topic", "channels", "permissions")


def _policy_rows(policy: Policy) -> list[Row]:
    rows: list[Row] = []
    for identity in policy.identities.values():
        rows += _rows(identity.name, _kinds(identity), identity.authorizations)
    if policy.anonymous is not None:
        rows += _rows("(anonymous)", "none", policy.anonymous)
    return rows


def _kinds(identity: Identity) -> str:
    kinds = [(len(identity.generated), "generated"), (len(identity.passwords), "password")]
    return ", ".join(f"{count} {kind}" if count > 1 else kind for count, kind in kinds if count)


def _rows(name: str, kinds: str, authorizations: Sequence[Authorization]) -> list[Row]:
    if not authorizations:
        return [(name, kinds, "", "", "nothing")]
    rows: list[Row] = []
    for entry in authorizations:
        channels = " ".join(pattern.text for pattern in entry.channels)
        rows.append((name, kinds, entry.topic.text, channels, ", ".join(sorted(entry.permissions))))
        name = kinds = ""
    return rows


def _table(rows: Sequence[Row], headings: Row = HEADINGS) -> str:
    everything = [headings, *rows]
    used = [column for column in range(len(headings)) if any(row[column] for row in everything)]
    return "\n".join(text_table([[row[column] for column in used] for row in everything], left=len(used)))
