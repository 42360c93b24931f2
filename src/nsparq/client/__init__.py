"""A client for NSQ: producers and consumers for asyncio, and subscriptions by decorator. For
scripts without asyncio there is `nsparq.client.sync`."""

from nsparq.client.config import Config, ConfigError
from nsparq.client.consumer import Consumer
from nsparq.client.errors import (
    ClientError,
    ConnectFailed,
    HeadersNotSupported,
    NotConnected,
    PublishFailed,
    PublishTimeout,
    Stopped,
)
from nsparq.client.message import Message, Reject, Requeue
from nsparq.client.payloads.decode import DecodeFailed
from nsparq.client.producer import Producer
from nsparq.client.subscription import DeadLetter, Subscription, Subscriptions

__all__ = [
    "ClientError",
    "Config",
    "ConfigError",
    "ConnectFailed",
    "Consumer",
    "DeadLetter",
    "DecodeFailed",
    "HeadersNotSupported",
    "Message",
    "NotConnected",
    "Producer",
    "PublishFailed",
    "PublishTimeout",
    "Reject",
    "Requeue",
    "Stopped",
    "Subscription",
    "Subscriptions",
]
