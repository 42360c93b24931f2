"""Traces with OpenTelemetry: a request, the message that it publishes, and its handler are one
trace."""

import asyncio

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from nsparq.client import Config, Consumer, Message, Producer
from nsparq.integrations.opentelemetry import OpenTelemetry

provider = TracerProvider(resource=Resource({"service.name": "shop"}))
# In production: OTLPSpanExporter, in a BatchSpanProcessor.
exporter = ConsoleSpanExporter(formatter=lambda span: f"{span.name} {span.context.trace_id:032x}\n")
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("shop")

config = Config(tracing=OpenTelemetry())


async def main() -> None:
    done = asyncio.Event()

    async def bill(message: Message) -> None:
        with tracer.start_as_current_span("bill"):
            done.set()

    async with Producer("127.0.0.1:4150", config=config) as producer:
        with tracer.start_as_current_span("order"):
            await producer.publish("orders", b"tea")
    async with Consumer("orders", "billing", bill, nsqd=["127.0.0.1:4150"], config=config):
        await done.wait()


asyncio.run(main())
