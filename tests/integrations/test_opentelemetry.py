"""Traces with OpenTelemetry, through a real nsqd, read from the SDK's exporter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from nsparq.client import (
    Config,
    Consumer,
    HeadersNotSupported,
    Message,
    Producer,
    Reject,
    Requeue,
    Subscriptions,
    sync,
)
from nsparq.integrations.opentelemetry import OpenTelemetry, context_of
from nsparq.testing import Broker, run_broker
from tests.support import unique_name
from tests.support.aio import run, until
from tests.support.scripted_nsqd import ScriptedNsqd


@pytest.fixture(scope="module")
def nsqd() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


class Traced:
    """A configuration, and the spans that its producers and consumers have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        self.config = Config(
            tracing=OpenTelemetry(provider), default_requeue_delay=0, max_backoff_duration=0, max_attempts=2
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    async def span(self, name: str, count: int = 1) -> list[ReadableSpan]:
        await until(lambda: len(self.spans(name)) >= count)
        return self.spans(name)


@pytest.fixture
def traced() -> Traced:
    return Traced()


def trace_of(span: ReadableSpan) -> int:
    found = span.get_span_context()
    assert found is not None
    return found.trace_id


def id_of(span: ReadableSpan) -> int:
    found = span.get_span_context()
    assert found is not None
    return found.span_id


def test_a_handler_continues_the_trace_of_the_publish(nsqd: Broker, traced: Traced) -> None:
    topic, seen = unique_name("topic"), []

    async def handle(message: Message) -> None:
        with traced.tracer.start_as_current_span("inside"):
            seen.append((message.headers["k"], baggage.get_baggage("user")))

    async def main() -> None:
        async with Producer(nsqd.tcp_address, config=traced.config) as producer:
            token = context.attach(baggage.set_baggage("user", "7"))
            with traced.tracer.start_as_current_span("request"):
                await producer.publish(topic, b"body", headers={"k": "v"})
            context.detach(token)
        async with Consumer(topic, "ch", handle, nsqd=[nsqd.tcp_address], config=traced.config):
            await traced.span(f"process {topic}")

    run(main())
    (request,), (published,), (processed,), (inside,) = (
        traced.spans(name) for name in ("request", f"publish {topic}", f"process {topic}", "inside")
    )
    parents = [span.parent.span_id if span.parent else 0 for span in (published, processed, inside)]
    assert parents == [id_of(request), id_of(published), id_of(processed)]
    assert len({trace_of(span) for span in (request, published, processed, inside)}) == 1
    assert seen == [("v", "7")]
    host, port = nsqd.tcp_address.split(":")
    common = {
        "messaging.system": "nsq",
        "messaging.destination.name": topic,
        "server.address": host,
        "server.port": int(port),
    }
    assert published.kind is SpanKind.PRODUCER
    assert dict(published.attributes or {}) == {
        **common,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
    }
    assert processed.kind is SpanKind.CONSUMER
    attributes = dict(processed.attributes or {})
    assert len(str(attributes.pop("messaging.message.id"))) == 16
    assert attributes == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.subscription.name": "ch",
        "messaging.message.body.size": 4,
        "messaging.nsq.message.attempts": 1,
    }


def test_a_batch_has_a_link_to_the_trace_of_each_message(nsqd: Broker, traced: Traced) -> None:
    topic = unique_name("topic")

    async def handle(messages: list[Message]) -> None:
        pass

    async def main() -> None:
        async with Producer(nsqd.tcp_address, config=traced.config) as producer:
            await producer.publish_many(topic, [b"a", b"b"], headers=[{"k": "v"}, None])
            await producer.publish(topic, b"c")
        nsqd.publish(topic, b"without a trace")
        options: dict[str, Any] = {"nsqd": [nsqd.tcp_address], "config": traced.config}
        async with Consumer(topic, "ch", batch_handler=handle, batch_size=4, batch_timeout=30, **options):
            await traced.span(f"process {topic}")

    run(main())
    many, one = traced.spans(f"publish {topic}")
    assert (many.attributes or {})["messaging.batch.message_count"] == 2
    (processed,) = traced.spans(f"process {topic}")
    assert (processed.attributes or {})["messaging.batch.message_count"] == 4
    assert processed.parent is None
    assert [link.context.span_id for link in processed.links] == [id_of(many), id_of(many), id_of(one)]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("no"), StatusCode.ERROR), (Requeue(0), StatusCode.UNSET)]
)
def test_a_handler_that_fails_ends_its_span_with_the_error(
    nsqd: Broker, traced: Traced, error: Exception, status: StatusCode
) -> None:
    topic = unique_name("topic")

    async def handle(message: Message) -> None:
        if message.attempts == 1:
            raise error

    async def main() -> None:
        nsqd.publish(topic, b"x")
        async with Consumer(topic, "ch", handle, nsqd=[nsqd.tcp_address], config=traced.config):
            first, second = await traced.span(f"process {topic}", 2)
        assert (first.status.status_code, second.status.status_code) == (status, StatusCode.UNSET)
        is_error = status is StatusCode.ERROR
        assert ("error.type" in (first.attributes or {}), len(first.events)) == (is_error, int(is_error))
        # They belong to no trace of a producer, and not to one trace either.
        assert trace_of(first) != trace_of(second)

    run(main())


def test_a_dead_letter_belongs_to_the_trace_of_its_message(nsqd: Broker, traced: Traced) -> None:
    topic = unique_name("topic")
    app = Subscriptions(nsqd=[nsqd.tcp_address], config=traced.config)

    @app.subscribe(topic, "ch", dead_letter=f"{topic}.dead")
    def handle(text: str) -> None:
        with traced.tracer.start_as_current_span("in a thread"):
            raise Reject("never")

    async def main() -> None:
        nsqd.publish(topic, b"x")
        async with app:
            await traced.span(f"process {topic}")

    run(main())
    (processed,), (inside,), (letter,) = (
        traced.spans(name) for name in (f"process {topic}", "in a thread", f"publish {topic}.dead")
    )
    assert (processed.attributes or {})["error.type"] == "Reject"
    assert {span.parent.span_id for span in (inside, letter) if span.parent} == {id_of(processed)}


def test_a_loop_over_messages_gets_the_context_of_each(nsqd: Broker, traced: Traced) -> None:
    topic = unique_name("topic")

    async def main() -> None:
        async with Consumer(topic, "ch", nsqd=[nsqd.tcp_address], config=traced.config) as consumer:
            async for message in consumer:
                traced.tracer.start_span("own", context_of(message)).end()
                break

    # Without asyncio, too: the span of the script is the parent.
    with sync.Producer(nsqd.tcp_address, config=traced.config) as producer:
        with traced.tracer.start_as_current_span("script"):
            producer.publish(topic, b"x")
    run(main())
    # The first loop has left its message, so this one gets it.
    for _ in sync.consume(topic, "ch", nsqd=[nsqd.tcp_address], config=traced.config):
        break
    (script,), (published,), (own,) = (traced.spans(name) for name in ("script", f"publish {topic}", "own"))
    received = traced.spans(f"receive {topic}")
    assert published.parent is not None and published.parent.span_id == id_of(script)
    assert [span.parent.span_id for span in (own, *received) if span.parent] == [id_of(published)] * 3
    assert {span.kind for span in received} == {SpanKind.CONSUMER}
    assert traced.spans(f"process {topic}") == []


def test_a_broker_without_headers_gets_the_message_without_the_trace(traced: Traced) -> None:
    async def main() -> None:
        async with ScriptedNsqd() as nsqd, Producer(nsqd.address, config=traced.config) as producer:
            await producer.publish("t", b"x")
            await producer.publish_many("t", iter([b"x", b"y"]))
            with pytest.raises(HeadersNotSupported):
                await producer.publish("t", b"x", headers={"k": "v"})
            with pytest.raises(HeadersNotSupported):
                await producer.publish_many("t", [b"x"], headers={"k": "v"})
            assert nsqd.commands == ["IDENTIFY", "PUB t", "MPUB t"]
        assert len(traced.spans("publish t")) == 4

    run(main())


def test_a_header_of_the_user_in_capitals_gives_way_to_the_trace(nsqd: Broker, traced: Traced) -> None:
    topic = unique_name("topic")

    async def main() -> None:
        async with Producer(nsqd.tcp_address, config=traced.config) as producer:
            with traced.tracer.start_as_current_span("request"):
                own = {"Traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "Tenant": "acme"}
                await producer.publish(topic, b"x", headers=own)
                await producer.publish_many(topic, [b"x"], headers=own)

    run(main())
    for span, message in zip(traced.spans(f"publish {topic}"), nsqd.peek(topic), strict=True):
        assert message.headers["tenant"] == "acme"
        assert f"{id_of(span):016x}" in message.headers["traceparent"]


def test_without_an_sdk_nothing_is_added(nsqd: Broker) -> None:
    topic = unique_name("topic")

    async def main() -> None:
        provider = trace.NoOpTracerProvider()
        async with Producer(nsqd.tcp_address, config=Config(tracing=OpenTelemetry(provider))) as producer:
            await producer.publish(topic, b"x")

    run(main())
    assert nsqd.peek(topic)[0].headers == {}


def test_without_tracing_producers_and_handlers_are_called_directly(traced: Traced) -> None:
    """Nothing is checked for each message: the way is chosen once."""

    async def handle(message: Message) -> None:
        pass

    async def made(config: Config) -> tuple[bool, Callable[..., Any] | None]:
        producer = Producer("127.0.0.1:1", config=config)
        consumer = Consumer("t", "ch", handle, config=config)
        return "publish" in vars(producer), consumer._workers._call

    assert asyncio.run(made(Config())) == (False, handle)
    is_replaced, call = asyncio.run(made(traced.config))
    assert is_replaced and call is not handle
