"""The policy file: secrets, passwords, throttling, reloading, and errors."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nsparq.errors import StartError
from nsparq.server.auth import policy as auth_policy
from nsparq.server.auth.grants import AuthFailed, Grant, Permission
from nsparq.server.auth.policy import MAX_RUNNING, MAX_SECRET, MAX_WAITING, WRONG_AT_ONCE, StaticPolicy
from nsparq.server.auth.policy_file import (
    PasswordHash,
    PolicyError,
    hash_generated,
    hash_password,
    read_policy,
)
from tests.support import wait_until
from tests.support.polling import DEADLINE

PUBLISH, SUBSCRIBE, READ, ADMIN = Permission
CLIENT: dict[str, Any] = {"remote_ip": "10.0.0.1", "tls": False, "common_name": ""}
ALLOW = '[[identity.allow]]\ntopic = "^billing"\npermissions = ["publish"]\n'


def scrypt(password: bytes, *, cost: int = 4) -> str:
    """Like hash_password(), but cheap."""
    found = PasswordHash(cost, 8, 1, b"salt" * 4, bytes(32))
    return f"scrypt:{cost}:8:1:{found.salt.hex()}:{found.derive(password).hex()}"


def identity(name: str, *secrets: str, allow: str = ALLOW) -> str:
    listed = (
        f'"{secrets[0]}"' if len(secrets) == 1 else "[" + ", ".join(f'"{text}"' for text in secrets) + "]"
    )
    return f'[[identity]]\nname = "{name}"\nsecret = {listed}\n{allow}'


GENERATED = identity("billing", hash_generated(b"generated"))
PASSWORD = identity("admin", scrypt(b"correct horse"))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def policy(tmp_path: Path, clock: Clock, threads: ThreadPoolExecutor) -> Callable[..., StaticPolicy]:
    """policy(*parts): an authenticator from a file of these parts."""

    def make(*parts: str) -> StaticPolicy:
        path = tmp_path / "policy.toml"
        path.write_text("\n".join(parts))
        return StaticPolicy(path, threads, clock=clock)

    return make


def ask(found: StaticPolicy, secret: bytes, **more: Any) -> Grant:
    return asyncio.run(found.authenticate(secret, **{**CLIENT, **more}))


def refused(found: StaticPolicy, secret: bytes, reason: str, **more: Any) -> None:
    with pytest.raises(AuthFailed, match=reason):
        ask(found, secret, **more)


@pytest.fixture
def hashes_counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The passwords that were hashed. The dummy hash is cheap."""
    counted: list[bytes] = []
    derive = PasswordHash.derive

    def counting(self: PasswordHash, password: bytes) -> bytes:
        counted.append(password)
        return derive(self, password)

    monkeypatch.setattr(PasswordHash, "derive", counting)
    monkeypatch.setattr(auth_policy, "_NOBODY", PasswordHash(4, 8, 1, bytes(16), bytes(32)))
    return counted


# Secrets


def test_a_generated_secret_is_sent_alone(policy: Callable[..., StaticPolicy]) -> None:
    found = ask(policy(GENERATED), b"generated")
    assert (found.identity, found.identity_url, found.is_expired(1e18)) == ("billing", "", False)
    assert found.allows(PUBLISH, "billing.eu")
    assert not found.allows(PUBLISH, "orders") and not found.allows(SUBSCRIBE, "billing", "c")


def test_a_password_is_sent_with_its_name(policy: Callable[..., StaticPolicy]) -> None:
    found = policy(GENERATED, PASSWORD)
    assert ask(found, b"admin:correct horse").identity == "admin"
    refused(found, b"correct horse", "no identity has this secret")
    refused(found, b"billing:correct horse", "wrong name or password")
    refused(found, b"admin:wrong", "wrong name or password")
    refused(found, b"admin:", "wrong name or password")


def test_a_password_may_have_any_characters(policy: Callable[..., StaticPolicy]) -> None:
    password = "a:b: ü\n".encode() + b"\xff"
    assert ask(policy(identity("x", scrypt(password))), b"x:" + password).identity == "x"


def test_a_generated_secret_may_have_a_colon(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    assert ask(policy(identity("x", hash_generated(b"a:b")), PASSWORD), b"a:b").identity == "x"
    assert hashes_counted == []


@pytest.mark.parametrize(
    "secret", [b"", b"x" * (MAX_SECRET + 1), b"wrong", b"billing", b"generated\n", b"\xff:\xff"]
)
def test_an_unknown_secret_is_refused(secret: bytes, policy: Callable[..., StaticPolicy]) -> None:
    found = policy(GENERATED, identity("billing2", scrypt(b"p")))
    with pytest.raises(AuthFailed):
        ask(found, secret)


def test_the_hash_is_not_a_secret(policy: Callable[..., StaticPolicy]) -> None:
    text = hash_generated(b"generated")
    for secret in (
        text,
        text.removeprefix("sha256:"),
        scrypt(b"correct horse"),
        "admin:" + scrypt(b"correct horse"),
    ):
        with pytest.raises(AuthFailed):
            ask(policy(GENERATED, PASSWORD), secret.encode())


def test_an_identity_may_have_an_old_and_a_new_secret(policy: Callable[..., StaticPolicy]) -> None:
    found = policy(identity("x", hash_generated(b"old"), hash_generated(b"new"), scrypt(b"p"), scrypt(b"q")))
    for secret in (b"old", b"new", b"x:p", b"x:q"):
        assert ask(found, secret).identity == "x"


def test_there_is_no_anonymous_grant_by_default(policy: Callable[..., StaticPolicy]) -> None:
    assert policy(GENERATED).anonymous is None
    found = policy('[[anonymous.allow]]\ntopic = ".*"\npermissions = ["read"]').anonymous
    assert found is not None and found.identity == ""
    assert found.allows(READ) and not found.allows(ADMIN)


def test_an_identity_has_a_url_if_the_file_gives_one(policy: Callable[..., StaticPolicy]) -> None:
    text = f'[[identity]]\nname = "x"\nurl = "http://x"\nsecret = "{hash_generated(b"s")}"\n{ALLOW}'
    assert ask(policy(text), b"s").identity_url == "http://x"


def test_all_channels_match_by_default(policy: Callable[..., StaticPolicy]) -> None:
    allow = '[[identity.allow]]\ntopic = "t"\nchannels = ["^a$", "^b$"]\npermissions = ["subscribe"]'
    found = ask(policy(identity("x", hash_generated(b"s"), allow=allow)), b"s")
    assert [channel for channel in "abc" if found.allows(SUBSCRIBE, "t", channel)] == ["a", "b"]


def test_the_file_accepts_the_output_of_the_commands(policy: Callable[..., StaticPolicy]) -> None:
    text = hash_password(b"correct horse")
    assert text != hash_password(b"correct horse")  # salted
    assert re.fullmatch(r"scrypt:15:8:1:[0-9a-f]{32}:[0-9a-f]{64}", text)
    assert ask(policy(identity("x", text)), b"x:correct horse").identity == "x"


# Hashing and throttling


def test_a_right_password_is_hashed_once(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    found = policy(PASSWORD)
    hashes_counted.clear()
    grants = [ask(found, b"admin:correct horse", remote_ip=f"10.0.0.{number}") for number in range(5)]
    assert hashes_counted == [b"correct horse"]
    assert all(grant is grants[0] for grant in grants)
    assert "correct" not in repr((found._verified, found._checking))


def test_concurrent_checks_of_the_same_password_share_one_hash(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    found = policy(PASSWORD)
    hashes_counted.clear()

    async def scenario() -> None:
        tasks = [
            asyncio.create_task(found.authenticate(secret, **CLIENT))
            for secret in [b"admin:correct horse"] * 20 + [b"admin:wrong"] * 20
        ]
        await asyncio.sleep(0)
        tasks[0].cancel()  # the one that started it
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [isinstance(result, Grant) for result in results[1:]] == [True] * 19 + [False] * 20

    asyncio.run(scenario())
    assert sorted(hashes_counted) == [b"correct horse", b"wrong"]


def test_an_unknown_name_takes_as_long_as_a_known_one(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    found = policy(PASSWORD)
    hashes_counted.clear()
    refused(found, b"nobody:guess", "wrong name or password")
    assert hashes_counted == [b"guess"]


def test_without_passwords_in_the_file_nothing_is_hashed(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    found = policy(GENERATED)
    refused(found, b"billing:guess", "no identity has this secret")
    assert hashes_counted == []


def test_guessing_is_throttled_per_source(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes], clock: Clock
) -> None:
    found = policy(PASSWORD, identity("other", scrypt(b"p")))
    for number in range(WRONG_AT_ONCE):
        refused(found, b"admin:%d" % number, "wrong name or password")
    hashes_counted.clear()
    refused(found, b"admin:guess", "too many wrong passwords")
    refused(found, b"admin:correct horse", "too many wrong passwords")
    assert hashes_counted == []
    assert ask(found, b"other:p").identity == "other"
    assert ask(found, b"admin:correct horse", remote_ip="10.0.0.2").identity == "admin"
    assert ask(found, b"admin:correct horse").identity == "admin"  # verified by now, so it is not hashed
    clock.now += 1.0
    refused(found, b"admin:one more", "wrong name or password")
    refused(found, b"admin:and another", "too many wrong passwords")


def test_guessing_names_is_throttled_together(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    found = policy(PASSWORD)
    for number in range(WRONG_AT_ONCE):
        refused(found, b"name%d:guess" % number, "wrong name or password")
    refused(found, b"another:guess", "too many wrong passwords")
    assert ask(found, b"admin:correct horse").identity == "admin"


def test_right_passwords_do_not_count_as_attempts(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    many = [scrypt(b"p%d" % number) for number in range(8)]
    found = policy(identity("x", *many))
    for _ in range(4):
        for number in range(8):
            ask(found, b"x:p%d" % number)
        found._verified.clear()


def test_an_ipv6_network_counts_as_one_guesser(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    found = policy(PASSWORD)
    for number in range(WRONG_AT_ONCE):
        refused(found, b"admin:%d" % number, "wrong", remote_ip=f"2001:db8::{number}")
    refused(found, b"admin:guess", "too many wrong passwords", remote_ip="2001:db8::1:2:3%eth0")
    refused(found, b"admin:guess2", "wrong name or password", remote_ip="2001:db8:0:1::1")
    refused(found, b"admin:guess3", "wrong name or password", remote_ip="not:an:address")


def test_the_number_of_waiting_checks_is_limited(
    policy: Callable[..., StaticPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = policy(PASSWORD)
    gate = threading.Event()
    running: list[bytes] = []

    def wait(self: PasswordHash, password: bytes) -> bool:
        running.append(password)
        gate.wait(DEADLINE)
        return False

    monkeypatch.setattr(PasswordHash, "matches", wait)

    async def scenario() -> None:
        attempts = [
            asyncio.create_task(
                found.authenticate(b"admin:%d" % number, **{**CLIENT, "remote_ip": f"10.0.{number}.1"})
            )
            for number in range(MAX_WAITING)
        ]
        await asyncio.to_thread(wait_until, lambda: len(running) == MAX_RUNNING)
        with pytest.raises(AuthFailed, match="too many passwords are being checked"):
            await found.authenticate(b"admin:one more", **{**CLIENT, "remote_ip": "10.1.1.1"})
        assert len(running) == MAX_RUNNING  # other threads stay free
        gate.set()
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert all(isinstance(result, AuthFailed) for result in results)

    asyncio.run(scenario())


def test_the_numbers_of_sources_and_verified_passwords_are_limited(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_policy, "MAX_THROTTLED", 10)
    monkeypatch.setattr(auth_policy, "MAX_REMEMBERED", 2)
    found = policy(PASSWORD, identity("x", scrypt(b"1"), scrypt(b"2"), scrypt(b"3")))
    for number in range(20):
        refused(found, b"admin:guess", "wrong", remote_ip=f"10.0.0.{number}")
    assert len(found._throttle._sources) == 10
    for secret in (b"x:1", b"x:2", b"x:3"):
        ask(found, secret)
    assert len(found._verified) == 2


def test_hashing_does_not_block_the_loop(policy: Callable[..., StaticPolicy]) -> None:
    found = policy(identity("x", hash_password(b"p")))

    async def scenario() -> int:
        task = asyncio.create_task(found.authenticate(b"x:p", **CLIENT))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        await task
        return turns

    assert asyncio.run(scenario()) > 5


@pytest.mark.parametrize("width", [1, 5])
def test_waiting_checks_fail_when_the_threads_are_gone(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_policy, "MAX_RUNNING", width)
    path = tmp_path / "policy.toml"
    path.write_text(identity("x", hash_password(b"p")))
    threads = ThreadPoolExecutor(1)

    async def scenario() -> None:
        found = StaticPolicy(path, threads)
        tasks = [asyncio.create_task(found.authenticate(b"x:%d" % number, **CLIENT)) for number in range(5)]
        await asyncio.sleep(0)
        threads.shutdown(wait=False, cancel_futures=True)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert str(results[0]) in ("wrong name or password", "nsqd is stopping")  # it was being hashed
        assert {str(result) for result in results[1:]} == {"nsqd is stopping"}
        with pytest.raises(AuthFailed, match="nsqd is stopping"):
            await found.authenticate(b"x:late", **CLIENT)
        await asyncio.sleep(0)
        assert not found._checking
        await asyncio.to_thread(threads.shutdown)  # its result is ignored now

    asyncio.run(scenario())


def test_an_error_in_a_thread_reaches_the_caller(
    policy: Callable[..., StaticPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = policy(PASSWORD)

    def fail(self: PasswordHash, password: bytes) -> bool:
        raise MemoryError

    monkeypatch.setattr(PasswordHash, "matches", fail)
    with pytest.raises(MemoryError):
        ask(found, b"admin:x")
    monkeypatch.undo()
    assert ask(found, b"admin:correct horse").identity == "admin"


# Reloading


def test_a_reload_ends_the_grants_of_the_old_policy(policy: Callable[..., StaticPolicy]) -> None:
    found = policy(GENERATED, identity("gone", hash_generated(b"gone")))
    kept, gone = ask(found, b"generated"), ask(found, b"gone")
    found.path.write_text(GENERATED.replace("publish", "subscribe"))
    found.reload()
    assert kept.is_expired(0.0) and gone.is_expired(0.0)
    again = ask(found, b"generated")
    assert not again.is_expired(1e18)
    assert again.allows(SUBSCRIBE, "billing", "c") and not again.allows(PUBLISH, "billing")
    refused(found, b"gone", "no identity has this secret")


def test_a_reload_without_a_change_ends_no_grant(
    policy: Callable[..., StaticPolicy], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = policy(GENERATED)
    grant = ask(found, b"generated")
    found.path.write_text("# a comment more\n" + GENERATED)
    found.reload()
    assert not grant.is_expired(0.0)
    assert "unchanged" in caplog.text


@pytest.mark.parametrize("broken", [b"", b"[[identity]]\nname = 5", b"\xff", b"nonsense"])
def test_a_bad_file_at_reload_is_logged_and_changes_nothing(
    broken: bytes, policy: Callable[..., StaticPolicy], caplog: pytest.LogCaptureFixture
) -> None:
    found = policy(GENERATED)
    grant = ask(found, b"generated")
    found.path.write_bytes(broken)
    found.reload()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR
    assert str(found.path) in record.getMessage() and "stays in force" in record.getMessage()
    assert not grant.is_expired(0.0)
    assert ask(found, b"generated") is grant
    found.path.unlink()
    found.reload()
    assert "No such file or directory" in caplog.text
    assert ask(found, b"generated") is grant


def test_a_verified_password_survives_a_reload_unless_it_has_changed(
    policy: Callable[..., StaticPolicy], hashes_counted: list[bytes]
) -> None:
    found = policy(PASSWORD)
    ask(found, b"admin:correct horse")
    hashes_counted.clear()
    found.path.write_text(PASSWORD + GENERATED)
    found.reload()
    assert ask(found, b"admin:correct horse").identity == "admin"
    assert hashes_counted == []
    found.path.write_text(identity("admin", scrypt(b"another")))
    found.reload()
    refused(found, b"admin:correct horse", "wrong name or password")
    found.path.write_text(GENERATED)
    found.reload()
    refused(found, b"admin:correct horse", "no identity has this secret")


def test_a_policy_that_changes_during_hashing_decides(
    policy: Callable[..., StaticPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = policy(PASSWORD)
    gate = threading.Event()
    matches = PasswordHash.matches
    monkeypatch.setattr(
        PasswordHash, "matches", lambda self, secret: gate.wait(DEADLINE) and matches(self, secret)
    )

    async def scenario() -> None:
        task = asyncio.create_task(found.authenticate(b"admin:correct horse", **CLIENT))
        await asyncio.sleep(0)
        found.path.write_text(GENERATED)
        found.reload()
        gate.set()
        with pytest.raises(AuthFailed, match="changed in the meantime"):
            await task

    asyncio.run(scenario())


# The format of the file


def bad(tmp_path: Path, text: str) -> str:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        read_policy(path)
    assert isinstance(caught.value, StartError)
    found = str(caught.value)
    assert found.startswith(f"{path}: ")
    return found.removeprefix(f"{path}: ")


SECRET = f'secret = "{hash_generated(b"s")}"'
X = f'[[identity]]\nname = "x"\n{SECRET}\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither [[identity]] nor [anonymous]; write `identity = []` if that is intended"),
        ("x", "Expected '=' after a key"),
        ("[identities]", "unknown key 'identities'; known are anonymous, identity"),
        ("identity = 5", "identity must be written as [[identity]]"),
        ('[identity]\nname = "x"', "identity must be written as [[identity]]"),
        ("[[identity]]", "identity 1: name must be a string without a colon"),
        ("[[identity]]\nname = 5", "identity 1: name must be"),
        ('[[identity]]\nname = ""', "identity 1: name must be"),
        ('[[identity]]\nname = "a:b"', "identity 1: name must be"),
        ('[[identity]]\nname = "a\\nb"', "identity 1: name must be"),
        ('[[identity]]\nname = "x"', "identity 'x': secret must be \"sha256:…\""),
        ('[[identity]]\nname = "x"\nsecret = "hush"', "identity 'x': secret must be \"sha256:…\""),
        ('[[identity]]\nname = "x"\nsecret = []', "identity 'x': secret must be a string or a list"),
        (
            '[[identity]]\nname = "x"\nsecret = ["sha256:00", 5]',
            "identity 'x': secret: sha256: must be followed",
        ),
        (
            '[[identity]]\nname = "x"\nsecret = "sha256:' + "G" * 64 + '"',
            "identity 'x': secret: sha256: must be",
        ),
        (
            '[[identity]]\nname = "x"\nsecret = "scrypt:1"',
            "identity 'x': secret: not a scrypt hash; `nsparq auth hash`",
        ),
        (
            f'[[identity]]\nname = "x"\nsecret = "scrypt:24:99:1:{"00" * 16}:{"00" * 32}"',
            "identity 'x': secret: the scrypt hash needs 202752 MiB for each attempt",
        ),
        (
            f'[[identity]]\nname = "x"\nsecret = "scrypt:0:8:1:{"00" * 16}:{"00" * 32}"',
            "identity 'x': secret: scrypt parameters out of range",
        ),
        (f'[[identity]]\nname = "x"\nurl = 5\n{SECRET}', "identity 'x': url must be a string"),
        (f"{X}alow = []", "identity 1: unknown key 'alow'"),
        (f'{X}[identity.allow]\ntopic = ""', "identity 'x': allow must be written as [[identity.allow]]"),
        (f'{X}[[identity.allow]]\npermissions = ["read"]', "identity 'x', allow 1: topic must be a pattern"),
        (
            f'{X}[[identity.allow]]\ntopic = "t"',
            "identity 'x', allow 1: permissions must be a list of publish, subscribe, read, admin",
        ),
        (
            f'{X}{ALLOW}[[identity.allow]]\ntopic = "t"\npermissions = ["fly"]',
            "identity 'x', allow 2: permissions: 'fly' is not a valid Permission; known are publish,",
        ),
        (
            f'{X}[[identity.allow]]\ntopic = "t"\npermissions = "read"',
            "identity 'x', allow 1: permissions must be a list of strings",
        ),
        (
            f'{X}[[identity.allow]]\ntopic = "("\npermissions = ["read"]',
            "identity 'x', allow 1: missing ): ( in '('",
        ),
        (
            f'{X}[[identity.allow]]\ntopic = "t"\nchannels = [1]',
            "identity 'x', allow 1: channels must be a list of strings",
        ),
        (
            f'{X}[[identity.allow]]\ntopic = "t"\nchannel = "c"',
            "identity 'x', allow 1: unknown key 'channel'; known are channels, permissions, topic",
        ),
        (X * 2, "identity 2: another identity has the name 'x'"),
        (f'{X}[[identity]]\nname = "y"\n{SECRET}\n', "identity 'y': has the same secret as 'x'"),
        ("anonymous = 5", "anonymous: must be a table"),
        ('[anonymous]\npermissions = ["read"]', "anonymous: unknown key 'permissions'; known are allow"),
        ('[[anonymous.allow]]\ntopic = "t"', "anonymous, allow 1: permissions must be"),
        ("[anonymous]\nallow = 5", "anonymous: allow must be written as [[anonymous.allow]]"),
    ],
)
def test_an_error_names_file_entry_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    found = bad(tmp_path, text)
    assert found.startswith(reason)
    assert "hush" not in found


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none\.toml: No such file or directory"):
        read_policy(tmp_path / "none.toml")
    with pytest.raises(PolicyError, match="Is a directory"):
        read_policy(tmp_path)
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match=r"binary\.toml: .*utf-8"):
        read_policy(path)


def test_a_file_without_identities_must_say_so(policy: Callable[..., StaticPolicy]) -> None:
    refused(policy("identity = []"), b"x", "no identity has this secret")


def test_a_probable_mistake_is_a_warning(
    policy: Callable[..., StaticPolicy], caplog: pytest.LogCaptureFixture
) -> None:
    allow = (
        '[[identity.allow]]\ntopic = "t"\nchannels = ["^c$"]\n'
        'permissions = ["admin", "publish", "subscribe"]\n'
    )
    found = policy(
        identity("idle", hash_generated(b"a"), allow=""),
        identity("narrow", hash_generated(b"b"), allow=allow),
    )
    warnings = read_policy(found.path).warnings
    assert len(warnings) == 2
    assert warnings[0] == "identity 'idle' has no permissions: it has no allow"
    assert warnings[1].startswith(
        "identity 'narrow', allow 1: no effect on admin, publish: for these a channel"
    )
    assert all(f"{found.path}: {warning}" in caplog.text for warning in warnings)
    found.path.chmod(0o646)
    assert read_policy(found.path).warnings[0] == "every user of this machine can write to the file"


def test_the_log_has_no_secret(policy: Callable[..., StaticPolicy], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    found = policy(GENERATED, PASSWORD)
    ask(found, b"admin:correct horse")
    refused(found, b"admin:battery staple", "wrong")
    for text in ("generated", "correct", "staple", "sha256", "scrypt"):
        assert text not in caplog.text
