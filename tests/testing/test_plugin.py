from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> object:
    # As if the entry point had loaded it, and nothing else.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    return lambda *arguments: pytester.runpytest_subprocess("-p", "nsparq.testing.plugin", *arguments)


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"nsparq": "nsparq.testing.plugin"}


def test_fixtures_give_one_broker_and_a_topic_to_each_test(pytester: pytest.Pytester, run: object) -> None:
    pytester.makepyfile(
        """
        import re
        import pytest
        from nsparq.client.sync import Producer, consume

        seen = []

        @pytest.mark.parametrize("x", ["a", "b b/" + "c" * 100])
        def test_one(nsq_broker, nsq_topic, x):
            seen.append((nsq_broker.tcp_address, nsq_topic))
            with Producer(nsq_broker.tcp_address) as producer:
                producer.publish(nsq_topic, b"x")
            assert len(nsq_broker.peek(nsq_topic)) == 1

        def test_end(nsq_broker):
            (address_1, topic_1), (address_2, topic_2) = seen
            assert address_1 == address_2 == nsq_broker.tcp_address
            assert topic_1 != topic_2
            assert re.fullmatch(r"test_one_a_+\\d+", topic_1) and len(topic_2) <= 48
            assert nsq_broker.stats()["topics"] == []
        """
    )
    run().assert_outcomes(passed=3)  # type: ignore[operator]


def test_consumers_find_the_broker_by_nsqlookupd(pytester: pytest.Pytester, run: object) -> None:
    pytester.makepyfile(
        """
        from nsparq.client import Config
        from nsparq.client.sync import consume

        def test_lookup(nsq_broker, nsq_lookupd, nsq_topic):
            nsq_broker.publish(nsq_topic, b"x")
            config = Config(lookupd_poll_interval=0.05)
            for message in consume(nsq_topic, "ch", nsqlookupd=[nsq_lookupd.http_address], config=config):
                assert message.body == b"x"
                message.finish()
                break
            nsq_broker.wait_empty(nsq_topic, "ch")
        """
    )
    run().assert_outcomes(passed=1)  # type: ignore[operator]


def test_a_proxy_stands_in_front_of_the_broker(pytester: pytest.Pytester, run: object) -> None:
    pytester.makepyfile(
        """
        import pytest
        from nsparq.client import Config, PublishTimeout
        from nsparq.client.sync import Producer

        def test_stalled(nsq_broker, nsq_proxy, nsq_topic):
            with Producer(nsq_proxy.address, config=Config(publish_timeout=0.5)) as producer:
                producer.publish(nsq_topic, b"x")
                nsq_proxy.stall()
                with pytest.raises(PublishTimeout):
                    producer.publish(nsq_topic, b"y")
                nsq_proxy.heal()
        """
    )
    run().assert_outcomes(passed=1)  # type: ignore[operator]


def test_options_of_the_broker_can_be_overridden(pytester: pytest.Pytester, run: object) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def nsq_broker_options():
            return {"max_msg_size": 10}
        """
    )
    pytester.makepyfile(
        """
        import pytest
        from nsparq.client import PublishFailed
        from nsparq.client.sync import Producer

        def test_too_big(nsq_broker, nsq_topic):
            with Producer(nsq_broker.tcp_address) as producer, pytest.raises(PublishFailed, match="too big"):
                producer.publish(nsq_topic, b"x" * 11)
        """
    )
    run().assert_outcomes(passed=1)  # type: ignore[operator]


def test_fixtures_explain_themselves(pytester: pytest.Pytester, run: object) -> None:
    result = run("--fixtures", "-q")  # type: ignore[operator]
    result.stdout.fnmatch_lines(["nsq_broker *", "*A running broker*"])
    result.stdout.no_fnmatch_line("*no docstring available*")


def test_the_plugin_loads_nothing_before_a_test_asks_for_it() -> None:
    code = "import sys, nsparq.testing.plugin; print(*[m for m in sys.modules if m.startswith('nsparq')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*result.stdout.split()} & {
        "nsparq.server",
        "nsparq.client",
        "nsparq.pipeline",
        "numpy",
        "uvloop",
    } == set()
