"""Producers and consumers that were made before fork(), as servers with preforked workers do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from nsparq.testing import Broker, run_broker
from tests.support.certificates import certificates
from tests.support.polling import DEADLINE, wait_until

PRELUDE = """
import asyncio, json, multiprocessing, os, sys
from nsparq.client import Config, Consumer, Message, Producer, Subscriptions
import nsparq.client.sync

address, is_tls, loop = json.loads(sys.argv[1])
config = Config(tls_v1=is_tls, tls_insecure_skip_verify=is_tls)
if loop == "uvloop":
    import uvloop
    run = uvloop.run
else:
    run = asyncio.run
producer = Producer(address, config=config)
app = Subscriptions(nsqd=[address], config=config)
handled = asyncio.Queue()

@app.subscribe("numbers", "ch", payload=Message)
async def handle(message):
    handled.put_nowait(message)

fork = multiprocessing.get_context("fork")

def end(processes):
    for process in processes:
        process.join()
        assert process.exitcode == 0
"""

# The parent's event loop, its producer and its consumer run while children are forked.
RUNNING = (
    PRELUDE
    + """
def child(number, consumer, message):
    async def work():
        message.finish()  # it is the parent's: nothing happens
        for method in (consumer.stop(), consumer.connect(address)):
            try:
                await method
            except RuntimeError as error:
                await producer.publish("errors", str(error))
        for _ in range(3):
            await producer.publish("children", number)
        await producer.publish("numbers", number)
        async with app:
            await handled.get()
        await producer.stop()
    global handled
    handled = asyncio.Queue()
    run(work())

async def main():
    await producer.publish("parent", 1)
    await producer.publish("held", 1)
    held = asyncio.Event()
    async def hold(message):
        message.auto_response = False
        consumer.message = message
        held.set()
    consumer = Consumer("held", "ch", hold, nsqd=[address], config=config)
    async with consumer, app:
        await held.wait()
        processes = [fork.Process(target=child, args=(n, consumer, consumer.message)) for n in range(3)]
        for process in processes:
            process.start()
            await producer.publish("parent", 2)
        # Each child takes one of these, unless the parent does.
        while any(process.is_alive() for process in processes):
            await producer.publish("numbers", 0)
            await asyncio.sleep(0.01)
        end(processes)
        await producer.publish("parent", 3)
        consumer.message.finish()
        assert consumer.messages_finished == 1
    await producer.stop()

run(main())
"""
)

# Everything is made before the first fork, then the parent only waits, as gunicorn does.
PRELOADED = (
    PRELUDE
    + """
script = nsparq.client.sync.Producer(address, config=config)

async def publish(topic, value):
    await producer.publish(topic, value)

script.publish("parent", 1)
for number in range(3):
    if not os.fork():
        script.publish("children", number)
        run(publish("children", number))
        script.publish("children", number)
        script.close()
        os._exit(0)
for _ in range(3):
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
script.publish("parent", 2)
script.close()
"""
)

# A child that lives on must not keep the parent's connections open. nsqd would find out after two
# heartbeats.
LIVES_ON = (
    PRELUDE
    + """
from dataclasses import replace

config = replace(config, heartbeat_interval=60.0)

async def main():
    producer = Producer(address, config=config)
    await producer.publish("parent", 1)
    consumer = Consumer("numbers", "ch", handled.put, nsqd=[address], config=config)
    await consumer.start()
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    await producer.stop()
    await consumer.stop()
    print("closed", flush=True)
    sys.stdin.read()
    os.close(writes)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

run(main())
"""
)


# The lifespan of the parent holds what the parent uses, for example a pool of connections.
LIFESPANS = (
    PRELUDE
    + """
import gc

parent = os.getpid()

def here():
    return "parent" if os.getpid() == parent else "child"

class Lifespan:
    def __init__(self):
        self.owner = here()

    async def __aenter__(self):
        pass

    async def __aexit__(self, *_):
        print(self.owner, "left in", here(), flush=True)

    def __del__(self):
        print(self.owner, "dropped in", here(), flush=True)

app = Subscriptions(nsqd=[address], lifespan=Lifespan, config=config)

def child():
    async def work():
        async with app:
            pass
        gc.collect()
    run(work())

async def main():
    async with app:
        process = fork.Process(target=child)
        process.start()
        while process.is_alive():
            await asyncio.sleep(0.01)
        end([process])

run(main())
gc.collect()
"""
)


def command(program: str, broker: Broker, loop: str, is_tls: bool) -> list[str]:
    # Python 3.12 warns of any fork in a process that has threads.
    options = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    return [sys.executable, *options, "-c", program, json.dumps([broker.tcp_address, is_tls, loop])]


@pytest.mark.parametrize(
    ("program", "loop", "is_tls"),
    [(RUNNING, "asyncio", False), (RUNNING, "uvloop", True), (PRELOADED, "asyncio", True)],
    ids=["running", "running-uvloop-tls", "preloaded-tls"],
)
def test_clients_made_before_a_fork_work_in_parent_and_children(
    program: str, loop: str, is_tls: bool
) -> None:
    with run_broker(**(certificates().server_flags() if is_tls else {})) as broker:
        broker.create("numbers", "ch")
        result = subprocess.run(
            command(program, broker, loop, is_tls), capture_output=True, text=True, timeout=DEADLINE
        )
        # A lost connection would be logged.
        assert (result.stderr, result.returncode) == ("", 0)
        bodies = {
            topic: Counter(message.body for message in broker.peek(topic))
            for topic in ("children", "parent", "errors")
        }
        assert bodies["children"] == {b"0": 3, b"1": 3, b"2": 3}
        if program is RUNNING:
            assert bodies["parent"] == {b"1": 1, b"2": 3, b"3": 1}
            text = b"held/ch was started before fork() and runs in the parent: make another one"
            assert bodies["errors"] == {text: 6}
            broker.wait_empty("held", "ch")
        else:
            assert bodies["parent"] == {b"1": 1, b"2": 1}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_child_leaves_only_its_own_lifespan(loop: str) -> None:
    with run_broker() as broker:
        result = subprocess.run(
            command(LIFESPANS, broker, loop, False), capture_output=True, text=True, timeout=DEADLINE
        )
        assert (result.stderr, result.returncode) == ("", 0)
        assert result.stdout.splitlines() == [
            "child left in child",
            "child dropped in child",
            "parent left in parent",
            "parent dropped in parent",
        ]


@pytest.mark.parametrize(
    ("loop", "is_tls"), [("asyncio", False), ("asyncio", True), ("uvloop", False), ("uvloop", True)]
)
def test_a_connection_that_the_parent_closes_ends_although_a_child_lives_on(loop: str, is_tls: bool) -> None:
    with run_broker(**(certificates().server_flags() if is_tls else {})) as broker:
        broker.create("numbers", "ch")
        process = subprocess.Popen(
            command(LIVES_ON, broker, loop, is_tls),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            try:
                assert process.stdout.readline() == "closed\n"
                wait_until(lambda: not broker.stats()["producers"], what=broker.stats)
                wait_until(lambda: not broker.channel_stats("numbers", "ch")["clients"], what=broker.stats)  # type: ignore[index]  # it exists
            finally:
                said, errors = process.communicate(timeout=DEADLINE)
        assert (said, errors, process.returncode) == ("", "", 0)
