"""One function for each command, to be read from top to bottom.

Fatal errors are raised: the connection replies with the error and closes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.seen_numbers import NumberRefused
from nsparq.broker.topic import Topic
from nsparq.errors import (
    ClientError,
    Exiting,
    FatalClientError,
    NotReplicated,
    StorageError,
    SubscribeRefused,
)
from nsparq.server.outbox import MAX_UNANSWERED
from nsparq.wire import commands
from nsparq.wire.frames import CLOSE_WAIT, OK, RESPONSE, encode_frame
from nsparq.wire.server import CLOSING, SUBSCRIBED

if TYPE_CHECKING:
    from nsparq.server.connection import Connection


def identify(connection: Connection, command: commands.Identify) -> None:
    connection.client.identify(command.identity)
    connection.restart_timer()
    connection.answer_publishes()
    connection.outbox.reply(encode_frame(RESPONSE, command.identity.reply(connection.nsqd.limits)))
    connection.start_layers()


def auth(connection: Connection, command: commands.Auth) -> None:
    connection.auth.take_secret(command.secret)

    async def check() -> None:
        grant = await connection.auth.authenticate()
        if not grant.authorizations:
            raise FatalClientError("E_UNAUTHORIZED", "AUTH no authorizations found")
        connection.outbox.reply(encode_frame(RESPONSE, grant.reply()))

    connection.wait_for(check())


def subscribe(connection: Connection, command: commands.Subscribe) -> None:
    if not _is_permitted(connection, command, "SUB", command.topic, command.channel):
        return
    client, broker = connection.client, connection.nsqd.broker
    try:
        broker.subscribe(client, command.topic, command.channel)
    except (Exiting, SubscribeRefused, OSError) as error:
        raise FatalClientError("E_SUB_FAILED", f"SUB failed {reason_of(error)}") from error
    client.state = SUBSCRIBED
    channel = client.channel
    if channel is None or connection.nsqd.is_durable(channel.topic):
        connection.outbox.reply(OK)
    else:
        connection.wait_for(_confirm_subscription(connection, channel.topic))


async def _confirm_subscription(connection: Connection, topic: Topic) -> None:
    """The channel may be new. With `--durability=fsync` it is on disk before the client is
    answered, and with replication on every node that may take over."""
    try:
        await connection.nsqd.durable(topic)
    except (OSError, NotReplicated) as error:
        raise FatalClientError("E_SUB_FAILED", f"SUB failed {reason_of(error)}") from error
    connection.outbox.reply(OK)


def publish(connection: Connection, command: commands.Publish) -> None:
    """PUB, MPUB and DPUB, or a run of PUBs or MPUBs to one topic, each with its own answer."""
    verb, topic_name = command.verb, command.topic
    if connection.auth.is_required and not _is_permitted(connection, command, verb, topic_name, ""):
        return
    broker, outbox, count = connection.nsqd.broker, connection.outbox, len(command.counts) or 1
    outbox.unanswered += count
    try:
        topic = broker.topics.get(topic_name) or broker.get_topic(topic_name)
        topic.publishing.publish(
            command.bodies,
            command.defer_ms * 1_000_000,
            partial(connection.published, count, verb),
            has_company=connection.protocol.has_more,
        )
    except NumberRefused as error:
        outbox.unanswered -= count
        _publish_before(connection, command, error.index)
        raise FatalClientError(f"E_{error.code}", f"{verb} {error}") from error
    except (Exiting, StorageError, OSError) as error:
        outbox.unanswered -= count
        raise FatalClientError(f"E_{verb}_FAILED", f"{verb} failed {reason_of(error)}") from error
    connection.client.publish_counts[topic_name] += len(command.bodies.lengths)
    if not outbox.unanswered:
        # It was appended at once. The client can prepare its next publish while we serve others.
        connection.nsqd.oks.send()
    elif outbox.unanswered >= MAX_UNANSWERED:
        connection.adjust_reading()
    member = connection.lane_member
    member.lone_publishes = 0 if command.counts or verb != "PUB" else member.lone_publishes + 1
    if member.lone_publishes >= member.join_after:
        member.join(connection, topic, has_headers=command.bodies.headers is not None)


def _publish_before(connection: Connection, command: commands.Publish, index: int) -> None:
    """A message of a run was refused: publish the commands before the one that has it. The client
    takes the error for the answer to its oldest publish without one."""
    accepted = bisect_right([*accumulate(command.counts)], index)
    if accepted:
        counts = command.counts[:accepted]
        publish(connection, command._replace(bodies=command.bodies.split(sum(counts))[0], counts=counts))


def ready(connection: Connection, command: commands.Ready) -> None:
    if connection.client.channel is not None:
        connection.client.channel.set_ready(connection.client, command.count)


def finish(connection: Connection, command: commands.Finish) -> None:
    client, channel = connection.client, connection.client.channel
    if channel is not None:
        for error in channel.delivery.finish(client, command.spans, connection.nsqd.broker.monotonic_ns()):
            connection.fail(error)


def requeue(connection: Connection, command: commands.Requeue) -> None:
    client, channel = connection.client, connection.client.channel
    if channel is not None:
        now_ns = connection.nsqd.broker.monotonic_ns()
        try:
            channel.delivery.requeue(client, command.id, command.timeout_ms, now_ns)
        except ClientError as error:
            connection.fail(error)


def touch(connection: Connection, command: commands.Touch) -> None:
    client, channel = connection.client, connection.client.channel
    if channel is not None:
        try:
            channel.delivery.touch(client, command.id, connection.nsqd.broker.monotonic_ns())
        except ClientError as error:
            connection.fail(error)


def start_close(connection: Connection, command: commands.StartClose) -> None:
    connection.client.ready_count = 0
    connection.client.state = CLOSING
    connection.outbox.reply(CLOSE_WAIT)


def refuse(connection: Connection, command: commands.Refusal) -> None:
    connection.fail(command.error)


def _is_permitted(
    connection: Connection, command: commands.Command, verb: str, topic: str, channel: str
) -> bool:
    """Whether the client may do this. False if the auth server has to be asked: the command is then
    executed again when the answer has come. Raises FatalClientError if the client may not."""
    auth = connection.auth
    if not auth.is_required:
        return True
    if auth.has_expired:
        connection.wait_for(auth.authenticate(), command)
        return False
    auth.require(verb, topic, channel)
    return True


def reason_of(error: Exception) -> str:
    """The reason of a failure as a client may know it: never a path."""
    if isinstance(error, OSError):
        return error.strerror or "disk error"
    cause = error.__cause__
    if isinstance(error, StorageError) and isinstance(cause, OSError):
        return cause.strerror or "disk error"
    return str(error)


EXECUTE: Final[dict[type, Callable[[Connection, Any], None]]] = {
    commands.Publish: publish,
    commands.Finish: finish,
    commands.Ready: ready,
    commands.Requeue: requeue,
    commands.Touch: touch,
    commands.Identify: identify,
    commands.Auth: auth,
    commands.Subscribe: subscribe,
    commands.StartClose: start_close,
    commands.Refusal: refuse,
}
