"""Parts of nsqd that are made from its flags alone."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from nsparq.http.api import Response
from nsparq.options import NsqdOptions, TlsRequired
from nsparq.server.auth.grants import AuthChain, Authenticator
from nsparq.server.auth.policy import StaticPolicy
from nsparq.server.auth.servers import AuthServers
from nsparq.server.topics_file import TopicsFile, read_topics_file
from nsparq.version import NSQ_VERSION
from nsparq.wire.limits import Limits

if TYPE_CHECKING:
    from OpenSSL import SSL

    from nsparq.server.archiving import Archiving
    from nsparq.storage.files import Files


def authenticator_of(options: NsqdOptions, threads: Executor) -> Authenticator | None:
    """The policy file, the auth servers, or both; None if there is neither. Raises StartError."""
    sources: list[Authenticator] = []
    if options.auth_policy_file:
        sources.append(StaticPolicy(Path(options.auth_policy_file), threads))
    if options.auth_http_address:
        servers = AuthServers(
            options.auth_http_address,
            threads,
            method=options.auth_http_request_method,
            connect_timeout=options.http_client_connect_timeout,
            request_timeout=options.http_client_request_timeout,
            ca_file=options.tls_root_ca_file,
        )
        sources.append(servers)
    return AuthChain(sources) if len(sources) > 1 else next(iter(sources), None)


def archiving_of(options: NsqdOptions, files: Files | None) -> Archiving | None:
    """None if there is no archive. Raises StartError."""
    if not options.archive:
        return None
    from nsparq.server.archiving import Archiving

    return Archiving(options, files=files)


def tls_context_of(options: NsqdOptions) -> SSL.Context:
    """Raises StartError."""
    # Imported where it is needed: that takes a tenth of a second and ten megabytes.
    from nsparq.server.tls import build_context

    return build_context(
        options.tls_cert,
        options.tls_key,
        root_ca_file=options.tls_root_ca_file,
        policy=options.tls_client_auth_policy,
        min_version=options.tls_min_version,
    )


def refusal_of(options: NsqdOptions, https_port: int) -> Response | None:
    """The answer to every request on the plain HTTP port, if HTTP requires TLS."""
    if options.tls_required is not TlsRequired.YES:
        return None
    text = f'{{"message": "TLS_REQUIRED", "https_port": {https_port}}}'
    return Response(status=403, body=text.encode(), content_type="application/json; charset=utf-8")


def topics_file_of(options: NsqdOptions) -> TopicsFile:
    """Empty if there is none. Raises StartError."""
    return read_topics_file(Path(options.topics_file), options) if options.topics_file else TopicsFile()


def limits_of(options: NsqdOptions) -> Limits:
    return Limits(
        version=NSQ_VERSION,
        max_msg_size=options.max_msg_size,
        max_body_size=options.max_body_size,
        max_rdy_count=options.max_rdy_count,
        max_req_timeout_ms=_ms(options.max_req_timeout),
        msg_timeout_ms=_ms(options.msg_timeout),
        max_msg_timeout_ms=_ms(options.max_msg_timeout),
        max_heartbeat_interval_ms=_ms(options.max_heartbeat_interval),
        max_output_buffer_size=options.max_output_buffer_size,
        output_buffer_timeout_ms=_ms(options.output_buffer_timeout),
        min_output_buffer_timeout_ms=_ms(options.min_output_buffer_timeout),
        max_output_buffer_timeout_ms=_ms(options.max_output_buffer_timeout),
        max_deflate_level=options.max_deflate_level,
        deflate_allowed=options.deflate,
        snappy_allowed=options.snappy,
        topology_region=options.topology_region,
        topology_zone=options.topology_zone,
        tls_required=bool(options.tls_required),
        tls_available=bool(options.tls_cert),
        auth_required=bool(options.auth_http_address or options.auth_policy_file),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
