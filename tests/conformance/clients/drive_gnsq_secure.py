"""Drive gnsq (gevent) over TLS, compression and AUTH: see secure_scenario.py."""

from __future__ import annotations

import logging
import sys

import gevent
import gevent.ssl
import gnsq
import gnsq.stream.stream
import secure_scenario as scenario
from gevent.fileobject import FileObject


def upgrade_to_tls(
    self: gnsq.stream.stream.Stream, ca_certs: str, certfile: str = "", keyfile: str = ""
) -> None:
    """gnsq creates an SSLSocket without a context, which Python no longer allows."""
    context = gevent.ssl.SSLContext(gevent.ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca_certs)
    if certfile:
        context.load_cert_chain(certfile, keyfile)
    self.socket = context.wrap_socket(self.socket, server_hostname=self.address)


class Producer(gnsq.Producer):
    """gnsq treats the OK of an upgrade as the answer to a publish."""

    def handle_response(self, conn: gnsq.NsqdTCPClient, response: bytes) -> None:
        if conn in self._response_queues:
            super().handle_response(conn, response)


def use(host: str, connections: scenario.Connections) -> None:
    run = scenario.Run(connections)
    address, options = f"{host}:{connections.port}", connections.options()

    def handle(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
        message.finish()
        run.finished(message.body)

    producer = Producer(address, **options)
    producer.start()
    consumer = gnsq.Consumer(
        connections.topic,
        scenario.CHANNEL,
        address,
        message_handler=handle,
        max_in_flight=scenario.MAX_IN_FLIGHT,
        **options,
    )
    consumer.start(block=False)
    for body in (scenario.SINGLE, scenario.LARGE_TEXT, scenario.LARGE_NOISE):
        producer.publish(connections.topic, body)
        run.published([body])
    producer.multipublish(connections.topic, scenario.SEVERAL)
    run.published(scenario.SEVERAL)
    while not run.is_done:
        gevent.sleep(0.02)
    run.report("done")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    gnsq.stream.stream.Stream.upgrade_to_tls = upgrade_to_tls
    host, kinds = scenario.host_and_connections()
    gevent.joinall([gevent.spawn(use, host, connections) for connections in kinds])
    FileObject(sys.stdin, "r").readline()
