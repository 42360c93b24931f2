"""Where messages go that were given up: to a topic on the nsqd that they came from."""

from __future__ import annotations

from nsparq.client.config import Config
from nsparq.client.producer import Producer
from nsparq.names import is_valid_name


def check_dead_letter(dead_letter: object, topic: str) -> None:
    """Raises ValueError for what cannot take the dead letters of a topic."""
    if isinstance(dead_letter, str) and not is_valid_name(dead_letter.encode()):
        raise ValueError(f"invalid topic name {dead_letter!r}")
    if dead_letter == topic:
        raise ValueError("a topic cannot take its own dead letters")


class DeadLetters:
    """A producer for each nsqd that has had something to bury. stop() ends them; then it can go on anew."""

    def __init__(self, config: Config, *, retry: bool = False) -> None:
        self._config, self._retry = config, retry
        self._producers: dict[str, Producer] = {}

    async def publish(self, address: str, topic: str, body: bytes) -> None:
        """Returns when the nsqd at `address` has it. Raises ClientError."""
        producer = self._producers.get(address)
        if producer is None:
            producer = self._producers[address] = Producer(address, retry=self._retry, config=self._config)
        await producer.publish(topic, body)

    async def stop(self) -> None:
        while self._producers:
            await self._producers.popitem()[1].stop()
