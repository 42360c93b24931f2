"""The health check of the container image. tests/deploy/test_container.py runs it beside the
daemons."""

from __future__ import annotations

import pytest

from nsparq.testing import run_broker
from nsparq.tools import healthcheck


@pytest.mark.parametrize(
    ("command", "url"),
    [
        (
            ["/opt/nsparq/bin/python", "/opt/nsparq/bin/nsqd", "--data-path=/data"],
            "http://127.0.0.1:4151/ping",
        ),
        (["/sbin/docker-init", "--", "nsparq", "nsqlookupd"], "http://127.0.0.1:4161/ping"),
        (["python", "/nsqadmin"], "http://127.0.0.1:4171/ping"),
        (["python", "/nsq_tail", "--topic", "nsqd"], None),
    ],
)
def test_the_program_says_what_to_request(command: list[str], url: str | None) -> None:
    assert healthcheck.url_of(command) == url


def test_a_container_is_healthy_if_the_answer_is_200(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_broker() as broker:
        place = f"http://{broker.http_address}"
        assert healthcheck.main([f"{place}/ping"]) == 0
        assert healthcheck.main([f"{place}/nowhere"]) == 1
        monkeypatch.setenv("NSPARQ_HEALTH_URL", f"{place}/ping")
        assert healthcheck.main([]) == 0
    assert healthcheck.main([]) == 1
    monkeypatch.setenv("NSPARQ_HEALTH_URL", "ping")
    assert healthcheck.main([]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == said[2] == f"{place}/ping: OK"
    assert said[1].startswith(f"{place}/nowhere: 404 ")
    assert "refused" in said[3] and "unknown url type" in said[4]


def test_a_tool_has_nothing_to_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthcheck, "url_of", lambda command: None)
    assert healthcheck.main([]) == 0
