"""`make up`: the stack with a shop's events trickling in. Its pipelines are those of the demo."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.up.support import SOURCE, Up

EVENTS = "shop.events"


class Live(Up):
    module = "tests.demo.without_spark"


def test_events_are_consumed_until_it_is_stopped_and_nothing_is_left(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    paths = os.pathsep.join(map(str, (SOURCE, SOURCE.parent)))
    with Live(tmp_path, "--trickle=500", PYTHONPATH=paths, TMPDIR=str(temporary)) as up:
        up.wait_until_ready()
        assert "Spark is not installed: there are no pipelines" in up.out() + up.err()
        nsqd = up.address("nsqd", "http")

        def mailing() -> dict[str, Any]:
            with urlopen(f"http://{nsqd}/stats?format=json&topic={EVENTS}&channel=mailing") as answer:
                topics = json.loads(answer.read())["topics"]
            channels = topics[0]["channels"] if topics else []
            return channels[0] if channels else {}

        def finished() -> int:
            return sum(client["finish_count"] for client in mailing().get("clients") or ())

        up.wait_for(lambda: finished() >= 100, "events are consumed")
        up.signal(signal.SIGINT)
        assert up.wait() == 0
    assert not list(temporary.iterdir())
