"""Traces with OpenTelemetry, across producers and consumers.

    config = Config(tracing=OpenTelemetry())
    producer = Producer("127.0.0.1:4150", config=config)

The context of a trace travels in the headers of a message (`traceparent`, `tracestate`, `baggage`:
what OpenTelemetry's propagators write). Names and attributes of spans follow OpenTelemetry's
conventions for messaging.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from nsparq.addresses import split_address
from nsparq.client import HeadersNotSupported, Message, Producer, Requeue
from nsparq.version import __version__

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as error:
    raise ImportError("OpenTelemetry is missing: pip install 'nsparq[otel]'", name=error.name) from error

__all__ = ["OpenTelemetry", "context_of"]

Handle = Callable[[Any], Awaitable[Any]]
Attributes = dict[str, str | int]
_TYPES: Final = {"publish": "send", "receive": "receive", "process": "process"}
"""The type of each operation, in the words of the conventions."""


class OpenTelemetry:
    """`Config(tracing=OpenTelemetry())` traces every publish, every call of a handler, and every
    message that a loop gets."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """Without a provider it is the global one, as `opentelemetry.trace.set_tracer_provider` set
        it."""
        self._tracer = trace.get_tracer("nsparq", __version__, tracer_provider)

    # for producers and consumers: nsparq.client.tracing.Tracing

    def trace_producer(self, producer: Producer) -> None:
        """Replace `publish` and `publish_many` of a new producer by traced ones."""
        publish, publish_many = producer.publish, producer.publish_many

        async def traced_publish(
            topic: str, body: object, *, defer: float = 0.0, headers: Mapping[str, str] | None = None
        ) -> None:
            with self._publishing(topic, producer) as added:
                try:
                    await publish(topic, body, defer=defer, headers=_joined(headers or {}, added))
                except HeadersNotSupported:
                    if headers:
                        raise
                    # Only the trace ends here. The message matters more.
                    await publish(topic, body, defer=defer)

        async def traced_publish_many(
            topic: str,
            bodies: Iterable[object],
            *,
            headers: Mapping[str, str] | Iterable[Mapping[str, str] | None] | None = None,
        ) -> None:
            # Both are gone over twice if the broker knows no headers.
            bodies = [*bodies]
            if headers is None or isinstance(headers, Mapping):
                each = [headers or {}] * len(bodies)
            else:
                each = [one or {} for one in headers]
            with self._publishing(topic, producer, len(bodies)) as added:
                try:
                    await publish_many(topic, bodies, headers=[_joined(one, added) for one in each])
                except HeadersNotSupported:
                    if any(each):
                        raise
                    await publish_many(topic, bodies)

        producer.publish = traced_publish  # type: ignore[method-assign]  # of this producer alone
        producer.publish_many = traced_publish_many  # type: ignore[method-assign]

    def trace_handler(self, handle: Handle, topic: str, channel: str) -> Handle:
        """A handler of a message, or of a list of them, that runs within a span. The span continues
        the trace of the message; for a list it has a link to the trace of each."""

        async def traced(given: Message | list[Message]) -> Any:
            with self._processing(given, topic, channel) as span, _noting_errors(span):
                return await handle(given)

        return traced

    def received(self, message: Message, topic: str, channel: str) -> None:
        """A span of no duration for a message that a loop has got."""
        attributes = _attributes_of("receive", topic, channel) | _message_attributes(message)
        self._tracer.start_span(
            f"receive {topic}", context_of(message), SpanKind.CONSUMER, attributes=attributes
        ).end()

    def failed(self, error: Exception) -> None:
        """Note an error in the present span."""
        _note(trace.get_current_span(), error)

    # spans

    @contextmanager
    def _publishing(self, topic: str, producer: Producer, count: int = 0) -> Iterator[dict[str, str]]:
        """A span. Gives the headers with its context."""
        attributes = _attributes_of("publish", topic) | (
            {"messaging.batch.message_count": count} if count else {}
        )
        with (
            self._tracer.start_as_current_span(
                f"publish {topic}",
                kind=SpanKind.PRODUCER,
                attributes=attributes,
                record_exception=False,
                set_status_on_exception=False,
            ) as span,
            _noting_errors(span),
        ):
            added: dict[str, str] = {}
            propagate.inject(added)
            yield {name.lower(): value for name, value in added.items()}
            span.set_attributes(_server(producer.address))

    @contextmanager
    def _processing(self, given: Message | list[Message], topic: str, channel: str) -> Iterator[Span]:
        attributes = _attributes_of("process", topic, channel)
        if isinstance(given, Message):
            parent = context_of(given)
            attributes |= _message_attributes(given)
            links = []
        else:
            parent = Context()
            attributes["messaging.batch.message_count"] = len(given)
            contexts = (trace.get_current_span(context_of(one)).get_span_context() for one in given)
            links = [Link(one) for one in contexts if one.is_valid]
        span = self._tracer.start_span(f"process {topic}", parent, SpanKind.CONSUMER, attributes, links)
        # With the baggage of the message.
        token = context.attach(trace.set_span_in_context(span, parent))
        try:
            yield span
        finally:
            context.detach(token)
            span.end()


def _joined(headers: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The headers with those of the trace in place of the user's, upper and lower case alike."""
    return {**{name: value for name, value in headers.items() if name.lower() not in added}, **added}


def context_of(message: Message) -> Context:
    """The context in which a message was published. In a loop over messages, begin your own spans
    with it: `tracer.start_as_current_span("bill", context=context_of(message))`."""
    return propagate.extract(message.headers, Context())


def _attributes_of(operation: str, topic: str, channel: str = "") -> Attributes:
    attributes: Attributes = {
        "messaging.system": "nsq",
        "messaging.operation.name": operation,
        "messaging.operation.type": _TYPES[operation],
        "messaging.destination.name": topic,
    }
    return attributes | ({"messaging.destination.subscription.name": channel} if channel else {})


def _message_attributes(message: Message) -> Attributes:
    return {
        "messaging.message.id": message.id.decode("ascii", "replace"),
        "messaging.message.body.size": len(message.body),
        "messaging.nsq.message.attempts": message.attempts,
        **_server(message.address),
    }


def _server(address: str) -> Attributes:
    host, port = split_address(address) or (address, 0)
    return {"server.address": host, **({"server.port": port} if port else {})} if host else {}


@contextmanager
def _noting_errors(span: Span) -> Iterator[None]:
    try:
        yield
    except Requeue:
        # The handler has decided so. It is not an error.
        raise
    except Exception as error:
        _note(span, error)
        raise


def _note(span: Span, error: Exception) -> None:
    span.record_exception(error)
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
