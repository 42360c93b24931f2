"""The figures of /stats: the shape of NSQ's, with keys of ours added.

`/metrics` and statsd are made from the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nsparq.broker.channel import TOPOLOGY_AWARE, Channel
from nsparq.broker.client import Client, Granted
from nsparq.broker.latency import summarize
from nsparq.broker.topic import Topic
from nsparq.broker.upkeep import SLICE_NS
from nsparq.version import NSQ_VERSION

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker


def broker_stats(
    broker: Broker, topic: str = "", channel: str = "", include_clients: bool = True
) -> dict[str, Any]:
    """All figures, or those of one topic or channel."""
    stats: dict[str, Any] = {}
    for _ in stats_in_slices(broker, stats, topic, channel, include_clients):
        pass
    return stats


def stats_in_slices(
    broker: Broker, stats: dict[str, Any], topic: str, channel: str, include_clients: bool
) -> Iterator[None]:
    """Fill in broker_stats(), with a break wherever it has taken long."""
    names = sorted(broker.topics) if not topic else [topic] if topic in broker.topics else []
    is_wanted = include_clients and bool(names or not topic)
    # Of one topic only those who publish to it: who may read it need not know the others.
    producers = [
        client_stats(client, topic)
        for client in broker.clients
        if is_wanted and (topic in client.publish_counts if topic else client.publish_counts)
    ]
    topics: list[dict[str, Any]] = []
    error, warnings = broker.health.of_topic(topic)
    stats |= {
        "version": NSQ_VERSION,
        "health": "OK" if error is None else f"NOK - {error}",
        "start_time": broker.start_s,
        "topics": topics if names or not topic else None,
        "producers": producers or None,
        "corrupt_files": broker.corrupt_files,
        "warnings": warnings,
    }
    stop_ns = broker.monotonic_ns() + SLICE_NS
    for name in names:
        shown = broker.topics.get(name)
        if shown is None or (channel and channel not in shown.channels):
            continue
        topics.append(topic_stats(shown, channel, include_clients))
        if broker.monotonic_ns() > stop_ns:
            yield
            stop_ns = broker.monotonic_ns() + SLICE_NS


def topic_stats(topic: Topic, channel: str = "", include_clients: bool = False) -> dict[str, Any]:
    """A topic with all its channels, or with one of them."""
    now_ns = topic.broker.monotonic_ns()
    names = sorted(topic.channels) if not channel else [channel]
    percentiles = topic.broker.options.e2e_processing_latency_percentile
    measured = [one.latency.buckets(now_ns) for one in topic.channels.values() if one.latency]
    return {
        "topic_name": topic.name,
        "channels": [channel_stats(topic.channels[name], include_clients) for name in names],
        "depth": topic.depth,
        "backend_depth": topic.backend_depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        "e2e_processing_latency": summarize(percentiles, measured),
        "dropped_count": topic.dropped_count,
        "corrupt_batches": topic.log.corrupt_batches,
        "corrupt_messages": topic.log.corrupt_messages,
        "corrupt_files": topic.corrupt_files,
        "log_bytes": topic.log.size_bytes,
        "repeated_count": 0 if topic.idempotence is None else topic.idempotence.repeated_count,
        "archive": None if topic.broker.archive is None else topic.broker.archive.stats_of(topic),
    }


def channel_stats(channel: Channel, include_clients: bool = False) -> dict[str, Any]:
    now_ns = channel.topic.broker.monotonic_ns()
    latency, depth = channel.latency, channel.depth
    return {
        "channel_name": channel.name,
        "depth": depth,
        "backend_depth": channel.backend_depth,
        "in_flight_count": len(channel.unfinished.in_flight),
        "deferred_count": len(channel.unfinished.deferred),
        "message_count": channel.message_count,
        **_local_counts(channel),
        "requeue_count": channel.requeue_count,
        "timeout_count": channel.timeout_count,
        "client_count": len(channel.clients),
        "clients": [client_stats(client) for client in channel.clients] if include_clients else None,
        "paused": channel.paused,
        "e2e_processing_latency": summarize(
            latency.percentiles if latency else (), [latency.buckets(now_ns)] if latency else []
        ),
        "dropped_count": channel.dropped_count,
        "dead_letter_count": channel.dead_letters.count,
        "expired_count": channel.retries.expired_count,
        "ordered_by": channel.ordering.ordered_by,
        "parked_count": len(channel.unfinished.parked),
        "owner": channel.owner,
        **channel.lag.stats(now_ns, depth),
    }


def _local_counts(channel: Channel) -> dict[str, int]:
    """Only with NSQ's experiment. NSQ leaves out counts of 0."""
    if TOPOLOGY_AWARE not in channel.topic.broker.options.enable_experiment:
        return {}
    names = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")
    return {name: count for name, count in zip(names, channel.delivery.counts, strict=True) if count}


def client_stats(client: Client, topic: str = "") -> dict[str, Any]:
    """A client with its publishes, or with those to one topic. Keys in NSQ's order."""
    identity, tls = client.identity, client.tls
    counts = {name: n for name, n in client.publish_counts.items() if topic in ("", name)}
    shown: dict[str, Any] = {
        "client_id": identity.client_id,
        "hostname": identity.hostname,
        "version": "V2",
        "remote_address": client.address,
        "state": client.state,
        "ready_count": client.ready_count,
        "in_flight_count": client.in_flight,
        "message_count": client.message_count,
        "finish_count": client.finish_count,
        "requeue_count": client.requeue_count,
        "connect_ts": client.connect_s,
        "sample_rate": identity.sample_rate,
        "deflate": identity.deflate,
        "snappy": identity.snappy,
        "user_agent": identity.user_agent,
        **_authorisation(client.grant),
        "topology_zone": identity.topology_zone,
        "topology_region": identity.topology_region,
    }
    if counts:
        shown["pub_counts"] = [{"topic": name, "count": count} for name, count in counts.items()]
    shown |= {
        "tls": tls is not None,
        "tls_cipher_suite": tls.cipher_suite if tls else "",
        "tls_version": tls.version if tls else "",
        "tls_negotiated_protocol": tls.negotiated_protocol if tls else "",
        "tls_negotiated_protocol_is_mutual": tls is not None,
    }
    return shown


def _authorisation(grant: Granted | None) -> dict[str, Any]:
    """NSQ leaves out keys without a value."""
    if grant is None:
        return {}
    named = {"auth_identity": grant.identity, "auth_identity_url": grant.identity_url}
    return {"authed": True, **{key: value for key, value in named.items() if value}}
