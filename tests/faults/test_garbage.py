"""Garbage on the TCP port: documented errors or a closed connection, and nothing else happens."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support import start_process

from . import fuzzing
from .bystander import well_served
from .load import peak_mib, reset_peak, resident_mib

CASES = 1500
SECONDS = 15
SEED = 20_000


def test_garbage_gets_documented_errors_and_hurts_nobody(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        fuzzing.run(broker.address, 0, 100)
        before = resident_mib(broker.pid)
        reset_peak(broker.pid)
        with well_served(broker, within=2):
            count, problems = fuzzing.run(broker.address, SEED, CASES, time.monotonic() + SECONDS)
        assert not problems, "\n".join(problems[:20])
        assert broker.alive()
        assert peak_mib(broker.pid) - before < 100
        assert "Traceback" not in broker.stderr_text()
        broker.restart()
        broker.publish("fuzz", b"still here")
    assert count > 100


def test_a_case_depends_on_its_seed_alone() -> None:
    assert fuzzing.case(7) == fuzzing.case(7)
    assert len({b"".join(fuzzing.case(seed)) for seed in range(300)}) > 280


def test_the_judge_knows_right_from_wrong() -> None:
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
