"""nsparq dead-letters: list, redrive and cancel, over real daemons."""

from __future__ import annotations

import json

import pytest

from nsparq.tools.dead_letters import progress_bar
from tests.support import TestBroker, start_broker
from tests.support.dead_letters import give_up
from tests.support.polling import DEADLINE

from .conftest import Run
from .processes import http
from .terminal import Terminal


def depth(broker: TestBroker, topic: str) -> int:
    stats = broker.channel_stats(topic, "c")
    assert stats is not None
    found: int = stats["depth"]
    return found


def test_letters_are_listed_and_put_back(nsparq: Run, broker: TestBroker, topic: str):
    give_up(broker, topic, b"one", b"two")
    broker.publish(f"{topic}.dead", b"no letter")
    lines = nsparq("dead-letters", "list", f"{topic}.dead").out.decode().splitlines()
    assert lines[0].split() == "TOPIC CHANNEL REASON CAN GO BACK PUT BACK OTHERS LAST".split()
    assert lines[1].split()[:6] == [topic, "c", "requeued", "2", "0", "0"]
    assert lines[2].endswith(": 'two'")
    assert lines[3] == f"1 messages of {topic}.dead are not dead letters of nsqd: they stay there."
    done = nsparq("dead-letters", "redrive", f"{topic}.dead", "--text=two")
    assert done.out.decode().splitlines()[-1] == "Nothing was put back. Add --yes to put them back."
    assert depth(broker, topic) == 0
    done = nsparq("dead-letters", "redrive", f"{topic}.dead", "--text=two", "--yes", "--json")
    found = json.loads(done.out)
    assert [(one["state"], one["redriven"]) for one in found["nodes"]] == [("finished", 1)]
    assert (done.status, depth(broker, topic)) == (0, 1)
    done = nsparq("dead-letters", "redrive", f"{topic}.dead", "--yes")
    assert done.out.decode().splitlines()[-1].split() == [
        http(broker), "finished", "1", "1", "were", "put", "back", "before"
    ]  # fmt: skip
    assert depth(broker, topic) == 2
    (group,) = json.loads(nsparq("dead-letters", "list", f"{topic}.dead", "--json").out)["groups"]
    assert group["states"] == {"redriven": 2}


def test_it_works_on_all_nsqds(nsparq: Run, broker: TestBroker, topic: str):
    with start_broker() as second:
        for one in (broker, second):
            give_up(one, topic, b"one", b"two")
        addresses = [f"--nsqd-http-address={http(one)}" for one in (broker, second)]
        (group,) = json.loads(nsparq("dead-letters", "list", f"{topic}.dead", "--json", *addresses).out)[
            "groups"
        ]
        assert group["states"] == {"ready": 4}
        done = nsparq("dead-letters", "redrive", f"{topic}.dead", "--yes", "--json", *addresses)
        assert [one["redriven"] for one in json.loads(done.out)["nodes"]] == [2, 2]
        assert (depth(broker, topic), depth(second, topic)) == (2, 2)


def test_a_redrive_asks_and_is_cancelled(nsparq: Run, broker: TestBroker, topic: str):
    give_up(broker, topic, *[b"%d" % number for number in range(5)])
    address = f"--nsqd-http-address={http(broker)}"
    with Terminal("main", "dead-letters", "redrive", f"{topic}.dead", "--rate=1", address) as terminal:
        terminal.wait_for("Put 5 messages back? [y/N] ")
        terminal.type(b"y\n")
        terminal.wait_for("put back")
        done = nsparq("dead-letters", "cancel", f"{topic}.dead")
        assert done.out.decode().splitlines()[1].split()[1] == "cancelled"
        assert terminal.process.wait(DEADLINE) == 0
    assert depth(broker, topic) < 5
    broker.control("create", f"{topic}x.dead")
    assert "none" in nsparq("dead-letters", "cancel", f"{topic}x.dead").out.decode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "t.dead"), "must be one of list, redrive, cancel"),
        (("redrive",), "TOPIC is missing"),
        (("redrive", "t.dead", "--yes", "--dry-run"), "use --dry-run or --yes, not both"),
        (("redrive", "t.dead", "--rate=-1"), "--rate must not be negative"),
        (("list", "t.dead", "--since=whenever"), "--since: 'whenever' is not a time"),
        (("list", "nothing.dead"), "there is no topic nothing.dead"),
    ],
)
def test_wrong_arguments_are_refused(nsparq: Run, arguments: tuple[str, ...], text: str):
    done = nsparq("dead-letters", *arguments)
    assert done.status in (1, 2)
    assert text in done.err


def test_a_filter_that_nsqd_refuses_is_explained(nsparq: Run, broker: TestBroker, topic: str):
    broker.control("create", f"{topic}.dead")
    assert "INVALID_ARG_FIELD" in nsparq("dead-letters", "list", f"{topic}.dead", "--field=a").err


def test_the_bar_shows_all_nsqds_together():
    one = {"start": 100, "end": 200, "position": 150, "redriven": 40, "waits_for": ""}
    two = {"start": 0, "end": 100, "position": 0, "redriven": 0, "waits_for": "t:c is busy"}
    assert (
        progress_bar([one, two]) == "[#######.......................]  25%  40 put back  (waits: t:c is busy)"
    )
    assert progress_bar([]).endswith("100%  0 put back")
