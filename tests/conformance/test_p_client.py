"""P. Our client library, with the cases of the reference client's tests: against a real nsqd, or a
scripted one for sequences of commands."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nsparq.addresses import join_address
from nsparq.client import (
    ClientError,
    Config,
    ConfigError,
    ConnectFailed,
    Consumer,
    Message,
    Producer,
    PublishFailed,
    Requeue,
    Stopped,
)
from nsparq.options import TlsRequired
from tests.support import TestBroker
from tests.support.aio import run, until
from tests.support.auth_server import AuthServer, entry
from tests.support.certificates import certificates
from tests.support.scripted_nsqd import Peer, ScriptedNsqd, message_id

QUICK: dict[str, Any] = {
    "default_requeue_delay": 0,
    "max_backoff_duration": 0.05,
    "backoff_multiplier": 0.01,
    "reconnect_delay": 0.01,
}


def address(broker: TestBroker) -> str:
    return join_address(*broker.address)  # type: ignore[misc]  # not a Unix socket


# 210, 211: options


@pytest.mark.parametrize(
    "option", ["not_a_real_config_value,1", "tls-min-version,tls9.9", "max-attempts,65536"]
)
def test_case_210_options_that_cannot_be_are_refused(option: str) -> None:
    with pytest.raises(ConfigError):
        Config.from_strings([option])


def test_case_210_options_are_read_from_text() -> None:
    config = Config.from_strings(
        ["tls_v1", "tls-insecure-skip-verify,true", "dial-timeout,200ms", "read_timeout,5000"],
        heartbeat_interval=5,
    )
    assert (config.tls_v1, config.tls_insecure_skip_verify) == (True, True)
    assert (config.dial_timeout, config.read_timeout) == (0.2, 5.0)


def test_case_210_tls_1_3_may_be_asked_for() -> None:
    assert Config.from_strings(["tls-min-version,tls1.3"]).tls_min_version == "tls1.3"


@pytest.mark.parametrize(
    "values", [{"deflate_level": 100}, {"sample_rate": 100}, {"read_timeout": 1, "heartbeat_interval": 2}]
)
def test_case_210_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Config(**values)


@pytest.mark.parametrize(("attempt", "seconds"), [(0, 1), (1, 2), (3, 8), (5, 32)])
def test_case_211_exponential_backoff(attempt: int, seconds: float) -> None:
    assert Config().backoff(attempt) == seconds


@pytest.mark.parametrize("attempt", [0, 1, 3, 5])
def test_case_211_full_jitter(attempt: int) -> None:
    config = Config(backoff_strategy="full_jitter", backoff_multiplier=0.5)
    for _ in range(100):
        assert 0 <= config.backoff(attempt) <= 0.5 * 2**attempt


# 212: command sequences

GOOD, BAD, BAD_WITHOUT_BACKOFF = b"good", b"bad", b"bad, and nobody's fault"


async def judge(message: Message) -> None:
    if message.body == BAD:
        raise ValueError("bad")
    if message.body == BAD_WITHOUT_BACKOFF:
        raise Requeue(backoff=False)


class Conversation:
    """A consumer and its peer; messages have 0 attempts, so they are requeued without delay."""

    def __init__(self, nsqd: ScriptedNsqd, consumer: Consumer) -> None:
        self.nsqd, self.consumer = nsqd, consumer
        self._count = 0

    async def send(self, body: bytes, *expected: str) -> None:
        """Send a message, and expect these commands, with `id` for its id."""
        self._count += 1
        name = str(self._count)
        peer: Peer = await self.nsqd.peer(len(self.nsqd.peers))
        peer.send_message(name, body, attempts=0)
        await self.nsqd.told(*(command.replace("id", message_id(name)) for command in expected))


@asynccontextmanager
async def conversation(max_in_flight: int) -> AsyncIterator[Conversation]:
    config = Config(
        max_in_flight=max_in_flight,
        backoff_multiplier=0.01,
        lookupd_poll_interval=0.01,
        reconnect_delay=0.01,
        rdy_redistribute_interval=5,
    )
    async with ScriptedNsqd(b"OK") as nsqd:
        async with Consumer("t", "ch", judge, nsqd=[nsqd.address], config=config) as consumer:
            yield Conversation(nsqd, consumer)


def test_case_212_backoff() -> None:
    async def main() -> None:
        async with conversation(5) as talk:
            await talk.nsqd.told("IDENTIFY", "SUB t ch", "RDY 5")
            for _ in range(3):
                await talk.send(GOOD, "FIN id")
            await talk.send(BAD, "RDY 0", "REQ id 0", "RDY 1")
            await talk.send(BAD, "RDY 0", "REQ id 0", "RDY 1")
            await talk.send(GOOD, "RDY 0", "FIN id", "RDY 1")
            await talk.send(GOOD, "RDY 5", "FIN id")
            await talk.nsqd.told_nothing_more()

    run(main())


def test_case_212_requeue_without_backoff() -> None:
    async def main() -> None:
        async with conversation(1) as talk:
            await talk.nsqd.told("IDENTIFY", "SUB t ch", "RDY 1")
            await talk.send(BAD, "RDY 0", "REQ id 0", "RDY 1")
            await talk.send(BAD_WITHOUT_BACKOFF, "RDY 0", "REQ id 0", "RDY 1")
            # It already has RDY 1: the end of the back-off needs no command.
            await talk.send(GOOD, "FIN id")
            await talk.nsqd.told_nothing_more()
            assert not talk.consumer.is_in_backoff

    run(main())


def test_case_212_reconnect_while_backed_off() -> None:
    async def main() -> None:
        async with conversation(5) as talk:
            await talk.nsqd.told("IDENTIFY", "SUB t ch", "RDY 5")
            await talk.send(GOOD, "FIN id")
            await talk.send(BAD, "RDY 0", "REQ id 0")
            talk.nsqd.peers[0].close()
            # The pause may be over before the connection is lost.
            lost = talk.nsqd.peers[0].commands
            await until(lambda: len(talk.nsqd.peers) == 2 and len(talk.nsqd.peers[1].commands) == 3)
            assert lost[-1] in ("RDY 1", f"REQ {message_id('2')} 0")
            talk.nsqd._told = len(talk.nsqd.commands) - 3
            await talk.nsqd.told("IDENTIFY", "SUB t ch", "RDY 1")
            await talk.send(GOOD, "RDY 5", "FIN id")
            await talk.send(GOOD, "FIN id")
            await talk.nsqd.told_nothing_more()

    run(main())


def test_case_212_pause_and_resume() -> None:
    async def main() -> None:
        async with conversation(5) as talk:
            await talk.nsqd.told("IDENTIFY", "SUB t ch", "RDY 5")
            await talk.send(GOOD, "FIN id")
            talk.consumer.change_max_in_flight(0)
            await talk.nsqd.told("RDY 0")
            await talk.nsqd.told_nothing_more()
            talk.consumer.change_max_in_flight(5)
            await talk.nsqd.told("RDY 5")
            await talk.nsqd.told_nothing_more()

    run(main())


# 213: publishing and consuming over every transport


def client_tls(**more: Any) -> dict[str, Any]:
    return {"tls_v1": True, "tls_root_ca_file": str(certificates().ca.cert), **more}


def own_certificate() -> dict[str, Any]:
    pair = certificates().client
    return client_tls(tls_cert=str(pair.cert), tls_key=str(pair.key))


def strict_flags() -> dict[str, Any]:
    """Flags of a broker that requires client certificates, at least over TCP."""
    found = certificates()
    return found.server_flags(
        tls_client_auth_policy="require-verify",
        tls_root_ca_file=str(found.ca.cert),
        tls_required=TlsRequired.EXCEPT_HTTP,
    )


TRANSPORTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "deflate": lambda: {"deflate": True},
    "snappy": lambda: {"snappy": True},
    "tls": client_tls,
    "tls+deflate": lambda: client_tls(deflate=True),
    "tls+snappy": lambda: client_tls(snappy=True),
    "client certificate": own_certificate,
}


@pytest.fixture(params=TRANSPORTS)
def transport(
    request: pytest.FixtureRequest, shared_broker: Callable[..., TestBroker]
) -> tuple[TestBroker, dict[str, Any]]:
    """A broker, and the client options for this transport."""
    name: str = request.param
    flags: dict[str, Any] = {}
    if name == "client certificate":
        flags = strict_flags()
    elif name.startswith("tls"):
        flags = certificates().server_flags()
    return shared_broker(**flags), TRANSPORTS[name]()


def test_case_213_a_consumer_handles_retries_and_gives_up(
    transport: tuple[TestBroker, dict[str, Any]], topic: str
) -> None:
    broker, options = transport

    async def main() -> None:
        calls: Counter[bytes] = Counter()
        given_up: list[tuple[bytes, int]] = []

        async def handle(message: Message) -> None:
            calls[message.body] += 1
            if message.body == b"TOBEFAILED":
                raise ValueError("as it should")

        async def give_up(message: Message) -> None:
            given_up.append((message.body, message.attempts))

        config = Config(**QUICK, **options)
        async with Producer(address(broker), config=config) as producer:
            await producer.publish(topic, b'{"msg":"single"}')
            await producer.publish_many(topic, [b'{"msg":"double"}', b'{"msg":"double"}'])
            await producer.publish(topic, b"TOBEFAILED")
        async with Consumer(
            topic, "ch", handle, nsqd=[address(broker)], on_give_up=give_up, max_in_flight=5, config=config
        ) as consumer:
            await until(lambda: given_up and consumer.messages_finished == 4)
        assert calls == {b'{"msg":"single"}': 1, b'{"msg":"double"}': 2, b"TOBEFAILED": 5}
        assert sum(calls.values()) == 8
        assert given_up == [(b"TOBEFAILED", 6)]
        assert (consumer.messages_requeued, consumer.messages_given_up) == (5, 1)

    run(main())
    stats = broker.channel_stats(topic, "ch")
    assert stats is not None
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)


def test_case_213_large_and_many_messages_get_through(
    transport: tuple[TestBroker, dict[str, Any]], topic: str
) -> None:
    broker, options = transport
    sizes = [1, 100, 16_384, 65_536, 65_537, 700_000]
    bodies = [bytes([65 + index % 26]) * size for index, size in enumerate(sizes)]
    bodies += [b"%d" % number * 20 for number in range(500)]

    async def main() -> None:
        received: Counter[bytes] = Counter()

        async def handle(messages: list[Message]) -> None:
            received.update(message.body for message in messages)

        config = Config(**QUICK, **options)
        async with Producer(address(broker), config=config) as producer:
            await asyncio.gather(*(producer.publish(topic, body) for body in bodies))
        async with Consumer(
            topic, "ch", batch_handler=handle, batch_timeout=0.05, nsqd=[address(broker)], config=config
        ):
            await until(lambda: received.total() >= len(bodies))
        assert received == Counter(bodies)

    run(main())


def test_case_213_what_a_client_negotiates_shows_in_stats(
    transport: tuple[TestBroker, dict[str, Any]], topic: str
) -> None:
    broker, options = transport

    async def main() -> None:
        config = Config(client_id="me", user_agent="tester/1", **options)
        async with Consumer(topic, "ch", lambda message: None, nsqd=[address(broker)], config=config):
            stats = await until(lambda: broker.channel_stats(topic, "ch"))
            (client,) = await until(lambda: (broker.channel_stats(topic, "ch") or stats)["clients"])
            assert (client["client_id"], client["user_agent"]) == ("me", "tester/1")
            for layer, key in (("tls", "tls_v1"), ("snappy", "snappy"), ("deflate", "deflate")):
                assert client[layer] is options.get(key, False)
            assert await until(lambda: broker.channel_stats(topic, "ch")["clients"][0]["ready_count"] == 8)  # type: ignore[index]

    run(main())


def test_case_213_a_server_that_cannot_prove_itself_is_left(shared_broker: Callable[..., TestBroker]) -> None:
    broker = shared_broker(**certificates().server_flags())

    async def main() -> None:
        async with Producer(address(broker), config=Config(tls_v1=True)) as producer:
            with pytest.raises(ConnectFailed, match="the server's certificate"):
                await producer.connect()

    run(main())


def test_case_213_a_client_without_the_certificate_that_is_asked_for_is_refused(
    shared_broker: Callable[..., TestBroker],
) -> None:
    broker = shared_broker(**strict_flags())

    async def main() -> None:
        async with Producer(address(broker), config=Config(**client_tls())) as producer:
            with pytest.raises(ConnectFailed):
                await producer.connect()

    run(main())


def test_case_213_auth(topic: str, shared_broker: Callable[..., TestBroker]) -> None:
    with AuthServer() as server:
        server.grant(entry(f"^{topic}$", "publish", "subscribe"))
        broker = shared_broker(auth_http_address=(server.address,))

        async def main() -> None:
            received: list[bytes] = []

            async def handle(message: Message) -> None:
                received.append(message.body)

            config = Config(**QUICK, auth_secret="xyzzy")
            async with Producer(address(broker), config=config) as producer:
                await producer.publish(topic, b"hello")
                with pytest.raises(PublishFailed) as caught:
                    await producer.publish("elsewhere", b"hello")
                assert caught.value.code == "E_UNAUTHORIZED"
            async with Consumer(topic, "ch", handle, nsqd=[address(broker)], config=config):
                await until(lambda: received == [b"hello"])
            async with Producer(address(broker)) as producer:
                with pytest.raises(ConnectFailed, match="requires AUTH, but auth_secret is not set"):
                    await producer.publish(topic, b"hello")
            server.answer(b"", status=403)
            async with Producer(address(broker), config=config) as producer:
                with pytest.raises(ConnectFailed, match="AUTH failed: E_AUTH_FAILED AUTH failed"):
                    await producer.publish(topic, b"hello")

        run(main())
        assert server.queries[0].fields["secret"] == "xyzzy"


# 214: connections


def test_case_214_connecting_twice_and_disconnecting_an_unknown_address(
    broker: TestBroker, topic: str
) -> None:
    async def main() -> None:
        async with Consumer(topic, "ch", judge) as consumer:
            await consumer.connect(address(broker))
            with pytest.raises(ClientError, match="already connected"):
                await consumer.connect(address(broker))
            with pytest.raises(ClientError, match="not connected"):
                await consumer.disconnect("1.2.3.4:4150")
            await consumer.disconnect(address(broker))
            await until(lambda: not consumer.connections)

    run(main())


def test_case_214_the_local_address_is_honoured(broker: TestBroker, topic: str) -> None:
    async def main() -> None:
        config = Config(local_addr="127.0.0.3:0")
        async with Consumer(topic, "ch", judge, nsqd=[address(broker)], config=config):

            def clients() -> list[dict[str, Any]]:
                stats = broker.channel_stats(topic, "ch")
                return stats["clients"] if stats else []

            (client,) = await until(clients)
            assert client["remote_address"].startswith("127.0.0.3:")

    run(main())


# 215: nsqlookupd


def test_case_215_the_question_to_nsqlookupd_carries_the_secret(topic: str) -> None:
    with AuthServer() as lookupd:
        lookupd.answer({"channels": [], "producers": []})

        async def main() -> None:
            config = Config(auth_secret="xyzzy")
            async with Consumer(topic, "ch", judge, nsqlookupd=[lookupd.address], config=config):
                (query,) = await until(lambda: lookupd.queries)
                assert query.headers["authorization"] == "Bearer xyzzy"
                assert query.path == f"/lookup?topic={topic}"

        run(main())


# 216, 217: producers


def test_case_216_a_producer_connects_when_it_must_and_not_after_its_stop(
    broker: TestBroker, topic: str
) -> None:
    async def main() -> None:
        producer = Producer(address(broker))
        assert producer.address == ""
        await producer.publish(topic, b"test")
        await producer.stop()
        with pytest.raises(Stopped, match="stopped"):
            await producer.publish(topic, b"fail test")

    run(main())
    stats = broker.topic_stats(topic)
    assert stats is not None and stats["message_count"] == 1


def test_case_216_ping(broker: TestBroker) -> None:
    async def main() -> None:
        async with Producer(address(broker)) as producer:
            await producer.ping()
            assert producer.address == address(broker)
        with pytest.raises(Stopped):
            await producer.ping()
        async with Producer("127.0.0.1:1") as producer:
            with pytest.raises(ConnectFailed):
                await producer.ping()

    run(main())


def test_case_217_publishing_without_waiting_tells_each_its_own_outcome(
    small_broker: TestBroker, topic: str
) -> None:
    """Ten at once, each with its own outcome. One is too large: only that one fails."""

    async def main() -> None:
        config = Config(heartbeat_interval=1, output_buffer_size=1024)
        async with Producer(address(small_broker), config=config) as producer:
            bodies = [b"publish_test_case %d" % number for number in range(10)]
            bodies[4] = b"x" * 101
            tasks = {body: asyncio.create_task(producer.publish(topic, body)) for body in bodies}
            await asyncio.wait(tasks.values())
            failed = {body for body, task in tasks.items() if task.exception() is not None}
            assert failed == {bodies[4]}
            error = tasks[bodies[4]].exception()
            assert isinstance(error, PublishFailed)
            assert str(error) == "E_BAD_MESSAGE PUB message too big 101 > 100"

    run(main())
    stats = small_broker.topic_stats(topic)
    assert stats is not None and stats["message_count"] == 9, "nine, each once"


def test_case_217_deferred_publishing(broker: TestBroker, topic: str) -> None:
    async def main() -> None:
        arrived: list[float] = []

        async def handle(message: Message) -> None:
            arrived.append(time.monotonic())

        async with Producer(address(broker)) as producer:
            await producer.connect()
            began = time.monotonic()
            await producer.publish(topic, b"later", defer=0.25)
        async with Consumer(topic, "ch", handle, nsqd=[address(broker)]):
            await until(lambda: arrived)
        assert arrived[0] - began >= 0.25

    run(main())


def test_case_217_heartbeats_are_answered_while_idle(broker: TestBroker, topic: str) -> None:
    async def main() -> None:
        config = Config(heartbeat_interval=1, read_timeout=3)
        async with Producer(address(broker), config=config) as producer:
            await producer.publish(topic, b"first")
            connection = producer._connection
            # Two unanswered heartbeats would end the connection.
            await asyncio.sleep(3.2)
            await producer.publish(topic, b"second")
            assert producer._connection is connection

    run(main())


def test_case_217_a_refused_heartbeat_has_the_text_of_the_server(broker: TestBroker, topic: str) -> None:
    async def main() -> None:
        async with Producer(address(broker), config=Config(heartbeat_interval=0.1)) as producer:
            text = "E_BAD_BODY IDENTIFY heartbeat interval \\(100\\) is invalid"
            with pytest.raises(ConnectFailed, match=text):
                await producer.publish(topic, b"x")

    run(main())


# 218


def test_case_218_an_http_port_is_reported_as_such(broker: TestBroker, topic: str) -> None:
    assert broker.http_address is not None
    http = join_address(*broker.http_address)  # type: ignore[misc]

    async def main() -> None:
        async with Producer(http) as producer:
            with pytest.raises(
                ConnectFailed, match="unexpected HTTP response, a nsqd TCP endpoint is required"
            ):
                await producer.publish(topic, b"x")

    run(main())
