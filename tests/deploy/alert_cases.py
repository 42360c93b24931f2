"""For every alert: a situation in which it fires, and similar ones in which it must not.

A series is in promtool's notation, one value a minute: `1x4 0x10` is five times 1 and eleven times
0, `0+5x60` grows by 5.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    alert: str
    trouble: dict[str, str]
    """Values by metric."""
    not_yet: int
    """Minutes after which it does not fire yet."""
    fires: int
    """Minutes after which it fires."""
    normal: tuple[dict[str, str], ...]
    """Changes to `trouble`, each of which keeps it from firing."""


CASES = (
    Case("NsqdDown", {'up{job="nsqd"}': "1x4 0x20"}, 5, 7, ({'up{job="nsqd"}': "1x20"},)),
    Case("NsqdUnhealthy", {"nsqd_healthy": "1x4 0x20"}, 5, 7, ({"nsqd_healthy": "1x20"},)),
    Case(
        "NsqdClusterWithoutPrimary",
        {
            'nsqd_replication_info{cluster="c",node="a",role="primary"}': "1x4 stale",
            'nsqd_replication_info{cluster="c",node="b",role="follower"}': "1x4 stale",
            'nsqd_replication_info{cluster="c",node="b",role="waiting"}': "_x4 1x20",
        },
        5,
        7,
        ({'nsqd_replication_info{cluster="c",node="a",role="primary"}': "1x20"},),
    ),
    Case(
        "NsqdClusterDegraded",
        {
            'nsqd_replication_problems{instance="a"}': "0x4 1x20",
            'nsqd_replication_primary{instance="a"}': "1x24",
        },
        6,
        8,
        (
            {'nsqd_replication_problems{instance="a"}': "0x4 1x1 0x20"},
            # A follower that starts. Its primary knows.
            {'nsqd_replication_primary{instance="a"}': "0x24"},
        ),
    ),
    Case(
        "NsqdCoordinatorDown",
        {"nsqd_replication_coordinator_up": "1x4 0x20"},
        6,
        8,
        ({"nsqd_replication_coordinator_up": "1x20"},),
    ),
    Case(
        "NsqdArchiveNotWritten",
        {'nsqd_topic_archive_failing{topic="t"}': "0x4 1x30"},
        19,
        21,
        ({'nsqd_topic_archive_failing{topic="t"}': "0x4 1x10 0x20"},),
    ),
    Case(
        "NsqdArchiveNotRead",
        {"nsqd_archive_fetch_failing": "0x4 1x20"},
        9,
        11,
        ({"nsqd_archive_fetch_failing": "0x20"},),
    ),
    Case(
        "NsqdDiskNearlyFull",
        {"nsqd_disk_free_bytes": "40x20", "nsqd_disk_size_bytes": "1000x20"},
        4,
        6,
        ({"nsqd_disk_free_bytes": "60x20"},),
    ),
    Case(
        "NsqdDiskFilling",
        {"nsqd_disk_free_bytes": "390-1x60", "nsqd_disk_size_bytes": "1000x60"},
        20,
        40,
        ({"nsqd_disk_free_bytes": "390x60"}, {"nsqd_disk_free_bytes": "900-1x60"}),
    ),
    Case(
        "NsqdMessagesLost",
        {'nsqd_topic_corrupt_messages_total{topic="t"}': "0x5 3x20"},
        5,
        6,
        ({'nsqd_topic_corrupt_messages_total{topic="t"}': "3x20"},),
    ),
    Case(
        "NsqdMessagesDropped",
        {'nsqd_channel_dropped_messages_total{topic="t",channel="c"}': "0x5 3x20"},
        5,
        6,
        (
            {
                'nsqd_channel_dropped_messages_total{topic="t",channel="c"}': "0x20",
                'nsqd_channel_dropped_messages_total{topic="t",channel="c#ephemeral"}': "0x5 3x20",
            },
        ),
    ),
    Case(
        "NsqdDeadLetters",
        {'nsqd_channel_dead_letters_total{topic="t",channel="c"}': "0x5 3x20"},
        5,
        6,
        ({'nsqd_channel_dead_letters_total{topic="t",channel="c"}': "3x20"},),
    ),
    Case(
        "NsqdSlow",
        {
            'nsqd_loop_lag_seconds_bucket{le="0.1"}': "0x30",
            'nsqd_loop_lag_seconds_bucket{le="1.0"}': "0+9x30",
            'nsqd_loop_lag_seconds_bucket{le="+Inf"}': "0+9x30",
        },
        8,
        12,
        ({'nsqd_loop_lag_seconds_bucket{le="0.1"}': "0+9x30"},),
    ),
    Case(
        "NsqdFewFilesLeft",
        {'process_open_fds{job="nsqd"}': "90x20", 'process_max_fds{job="nsqd"}': "100x20"},
        8,
        12,
        ({'process_open_fds{job="nsqd"}': "50x20"},),
    ),
    Case("NsqlookupdDown", {'up{job="nsqlookupd"}': "1x4 0x20"}, 6, 8, ({'up{job="nsqlookupd"}': "1x20"},)),
    Case(
        "NsqlookupdWithoutNsqds",
        {"nsqlookupd_active_producers": "2x4 0x20"},
        9,
        11,
        ({"nsqlookupd_active_producers": "2x4 0x3 2x20"},),
    ),
    Case("NsqadminDown", {'up{job="nsqadmin"}': "1x4 0x20"}, 9, 11, ({'up{job="nsqadmin"}': "1x20"},)),
    Case(
        "NsqadminWebhookFails",
        {"nsqadmin_webhook_failing": "0x4 1x20"},
        13,
        16,
        ({"nsqadmin_webhook_failing": "0x20"},),
    ),
    Case(
        "NsqChannelWithoutConsumers",
        {
            'nsqd_channel_clients{topic="t",channel="c"}': "0x40",
            'nsqd_channel_depth{topic="t",channel="c"}': "500x40",
        },
        12,
        20,
        (
            {'nsqd_channel_clients{topic="t",channel="c"}': "1x40"},
            # A Spark stream reads it.
            {'nsqd_channel_depth{topic="t",channel="c"}': "500-5x40"},
        ),
    ),
    Case(
        "NsqChannelGrowing",
        {
            'nsqd_channel_clients{topic="t",channel="c"}': "1x60",
            'nsqd_channel_depth{topic="t",channel="c"}': "1000+50x60",
        },
        20,
        40,
        ({'nsqd_channel_depth{topic="t",channel="c"}': "5000x60"},),
    ),
    Case(
        "NsqChannelLate",
        {
            'nsqd_channel_clients{topic="t",channel="c"}': "1x40",
            'nsqd_channel_oldest_message_age_seconds{topic="t",channel="c"}': "0+60x40",
        },
        18,
        25,
        (
            {'nsqd_channel_oldest_message_age_seconds{topic="t",channel="c"}': "300x40"},
            # NsqChannelWithoutConsumers is for this.
            {'nsqd_channel_clients{topic="t",channel="c"}': "0x40"},
        ),
    ),
    Case(
        "NsqChannelDrainsSlowly",
        {
            'nsqd_channel_clients{topic="t",channel="c"}': "1x60",
            'nsqd_channel_depth{topic="t",channel="c"}': "5000x60",
            'nsqd_channel_drain_time_seconds{topic="t",channel="c"}': "90000x60",
        },
        20,
        40,
        (
            {'nsqd_channel_drain_time_seconds{topic="t",channel="c"}': "3600x60"},
            {'nsqd_channel_depth{topic="t",channel="c"}': "50x60"},
        ),
    ),
    Case(
        "NsqMessagesTimeOut",
        {
            'nsqd_channel_timed_out_messages_total{topic="t",channel="c"}': "0+10x40",
            'nsqd_channel_messages_total{topic="t",channel="c"}': "0+100x40",
        },
        12,
        20,
        ({'nsqd_channel_timed_out_messages_total{topic="t",channel="c"}': "0+1x40"},),
    ),
    Case(
        "NsqMessagesRequeued",
        {
            # The same message again and again: nothing is published.
            'nsqd_channel_requeued_messages_total{topic="t",channel="c"}': "0+60x40",
            'nsqd_channel_messages_total{topic="t",channel="c"}': "1x40",
        },
        12,
        20,
        ({'nsqd_channel_messages_total{topic="t",channel="c"}': "0+200x40"},),
    ),
    Case(
        "NsqTopicWithoutChannels",
        {'nsqd_topic_depth{topic="t"}': "0+10x100"},
        50,
        70,
        ({'nsqd_topic_depth{topic="t"}': "10x100"},),
    ),
    Case(
        "NsqTransactionsLeft",
        {"nsqd_transactions_open": "1x100", "nsqd_transactions_committed_total": "5x100"},
        50,
        70,
        ({"nsqd_transactions_committed_total": "0+1x100"}, {"nsqd_transactions_open": "0x100"}),
    ),
    Case(
        "NsqTransactionDamaged",
        {"nsqd_transactions_damaged": "0x5 1x20"},
        5,
        6,
        ({"nsqd_transactions_damaged": "0x20"},),
    ),
    Case(
        "PipelineRunnerDown",
        {'up{job="nsparq-pipelines"}': "1x4 0x20"},
        6,
        8,
        ({'up{job="nsparq-pipelines"}': "1x20"},),
    ),
    Case(
        "PipelineNotRunning",
        {'nsparq_pipeline_up{pipeline="p"}': "1x4 0x20"},
        8,
        11,
        # It was restarted within five minutes.
        ({'nsparq_pipeline_up{pipeline="p"}': "1x4 0x3 1x20"},),
    ),
    Case(
        "PipelineFailing",
        {'nsparq_pipeline_failures_total{pipeline="p"}': "0+1x40"},
        1,
        6,
        ({'nsparq_pipeline_failures_total{pipeline="p"}': "0x3 1x40"},),
    ),
    Case(
        "PipelineStuck",
        {
            'nsparq_pipeline_lag_messages{pipeline="p"}': "5x40",
            # The clock of a case begins at 0.
            'nsparq_pipeline_last_batch_timestamp_seconds{pipeline="p"}': "0x40",
        },
        18,
        22,
        (
            {'nsparq_pipeline_lag_messages{pipeline="p"}': "0x40"},
            {'nsparq_pipeline_last_batch_timestamp_seconds{pipeline="p"}': "0+60x40"},
        ),
    ),
    Case(
        "PipelineFallsBehind",
        {'nsparq_pipeline_lag_messages{pipeline="p"}': "1000+50x60"},
        20,
        40,
        ({'nsparq_pipeline_lag_messages{pipeline="p"}': "5000x60"},),
    ),
    Case(
        "PipelineDeadLetters",
        {'nsparq_pipeline_undecodable_total{pipeline="p"}': "0x5 3x20"},
        5,
        6,
        ({'nsparq_pipeline_undecodable_total{pipeline="p"}': "3x20"},),
    ),
)
