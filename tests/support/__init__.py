"""Shared harness of the tests: a raw protocol connection, and brokers in a thread or as a process.

    from tests.support import RawConnection, BrokerThread, BrokerProcess, wait_until, unique_name

RawConnection(address, magic=b"  V2")   address is (host, port) or the path of a Unix socket
    send(bytes)                         raw bytes
    command(name, *params, body=)       one command line, with a size-prefixed body if given
    identify(**fields) -> dict          IDENTIFY with feature negotiation; the parsed reply
    sub(topic, channel, rdy=None)       waits for OK, and so do these:
    pub(topic, body)  mpub(topic, bodies)  dpub(topic, ms, body)
    rdy(n)  fin(id)  req(id, ms)  touch(id)  nop()      no reply is awaited
    cls()                               waits for CLOSE_WAIT
    barrier()                           returns when all commands sent so far were executed;
                                        only while subscribed
    read_frame() -> Frame(type, data)   skips heartbeats and answers them with NOP
    read_raw_frame()                    heartbeats included
    read_message() -> Message(timestamp_ns, attempts, id, body)
    read_messages(count, finish=False)
    expect_ok()  expect_response(data)  expect_error(text)  expect_fatal(text)
    expect_closed()  expect_silence(s)
    end_of_stream()  abort()  close()   half close; reset; close
    Every read takes timeout=, by default the DEADLINE, and raises TimeoutError or
    ConnectionClosed.

BrokerThread(data_path=None, **flags)   our daemon in a background thread (uvloop if present)
    call(fn)                            fn(nsqd.broker) in the event loop's thread
    call_daemon(fn)                     fn(nsqd) there
    nsqd, loop                          the daemon and its event loop
BrokerProcess(data_path=None, **flags)  `python -m nsparq.server.main` as a real process
    kill()                              SIGKILL
    terminate() -> status, signal(n), wait() -> status, alive(), pid
    log                                 a file
    stderr_text()                       its stderr; also printed by close(), so that pytest shows
                                        it if the test fails
    launch()                            only Popen, for starts that must fail
Both are context managers. close() removes a data path that was created here.
    address, data_path, flags           flags in snake_case: mem_queue_size=10, msg_timeout=1.5
                                        (floats are seconds)
    start()  stop()  restart()  close() same data path and flags, usually another port
    connect() -> RawConnection
    publish(topic, *bodies)
    stats(topic, channel, include_clients)
    topic_stats(topic), channel_stats(topic, channel)       None if absent
    control(action, topic, channel="")  action: create delete empty pause unpause
    metadata()                          nsqd.dat as a dict
    http_address, https_address         None if it does not listen there
    http_connect(https=False, tls=None) -> HttpConnection   see tests/support/http.py
    request(method, target, body, headers) -> Answer        on a new connection
    http(method, path, body, **query) -> bytes              the same; the status must be 200
    stats() and control() of a process use its HTTP API.

start_broker(**flags), start_process(**flags)
    Ours, or the nsqd named by the environment variable NSPARQ_TEST_NSQD=/path/to/nsqd, which runs
    the suite against another NSQ-compatible nsqd. broker.is_reference is then True, and its HTTP
    API is used instead of call().

wait_until(fact)                        poll with a deadline
unique_name(prefix)                     a fresh topic or channel name
"""

from .brokers import (
    REFERENCE,
    BrokerDied,
    BrokerProcess,
    BrokerThread,
    ReferenceProcess,
    TestBroker,
    start_broker,
    start_process,
)
from .connection import (
    ERROR,
    HEARTBEAT,
    MAGIC,
    MESSAGE,
    RESPONSE,
    UNKNOWN_ID,
    ConnectionClosed,
    Frame,
    Message,
    RawConnection,
    multi,
    parse_message,
    sized,
)
from .http import JSON, NSQ_HEADER, TEXT, Answer, HttpConnection, encode_request
from .polling import DEADLINE, busy_s, unique_name, wait_until

__all__ = [
    "DEADLINE",
    "ERROR",
    "HEARTBEAT",
    "JSON",
    "MAGIC",
    "MESSAGE",
    "NSQ_HEADER",
    "REFERENCE",
    "RESPONSE",
    "TEXT",
    "UNKNOWN_ID",
    "Answer",
    "BrokerDied",
    "BrokerProcess",
    "BrokerThread",
    "ConnectionClosed",
    "Frame",
    "HttpConnection",
    "Message",
    "RawConnection",
    "ReferenceProcess",
    "TestBroker",
    "busy_s",
    "encode_request",
    "multi",
    "parse_message",
    "sized",
    "start_broker",
    "start_process",
    "unique_name",
    "wait_until",
]
