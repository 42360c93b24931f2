"""The daemon: its parts, its listener, start and stop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nsparq import logs
from nsparq.addresses import join_address, split_address
from nsparq.admin.change.actions import Actions, Forbidden, Notifier, audit
from nsparq.admin.change.dead_letters import DeadLetters
from nsparq.admin.change.operations import Operations
from nsparq.admin.change.policies import Policies
from nsparq.admin.change.settings import Settings
from nsparq.admin.collect.cluster import Cluster
from nsparq.admin.collect.history_file import HistoryFile
from nsparq.admin.collect.pipelines import Pipelines
from nsparq.admin.collect.upstream import TlsFiles, Upstream
from nsparq.admin.collect.watch import Watch
from nsparq.admin.health import Problem, Severity, find_problems
from nsparq.admin.options import NsqadminOptions, clean_base_path
from nsparq.admin.routing import AdminApi
from nsparq.admin.security import CHANGES, Guard
from nsparq.admin.show.api import api_endpoints
from nsparq.admin.show.forms import Forms, Notes
from nsparq.admin.show.pages import Pages
from nsparq.admin.webhooks import OWN_KIND, Alerts, Webhook
from nsparq.errors import StartError
from nsparq.http.api import ApiError, Request, Response
from nsparq.http.hosts import HostNames
from nsparq.http.server import HttpServer
from nsparq.process import raise_file_limit
from nsparq.server.auth.policy import StaticPolicy
from nsparq.server.auth.tokens import TokenCache
from nsparq.version import NSQ_VERSION, version_line

__all__ = ["Nsqadmin"]

logger = logging.getLogger(__name__)


class Nsqadmin:
    """start() and stop() once each. Everything runs on the loop that start() is called on.

    More than 20 attributes: it ties the parts of nsqadmin together.
    """

    def __init__(self, options: NsqadminOptions) -> None:
        """Raises StartError for a policy file that cannot be used."""
        self.options = options
        self.base = clean_base_path(options.base_path)
        self.http_address: tuple[str, int] = ("", 0)
        self.upstream = Upstream(
            connect_timeout=options.http_client_connect_timeout,
            request_timeout=options.http_client_request_timeout,
        )
        self.cluster = Cluster(
            self.upstream,
            lookupds=options.lookupd_http_address,
            nsqds=options.nsqd_http_address,
            secret=options.auth_secret,
            secret_for=options.auth_secret_for,
        )
        self.notifier = Notifier(self.upstream, options.notification_http_endpoint)
        self.actions = Actions(self.cluster, self.notifier)
        self._threads = ThreadPoolExecutor(2, "nsqadmin-hash")
        """Hash passwords."""
        self._policy: StaticPolicy | None = None
        if options.auth_policy_file:
            self._policy = StaticPolicy(Path(options.auth_policy_file), self._threads)
        self.guard = Guard(
            acl_header=options.acl_http_header,
            admin_users=options.admin_user,
            tokens=TokenCache(self._policy) if self._policy is not None else None,
            base=self.base,
        )
        self.watch = Watch(
            self.cluster,
            interval_s=options.poll_interval,
            history_bytes=options.history_memory,
            max_clients=options.history_clients,
        )
        self.cluster.recall = self.watch.recall
        self.pipelines = Pipelines(self.upstream, options.pipeline_http_address, 2 * options.poll_interval)
        self.alerts = Alerts()
        self.webhooks = [
            Webhook(self.upstream, url, options.webhook_secret, clock=time.monotonic)
            for url in options.webhook_url
        ]
        self.watch.on_poll = self._send_events
        self.history_file: HistoryFile | None = None
        if options.history_path:
            tables = {**self.watch.tables, "pipelines": self.pipelines.history}
            self.history_file = HistoryFile(Path(options.history_path), tables, self.alerts.dump)
        self.operations = Operations(self)
        self.settings = Settings(self)
        self.policies = Policies(self)
        self.dead_letters = DeadLetters(self)
        self.notes = Notes()
        hosts = HostNames(options.http_address, allowed=options.allowed_host)
        self.pages = Pages(self)
        self.api = AdminApi(
            title="nsqadmin",
            version=NSQ_VERSION,
            endpoints=[
                *api_endpoints(self),
                *self.pages.endpoints(),
                *Forms(self).endpoints(),
            ],
            base=self.base,
            guard=self.guard,
            # With a policy file a foreign page has no session and no secret, whatever its host
            # name.
            check_host=None if self.guard.has_login else hosts.check,
            show_error=self._show_error,
        )
        self._problems: tuple[object, list[Problem]] = (None, [])
        self._http: HttpServer | None = None

    async def start(self) -> None:
        """Raises StartError, with nothing left open."""
        options = self.options
        logger.info("%s", version_line("nsqadmin"))
        raise_file_limit()
        address = split_address(options.http_address)
        if address is None:
            raise StartError(f"listen ({options.http_address}) failed - not of the form host:port")
        self.upstream.use_tls(
            TlsFiles(
                options.http_client_tls_root_ca_file,
                options.http_client_tls_cert,
                options.http_client_tls_key,
                options.http_client_tls_insecure_skip_verify,
            )
        )
        if options.auth_secret and options.lookupd_http_address and not options.auth_secret_for:
            logger.warning(
                "--auth-secret is not sent to nodes found by nsqlookupd, except those with a certificate of "
                "--http-client-tls-root-ca-file: name the nodes with --auth-secret-for"
            )
        await _check_resolve("lookupd-http-address", options.lookupd_http_address)
        await _check_resolve("nsqd-http-address", options.nsqd_http_address)
        if self.history_file is not None:
            self.alerts.load(await asyncio.to_thread(self.history_file.load), time.time())
        http = HttpServer(self.api)
        try:
            bound = await http.listen(address)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", "") or error
            raise StartError(f"listen ({options.http_address}) failed - {reason}") from error
        assert isinstance(bound, tuple)
        self._http, self.http_address = http, bound
        self.notifier.start()
        for webhook in self.webhooks:
            webhook.start()
        if self.history_file is not None:
            self.history_file.start()
        self.watch.start()
        self.pipelines.start()
        logger.info("HTTP: listening on %s", join_address(*self.http_address))

    async def stop(self) -> None:
        """Stop accepting, finish the open requests, send waiting notifications. Twice is safe."""
        http, self._http = self._http, None
        if http is None:
            return
        logger.info("HTTP: closing %s", join_address(*self.http_address))
        await http.close()
        await self.actions.close()
        await self.watch.close()
        await self.pipelines.close()
        if self.history_file is not None:
            await self.history_file.close()
        await self.guard.close()
        await self.notifier.close()
        await asyncio.gather(*(webhook.close() for webhook in self.webhooks))
        await self.upstream.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def reload(self) -> None:
        """SIGHUP: read the policy file again. Users that changed in it must log in again."""
        if self._policy is None:
            logger.info("SIGHUP: nothing to reload")
        else:
            self._policy.reload()

    def problems(self) -> list[Problem]:
        """The most urgent first. Computed once for each poll."""
        seen = (self.watch.number, id(self.pipelines.found))
        if self._problems[0] != seen:
            found = find_problems(self.watch, self.pipelines.found, self._own_problems())
            self._problems = (seen, found)
        return self._problems[1]

    def _own_problems(self) -> Iterator[Problem]:
        """Problems of nsqadmin itself."""
        for webhook in self.webhooks:
            if webhook.error:
                yield Problem(
                    OWN_KIND,
                    Severity.WARNING,
                    "webhook fails",
                    f"{webhook.host}: {webhook.error}; {webhook.waiting:,} events wait, "
                    f"{webhook.dropped:,} were dropped",
                    "No event is delivered until it works again.",
                )
        if self.history_file is not None and self.history_file.error:
            yield Problem(
                "history",
                Severity.NOTICE,
                "history is not saved",
                f"{self.options.history_path}: {self.history_file.error}",
                "After a restart of nsqadmin the charts begin where they were last saved.",
            )

    def _send_events(self) -> None:
        for event in self.alerts.compare(self.problems(), self.watch.polled_s):
            for webhook in self.webhooks:
                webhook.add(event)

    def _show_error(self, request: Request, error: ApiError) -> Response | None:
        endpoint = request.endpoint
        if request.method in CHANGES and error.status in (401, 403) and not isinstance(error, Forbidden):
            reason = str(error.more.get("reason", "")) or error.code
            audit(request.method.lower(), self.guard.actor(request), f"refused - {reason}", path=request.path)
        return self.pages.error(request, error) if endpoint and endpoint.group == "Pages" else None

    # Options that change

    def change_lookupds(self, addresses: tuple[str, ...]) -> None:
        self.options = dataclasses.replace(self.options, lookupd_http_address=addresses)
        self.cluster.lookupds = addresses

    def change_log_level(self, level: str) -> None:
        self.options = dataclasses.replace(self.options, log_level=level)
        logging.getLogger().setLevel(logs.LEVELS[level])


async def _check_resolve(flag: str, addresses: tuple[str, ...]) -> None:
    loop = asyncio.get_running_loop()
    for address in addresses:
        place = split_address(address)
        assert place is not None  # validate() has checked it
        try:
            await loop.getaddrinfo(*place, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, OverflowError) as error:
            reason = getattr(error, "strerror", "") or error
            raise StartError(f"failed to resolve --{flag} ({address}) - {reason}") from error
