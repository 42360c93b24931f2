"""A topic for messages that were given up."""

from __future__ import annotations

from nsparq.client.config import Config
from nsparq.client.message import Message
from nsparq.client.producer import Producer
from nsparq.names import is_valid_name


class DeadLetters:
    """A topic for messages that were given up, on the nsqd that they came from."""

    def __init__(self, topic: str, config: Config) -> None:
        """Raises ValueError."""
        if not is_valid_name(topic.encode()):
            raise ValueError(f"invalid topic name {topic!r}")
        self._topic, self._config = topic, config
        self._producers: dict[str, Producer] = {}

    async def publish(self, message: Message) -> None:
        """Returns when the broker has it. Raises ClientError."""
        producer = self._producers.get(message.address)
        if producer is None:
            producer = self._producers[message.address] = Producer(message.address, config=self._config)
        await producer.publish(self._topic, message.body)

    async def stop(self) -> None:
        for producer in self._producers.values():
            await producer.stop()
