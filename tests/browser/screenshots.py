"""The pictures in the docs: `python -m tests.browser.screenshots` takes them of a live cluster.

A shop's events go through two nsqds for a few minutes, so that the charts have data. Some channels
have problems: one consumer is too slow, one hangs, one channel has no consumer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.admin.support import Cluster
from tests.browser.pictures import shrink
from tests.browser.visitor import Profile, Visitor, start_chromium
from tests.support import MESSAGE, ConnectionClosed, TestBroker, parse_message

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {
    "overview": "/",
    "channel": "/topics/payments/ledger",
    "messages": "/messages/payments.dead/review?count=20",
}
FAILURES = ("ValueError: amount is null", "TimeoutError: no answer after {} ms", "KeyError: 'currency'")
TICK_S = 0.1
PERIOD_S = 75.0
"""Traffic comes and goes in waves of this length."""
# For each topic the highest rate in messages per second; for each of its channels the consumers on
# each node, and the messages per second that one consumer can process.
SHOP: dict[str, tuple[int, dict[str, tuple[int, float]]]] = {
    "orders": (400, {"billing": (2, 1000), "warehouse": (1, 1000), "analytics": (1, 1000)}),
    "page_views": (900, {"sessions": (2, 2000), "archive": (1, 2000)}),
    "payments": (200, {"ledger": (1, 600), "fraud_check": (1, 45)}),
    "inventory.updates": (120, {"search_index": (1, 500), "old_reports": (0, 0)}),
    "emails": (90, {"send": (1, 400)}),
    "payments.dead": (1, {"review": (0, 0)}),
}


def body(topic: str, number: int) -> bytes:
    if topic.endswith(".dead"):
        held = json.dumps({"order": number, "amount": None})
        said = {"topic": "payments", "channel": "ledger", "id": f"{number:016x}", "attempts": 5}
        error = FAILURES[number % 7 % 3].format(number * 31 % 3000)
        return json.dumps({**said, "error": error, "text": held, "base64": None}).encode()
    event = {"id": number, "at": round(time.time(), 3), "customer": f"c-{number * 7919 % 10_000:04}"}
    return json.dumps({**event, "items": number % 5 + 1, "amount": number * 31 % 20_000 / 100}).encode()


def produce(nsqd: TestBroker, topic: str, most: int, phase: float, stop: threading.Event) -> None:
    owed, number = 0.0, random.randrange(1 << 20)
    with nsqd.connect() as connection:
        while not stop.wait(TICK_S):
            wave = 0.6 + 0.4 * math.sin(2 * math.pi * (time.time() / PERIOD_S + phase))
            owed += most / 2 * TICK_S * wave * random.uniform(0.7, 1.3)
            count = int(owed)
            owed -= count
            if count:
                connection.mpub(topic, [body(topic, number + one) for one in range(count)])
                number += count


def consume(
    nsqd: TestBroker, topic: str, channel: str, name: str, rate: float, stop: threading.Event
) -> None:
    with nsqd.connect() as connection:
        agent = f"shop-{channel}/3.1"
        connection.identify(client_id=name, hostname=name, user_agent=agent, msg_timeout=2000)
        connection.sub(topic, channel, rdy=50)
        while not stop.is_set():
            try:
                frame = connection.read_frame(timeout=0.5)
            except TimeoutError:
                continue
            except ConnectionClosed:
                return
            if frame.type != MESSAGE:  # too late with an answer
                continue
            message = parse_message(frame.data)
            if random.random() < 0.01:
                connection.req(message.id, 200)
            else:
                connection.fin(message.id)
            if rate < 100:
                stop.wait(1 / rate)


def hang(nsqd: TestBroker, stop: threading.Event) -> None:
    """Takes messages, and does not answer."""
    with nsqd.connect() as connection:
        connection.identify(
            client_id="mailer-2", hostname="mailer-2", user_agent="shop-send/3.1", msg_timeout=2000
        )
        connection.sub("emails", "send", rdy=3)
        while not stop.is_set():
            try:
                connection.read_frame(timeout=0.5)
            except (TimeoutError, ConnectionClosed):
                continue


class Traffic:
    def __init__(self, cluster: Cluster) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        for place, (topic, (most, channels)) in enumerate(SHOP.items()):
            cluster.add(topic, *channels)
            for number, nsqd in enumerate(cluster.nsqds):
                self._run(produce, nsqd, topic, most, place / 7)
                for channel, (count, rate) in channels.items():
                    for one in range(count):
                        name = f"{channel.replace('_', '-')}-{2 * one + number + 1}"
                        self._run(consume, nsqd, topic, channel, name, rate)
        self._run(hang, cluster.nsqds[0])

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=(*arguments, self._stop))
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=180, help="how long traffic runs before the pictures"
    )
    parser.add_argument("--to", type=Path, default=IMAGES, help="the folder that they go to")
    parser.add_argument(
        "--all", action="store_true", help="every page, also dark and narrow, for a look at them"
    )
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    flags = {"e2e_processing_latency_percentile": (0.99, 0.5), "e2e_processing_latency_window_time": 60.0}
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(nsqds=2, as_processes=True, **flags))
        traffic = Traffic(cluster)
        stack.callback(traffic.close)
        admin = cluster.admin(poll_interval=1.0)
        time.sleep(arguments.seconds)
        site = "http://{}:{}".format(*admin.http_address)  # type: ignore[misc]  # not a Unix socket
        browser = stack.enter_context(start_chromium())
        if arguments.all:
            take_all(browser, site, arguments.to, cluster.addresses[0])
        else:
            visitor = Visitor(Profile(browser), site)
            for name, path in PICTURES.items():
                visitor.go(path)
                if name == "messages":
                    visitor.find("#message-list summary").nth(1).click()
                visitor.picture(arguments.to / f"nsqadmin-{name}.png", full_page=True)
            visitor.close()
    if not arguments.all:
        for name in PICTURES:
            shrink(arguments.to / f"nsqadmin-{name}.png")


def take_all(browser: Browser, site: str, folder: Path, node: str) -> None:
    pages = {
        "overview": "/",
        "topics": "/topics",
        "topic": "/topics/orders",
        "channel": "/topics/emails/send",
        "nodes": "/nodes",
        "node": f"/nodes/{node}",
        "messages": "/messages/payments.dead/review",
        "replay": "/replay/orders/billing?to=start",
        "pipelines": "/pipelines",
        "lookup": "/lookup",
        "search": "/search?q=ledger",
        "counter": "/counter",
    }
    kinds: dict[str, dict[str, Any]] = {
        "light": {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
        "dark": {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
        "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "device_scale_factor": 1},
    }
    for kind, context in kinds.items():
        visitor = Visitor(Profile(browser, **context), site)
        for name, path in pages.items():
            visitor.go(path)
            visitor.picture(folder / f"{name}-{kind}.png", full_page=True)
        visitor.close()


if __name__ == "__main__":
    main()
