"""A client for NSQ: producers and consumers for asyncio. `nsparq.client.sync` has the same for scripts."""

from nsparq.client.config import Config, ConfigError
from nsparq.client.consumer import Consumer
from nsparq.client.errors import (
    ClientError,
    ConnectFailed,
    NotConnected,
    PublishFailed,
    PublishTimeout,
    Stopped,
)
from nsparq.client.message import Message, Reject, Requeue
from nsparq.client.producer import Producer

__all__ = [
    "ClientError",
    "Config",
    "ConfigError",
    "ConnectFailed",
    "Consumer",
    "Message",
    "NotConnected",
    "Producer",
    "PublishFailed",
    "PublishTimeout",
    "Reject",
    "Requeue",
    "Stopped",
]
