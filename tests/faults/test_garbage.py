"""Garbage on the TCP port and on the HTTP port gets documented errors or a closed connection, and
has no other effect."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import start_process

from . import fuzzing, fuzzing_http
from .bystander import well_served
from .load import peak_mib, reset_peak, resident_mib

CASES = 1500
SECONDS = 15


@pytest.mark.parametrize(("fuzzer", "seed"), [(fuzzing, 20_000), (fuzzing_http, 30_000)], ids=["tcp", "http"])
def test_garbage_gets_documented_errors_and_does_not_affect_others(
    fuzzer: ModuleType, seed: int, tmp_path: Path
) -> None:
    with start_process(tmp_path) as broker:
        address = broker.address if fuzzer is fuzzing else broker.http_address
        fuzzer.run(address, 0, 100)
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=2):
            count, problems = fuzzer.run(address, seed, CASES, time.monotonic() + SECONDS)
        assert not problems, "\n".join(problems[:20])
        assert broker.alive()
        assert peak_mib(broker.pid) - before < 100
        assert "Traceback" not in broker.stderr_text()
        broker.restart()
        broker.publish("fuzz", b"still here")
        broker.request("POST", "/pub?topic=fuzz", b"still here").expect_ok()
    assert count > 100


@pytest.mark.parametrize("fuzzer", [fuzzing, fuzzing_http], ids=["tcp", "http"])
def test_a_case_depends_on_its_seed_alone(fuzzer: ModuleType) -> None:
    assert fuzzer.case(7) == fuzzer.case(7)
    assert len({b"".join(fuzzer.case(seed)) for seed in range(300)}) > (280 if fuzzer is fuzzing else 290)


def test_the_judge_of_tcp_finds_every_wrong_frame() -> None:
    def frame(frame_type: int, data: bytes) -> bytes:
        return (len(data) + 4).to_bytes(4, "big") + frame_type.to_bytes(4, "big") + data

    fine = (
        frame(0, b"OK") + frame(0, b"_heartbeat_") + frame(1, b"E_FIN_FAILED FIN x failed") + frame(0, b"{}")
    )
    assert fuzzing.judge(fine + frame(1, b"E_INVALID invalid command x"), reset=False) == []
    assert fuzzing.judge(frame(1, b"E_BAD_PROTOCOL"), reset=False) == []
    assert fuzzing.judge(frame(1, b"E_INVALID x") + frame(0, b"OK"), reset=False) == [
        "goes on after E_INVALID"
    ]
    assert fuzzing.judge(frame(1, b"E_NEW"), reset=False) == ["unknown error b'E_NEW'"]
    assert fuzzing.judge(frame(1, b"division by zero"), reset=False) == ["unknown error b'division by zero'"]
    assert fuzzing.judge(frame(0, b"YES"), reset=False) == ["unknown response b'YES'"]
    assert fuzzing.judge(frame(3, b""), reset=False) == ["unknown frame type 3"]
    assert fuzzing.judge(frame(0, b"OK")[:-1], reset=True) == []
    assert fuzzing.judge(frame(0, b"OK")[:-1], reset=False)


def test_the_judge_of_http_finds_every_wrong_answer() -> None:
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
