"""Group L: what is kept over a restart."""

from __future__ import annotations

import signal
import stat
import time

import pytest

from tests.support import BrokerDied, start_process, wait_until


def drain(broker, topic, channel, count: int, timeout: float = 10.0):
    """Read and finish exactly this many messages; none may follow."""
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=min(2500, max(1, count)))
        messages = connection.read_messages(count, timeout, finish=True)
        connection.barrier()
        connection.expect_silence(0.2)
        connection.cls()  # so that nothing more is sent here before the end is noticed
        return messages


def test_case_156_what_was_not_finished_is_delivered_after_a_restart(own_broker):
    broker = own_broker(mem_queue_size=100, max_bytes_per_file=10_240)
    bodies = [b"%03d" % number for number in range(300)]
    broker.control("create", "topic", "channel")
    broker.publish("topic", *bodies)
    with broker.connect() as connection:
        connection.sub("topic", "channel", rdy=10)
        done = []
        while len(done) < 150:
            message = connection.read_message()
            connection.fin(message.id)
            done.append(message.body)
        connection.rdy(0)
        connection.barrier()
    broker.restart()
    assert broker.topic_stats("topic")["depth"] == 0
    again = drain(broker, "topic", "channel", 150)
    assert sorted(done + [message.body for message in again]) == bodies
    stats = broker.channel_stats("topic", "channel")
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)


def test_case_156_messages_of_a_topic_without_channels_are_kept(own_broker):
    broker = own_broker(mem_queue_size=10)
    broker.publish("topic", *(b"%02d" % number for number in range(50)))
    broker.restart()
    assert broker.topic_stats("topic")["depth"] == 50
    messages = drain(broker, "topic", "channel", 50)
    assert sorted(message.body for message in messages) == [b"%02d" % number for number in range(50)]
    assert {message.attempts for message in messages} == {1}


def shape(broker) -> dict:
    return {
        topic["name"]: (topic["paused"], {found["name"]: found["paused"] for found in topic["channels"]})
        for topic in broker.metadata()["topics"]
    }


def test_case_157_metadata_lists_topics_and_channels(own_broker):
    broker = own_broker()
    broker.publish("alone", b"body")
    broker.control("create", "topic", "one")
    broker.control("create", "topic", "two")
    expected = {"alone": (False, {}), "topic": (False, {"one": False, "two": False})}
    wait_until(lambda: shape(broker) == expected)
    assert broker.metadata()["version"].count(".") == 2
    assert stat.S_IMODE((broker.data_path / "nsqd.dat").stat().st_mode) == 0o600
    broker.restart()
    assert shape(broker) == expected
    broker.control("delete", "topic", "one")
    if broker.is_reference:
        # NSQ may write the metadata just before the channel is removed; any other change corrects
        # it.
        broker.control("pause", "alone")
    wait_until(lambda: shape(broker)["topic"] == (False, {"two": False}))


def test_case_157_loading_does_not_write_a_partial_list(own_broker):
    broker = own_broker()
    for number in range(50):
        broker.control("create", f"topic{number}", "channel")
    wait_until(lambda: len(shape(broker)) == 50)
    broker.stop()
    content = (broker.data_path / "nsqd.dat").read_bytes()
    broker.start()
    # Any state of the file seen now must be complete.
    for _ in range(20):
        assert len(shape(broker)) == 50
        time.sleep(0.005)
    assert len(content) > 50


def test_case_158_pause_state_survives_a_restart(own_broker):
    broker = own_broker()
    broker.control("create", "paused", "channel")
    broker.control("create", "topic", "paused")
    broker.control("create", "topic", "open")
    broker.control("pause", "paused")
    broker.control("pause", "topic", "paused")
    expected = {"paused": (True, {"channel": False}), "topic": (False, {"paused": True, "open": False})}
    # NSQ writes the metadata before it answers a pause.
    wait_until(lambda: shape(broker) == expected)
    broker.restart()
    assert shape(broker) == expected
    assert broker.topic_stats("paused")["paused"] is True
    assert broker.channel_stats("topic", "paused")["paused"] is True
    assert broker.channel_stats("topic", "open")["paused"] is False
    broker.publish("topic", b"body")
    assert len(drain(broker, "topic", "open", 1)) == 1
    with broker.connect() as connection:
        connection.sub("topic", "paused", rdy=1)
        connection.expect_silence(0.2)
        broker.control("unpause", "topic", "paused")
        assert connection.read_message().body == b"body"
    broker.restart()
    assert broker.channel_stats("topic", "paused")["paused"] is False


def test_case_158_a_paused_topic_keeps_its_messages_over_a_restart(own_broker):
    broker = own_broker(mem_queue_size=2)
    broker.control("create", "topic", "channel")
    broker.publish("topic", b"before")
    wait_until(lambda: broker.channel_stats("topic", "channel")["depth"] == 1)
    broker.control("pause", "topic")
    broker.publish("topic", b"held 1", b"held 2", b"held 3", b"held 4")
    broker.restart()
    assert broker.topic_stats("topic")["depth"] == 4
    assert broker.channel_stats("topic", "channel")["depth"] == 1
    assert [message.body for message in drain(broker, "topic", "channel", 1)] == [b"before"]
    broker.control("unpause", "topic")
    again = sorted(message.body for message in drain(broker, "topic", "channel", 4))
    assert again == [b"held 1", b"held 2", b"held 3", b"held 4"]


def test_cases_159_and_160_what_was_emptied_or_deleted_stays_so_after_a_restart(own_broker):
    broker = own_broker(mem_queue_size=2)
    for topic in ("emptied", "deleted", "recreated", "channel_deleted", "topic_emptied"):
        broker.control("create", topic, "channel")
        broker.publish(topic, b"old", b"old", b"old", b"old")
        wait_until(lambda topic=topic: broker.channel_stats(topic, "channel")["depth"] == 4)
    broker.control("empty", "emptied", "channel")
    broker.control("delete", "deleted")
    broker.control("delete", "recreated")
    broker.control("delete", "channel_deleted", "channel")
    broker.publish("emptied", b"new")
    broker.publish("recreated", b"new")
    broker.publish("channel_deleted", b"new")
    broker.control("pause", "topic_emptied")
    broker.publish("topic_emptied", b"dropped", b"dropped", b"dropped")
    broker.control("empty", "topic_emptied")
    broker.control("unpause", "topic_emptied")
    broker.restart()
    assert broker.topic_stats("deleted") is None
    for topic in ("emptied", "recreated", "channel_deleted"):
        assert [message.body for message in drain(broker, topic, "channel", 1)] == [b"new"], topic
    assert len(drain(broker, "topic_emptied", "channel", 4)) == 4


def test_case_153_a_second_channel_does_not_get_older_messages_after_a_restart_either(own_broker):
    broker = own_broker()
    broker.publish("topic", b"old", b"old")
    broker.control("create", "topic", "first")
    wait_until(lambda: broker.channel_stats("topic", "first")["depth"] == 2)
    broker.control("create", "topic", "second")
    broker.restart()
    assert drain(broker, "topic", "second", 0) == []
    broker.publish("topic", b"new")
    assert [message.body for message in drain(broker, "topic", "second", 1)] == [b"new"]
    assert len(drain(broker, "topic", "first", 3)) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_case_161_a_clean_stop_keeps_memory_in_flight_deferred_and_topic_messages(own_process, number):
    process = own_process()
    process.publish("kept_at_topic", b"topic 1", b"topic 2")
    with process.connect() as connection, process.connect() as publisher:
        publisher.mpub("topic", [b"in flight", b"requeued", b"queued 1", b"queued 2"])
        connection.sub("topic", "channel", rdy=2)
        held = {message.body: message for message in connection.read_messages(2)}
        assert set(held) == {b"in flight", b"requeued"}
        connection.rdy(0)
        connection.req(held[b"requeued"].id, 1500)
        publisher.dpub("topic", 1500, b"deferred")
        connection.barrier()
        process.signal(number)
        # No last frame.
        connection.expect_closed()
    assert process.wait() == 0
    process.start()
    again = {message.body: message for message in drain(process, "topic", "channel", 5)}
    attempts = {body: message.attempts for body, message in again.items()}
    assert attempts == {b"in flight": 2, b"requeued": 2, b"queued 1": 1, b"queued 2": 1, b"deferred": 1}
    for body, message in held.items():
        assert (again[body].id, again[body].timestamp_ns) == (message.id, message.timestamp_ns)
    kept = drain(process, "kept_at_topic", "channel", 2)
    assert sorted(message.body for message in kept) == [b"topic 1", b"topic 2"]


@pytest.mark.deviation("NSQ forgets deferral at shutdown, and deferred messages when killed")
@pytest.mark.parametrize("crash", [False, True], ids=["clean stop", "kill -9"])
def test_case_161_due_times_and_attempts_survive(own_process, crash):
    process = own_process()
    with process.connect() as connection, process.connect() as publisher:
        connection.sub("topic", "channel", rdy=1)
        publisher.pub("topic", b"requeued")
        requeued = connection.read_message()
        connection.req(requeued.id, 2500)
        requeued = None
        start = time.monotonic()
        publisher.dpub("topic", 2500, b"deferred")
        connection.barrier()
        if crash:
            # The requeue is in the checkpoint that is written every second; the publish was stored
            # at its OK.
            connection.expect_silence(1.5)
    if crash:
        process.kill()
    else:
        assert process.terminate() == 0
    process.start()
    with process.connect() as connection:
        connection.sub("topic", "channel", rdy=2)
        messages = {message.body: message for message in connection.read_messages(2)}
        assert time.monotonic() - start >= 2.4
    assert messages[b"deferred"].attempts == 1
    assert messages[b"requeued"].attempts == 2


@pytest.mark.deviation("NSQ writes a deferred publish that overflows memory to disk, without its delay")
def test_case_172_deferral_survives_overflow(own_broker):
    broker = own_broker(mem_queue_size=2)
    with broker.connect() as connection:
        start = time.monotonic()
        for number in range(5):
            connection.dpub("topic", 2500, b"later %d" % number)
        connection.mpub("topic", [b"now %d" % number for number in range(20)])
        connection.sub("topic", "channel", rdy=100)
        first = connection.read_messages(20)
        assert {message.body[:3] for message in first} == {b"now"}
        later = connection.read_messages(5)
        assert time.monotonic() - start >= 2.45
        assert {message.body[:5] for message in later} == {b"later"}


@pytest.mark.deviation("in NSQ the delay begins when the message reaches a channel")
def test_case_100_the_delay_counts_from_the_publish(own_broker):
    broker = own_broker()
    with broker.connect() as connection:
        start = time.monotonic()
        connection.dpub("topic", 800, b"later")
        connection.dpub("topic", 100, b"sooner")
        time.sleep(0.4)
        connection.sub("topic", "channel", rdy=2)
        assert connection.read_message().body == b"sooner"
        assert connection.read_message().body == b"later"
        assert time.monotonic() - start >= 0.75


def refused(data_path) -> BrokerDied:
    with pytest.raises(BrokerDied) as caught, start_process(data_path):
        pass
    return caught.value


def test_case_170_second_daemon_on_the_same_data_path_refuses_to_start(own_process):
    process = own_process()
    process.publish("topic", b"body")
    error = refused(process.data_path)
    assert error.status == 1
    expected = (
        f"failed to lock data-path: cannot flock directory {process.data_path} - "
        "resource temporarily unavailable (possibly in use by another instance of nsqd)"
    )
    assert expected in str(error)
    # The first one keeps running, and after its end the path is free.
    process.publish("topic", b"body")
    process.restart()
    assert len(drain(process, "topic", "channel", 2)) == 2


@pytest.mark.deviation("NSQ refuses to start")
@pytest.mark.parametrize("content", [b"", b"{", b"garbage", b'{"topics":1}'])
def test_case_171_unparsable_metadata_is_kept_aside_and_the_topics_are_found(tmp_path, content):
    with start_process(tmp_path) as process:
        process.publish("topic", b"body")
    (tmp_path / "nsqd.dat").write_bytes(content)
    with start_process(tmp_path) as process:
        assert shape(process) == {"topic": (False, {})}
    assert (tmp_path / "nsqd.dat.bad").read_bytes() == content


def test_case_171_metadata_written_by_nsq_is_read(tmp_path):
    (tmp_path / "nsqd.dat").write_text(
        '{"topics":[{"name":"t","paused":true,"channels":[{"name":"c","paused":true}]},'
        '{"name":"alone","paused":false,"channels":null},{"name":"bad!","paused":false,"channels":[]}],'
        '"version":"1.3.0"}'
    )
    with start_process(tmp_path) as process:
        wait_until(
            lambda: shape(process) == {"t": (True, {"c": True}), "alone": (False, {})},
            what="the same topics without the invalid name",
        )


def test_case_171_metadata_with_null_topics_is_an_empty_start(tmp_path):
    (tmp_path / "nsqd.dat").write_text('{"topics":null,"version":"1.3.0"}')
    with start_process(tmp_path) as process:
        process.publish("topic", b"body")


def test_missing_data_path_refuses_to_start(tmp_path):
    error = refused(tmp_path / "absent")
    assert error.status == 1
    assert "failed to lock data-path" in str(error)
