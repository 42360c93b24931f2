"""Garbage on the HTTP port: documented answers or a closed connection, and nothing else happens."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support import start_process

from . import fuzzing_http
from .bystander import well_served
from .load import peak_mib, reset_peak, resident_mib

CASES = 1500
SECONDS = 15
SEED = 30_000


def test_garbage_gets_documented_answers_and_hurts_nobody(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        assert isinstance(broker.http_address, tuple)
        fuzzing_http.run(broker.http_address, 0, 100)
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=2):
            count, problems = fuzzing_http.run(broker.http_address, SEED, CASES, time.monotonic() + SECONDS)
        assert not problems, "\n".join(problems[:20])
        assert broker.alive()
        assert peak_mib(broker.pid) - before < 100
        assert "Traceback" not in broker.stderr_text()
        broker.restart()
        broker.request("POST", "/pub?topic=fuzz", b"still here").expect_ok()
    assert count > 100


def test_a_case_depends_on_its_seed_alone() -> None:
    assert fuzzing_http.case(7) == fuzzing_http.case(7)
    assert len({b"".join(fuzzing_http.case(seed)) for seed in range(300)}) > 290


def test_the_judge_knows_right_from_wrong() -> None:
    def answer(status: str, body: bytes, *headers: str) -> bytes:
        lines = "".join(f"{header}\r\n" for header in (*headers, f"Content-Length: {len(body)}"))
        return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body

    json_type = "Content-Type: application/json; charset=utf-8"
    fine = (
        answer("200 OK", b"OK")
        + b"HTTP/1.1 100 Continue\r\n\r\n"
        + answer("404 Not Found", b'{"message":"NOT_FOUND"}', json_type)
        + answer("400 Bad Request", b"400 Bad Request", "Connection: close")
    )
    assert fuzzing_http.judge(fine, reset=False) == []
    assert fuzzing_http.judge(fine[:-1], reset=True) == []
    assert fuzzing_http.judge(fine[:-1], reset=False)
    assert fuzzing_http.judge(fine + answer("200 OK", b"OK"), reset=False)
    for wrong in (
        answer("500 Internal Server Error", b'{"message":"INTERNAL_ERROR"}', json_type),
        answer("400 Bad Request", b'{"message":"division by zero"}', json_type),
        answer("400 Bad Request", b"Traceback"),
        answer("200 OK", b"{", json_type),
        answer("200 OK", b"x", "Content-Length: 1"),
        answer("200 OK", b"x", "no colon"),
        b"OK",
        b"HTTP/1.1 200 OK\r\nDate: x\r\n\r\nOK",
    ):
        assert fuzzing_http.judge(wrong, reset=False), wrong
