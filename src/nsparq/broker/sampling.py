"""Clients that want only a share of the messages: IDENTIFY with `sample_rate`. The messages that
are left out count as finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsparq.broker.client import Client
from nsparq.broker.framing import frames_for
from nsparq.broker.runs import Run
from nsparq.private_random import private_random
from nsparq.storage.batch import Batch

if TYPE_CHECKING:
    from nsparq.broker.delivery import Delivery


def is_left_out(client: Client) -> bool:
    """Whether the client does not get the next message."""
    rate = client.identity.sample_rate
    return bool(rate) and private_random.randrange(100) > rate


def send_sample(
    delivery: Delivery, client: Client, batch: Batch, first_id: int, index: int, number: int, now_ns: int
) -> None:
    """Send a share of these new messages, which the cursor has passed."""
    buffer, offsets = frames_for(client, batch, first_id)
    deadline_ns = now_ns + client.msg_timeout_ns
    frames: list[bytes] = []
    for i in range(index, index + number):
        if is_left_out(client):
            continue
        first, stamp = batch.base + i, batch.timestamp_of(i)
        frames.append(buffer[offsets[i] : offsets[i + 1]])
        delivery.launch(Run(client, first, first + 1, first, now_ns, deadline_ns, 1, stamp))
    delivery.send_frames(client, frames)
