"""Options of producers and consumers. Names, defaults and limits are those of NSQ's reference
client.

Durations are in seconds. `Config.from_strings` reads the values of the tools' `--consumer-opt` and
`--producer-opt`, where a plain number means milliseconds, as in the reference client.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import socket
import ssl
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from nsparq.addresses import split_address
from nsparq.client.errors import reason_of
from nsparq.client.tracing import Tracing
from nsparq.errors import NsparqError
from nsparq.flags import parse_bool, parse_duration
from nsparq.private_random import private_random
from nsparq.secret_scope import SecretScope
from nsparq.version import __version__

__all__ = ["Config", "ConfigError", "milliseconds"]

_TLS_VERSIONS: Final = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}


class ConfigError(NsparqError, ValueError):
    """An unknown option, or an invalid value."""


def _option(
    default: Any, *, low: float | None = None, high: float | None = None, duration: bool = False
) -> Any:
    metadata = {"low": low, "high": high, "duration": duration}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _seconds(default: float, low: float | None = None, high: float | None = None) -> Any:
    return _option(default, low=low, high=high, duration=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Values are checked on creation. Copy and change one with `dataclasses.replace`."""

    dial_timeout: float = _seconds(1.0, 0)
    """Time limit for the TCP connection; 0: the system's limit."""
    handshake_timeout: float = _seconds(10.0, 0.001, 300)
    """Time limit for IDENTIFY, TLS and AUTH together."""
    read_timeout: float = _seconds(60.0, 0.1, 300)
    """How long a server may send nothing. Without heartbeats there is no limit."""
    write_timeout: float = _seconds(1.0, 0.1, 300)
    """How long a server may read nothing while we send."""
    publish_timeout: float = _seconds(30.0, 0.001)
    """Time limit from the call of publish to its acknowledgement, reconnects included."""
    busy_poll: float = _seconds(0.0002, 0, 0.01)
    """How long a producer with few unanswered publishes polls for the answer before its event loop
    sleeps. An answer from the same machine arrives within this time, and polling gets it sooner
    than a wake-up. Where answers take longer, polling is hardly ever tried; on a single core it is
    never used. 0: never."""
    local_addr: str = ""
    """Local `host:port` of connections; port 0 for any."""

    lookupd_poll_interval: float = _seconds(60.0, 0.01, 300)
    lookupd_poll_jitter: float = _option(0.3, low=0, high=1)
    lookupd_poll_timeout: float = _seconds(60.0, 0.001)
    discovery_filter: Callable[[list[str]], Iterable[str]] | None = None
    """Gets the nsqd addresses from nsqlookupd and returns those to use."""
    reconnect_delay: float = _seconds(0.2, 0, 300)
    """First pause before a lost nsqd is tried again; it doubles up to `max_reconnect_delay`."""
    max_reconnect_delay: float = _seconds(15.0, 0, 300)

    max_requeue_delay: float = _seconds(900.0, 0, 3600)
    default_requeue_delay: float = _seconds(90.0, 0, 3600)
    backoff_strategy: str = "exponential"
    """Or `full_jitter`."""
    max_backoff_duration: float = _seconds(120.0, 0, 3600)
    """0: no back-off."""
    backoff_multiplier: float = _seconds(1.0, 0, 3600)
    max_attempts: int = _option(5, low=0, high=65535)
    """0: never give up."""

    low_rdy_idle_timeout: float = _seconds(10.0, 1, 300)
    low_rdy_timeout: float = _seconds(30.0, 1, 300)
    rdy_redistribute_interval: float = _seconds(5.0, 0.001, 5)

    client_id: str = _option(lambda: socket.gethostname().partition(".")[0])
    hostname: str = _option(socket.gethostname)
    user_agent: str = f"nsparq/{__version__}"
    topology_region: str = ""
    topology_zone: str = ""
    heartbeat_interval: float = _seconds(30.0)
    """Negative: no heartbeats; a consumer then cannot subscribe."""
    sample_rate: int = _option(0, low=0, high=99)
    observe: bool = False
    """A consumer that only looks: messages that wait in a topic without a channel stay there, for
    its first channel. For ephemeral channels; NSQ's own nsqd ignores it."""

    headers: bool = True
    """Ask for message headers. Without them a consumer gets what NSQ's clients get: bodies alone,
    and the dead letters of nsqd as JSON; and a producer cannot publish any. NSQ's own nsqd ignores
    it."""

    tracing: Tracing | None = None
    """Traces publishes and handlers; `nsparq.integrations.opentelemetry` has one."""

    tls_v1: bool = False
    tls_config: ssl.SSLContext | None = None
    """Used instead of the next five options."""
    tls_root_ca_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_insecure_skip_verify: bool = False
    tls_min_version: str = "tls1.2"
    deflate: bool = False
    deflate_level: int = _option(6, low=1, high=9)
    snappy: bool = False

    output_buffer_size: int = 16 * 1024
    output_buffer_timeout: float = _seconds(0.25)
    max_in_flight: int | None = _option(None, low=0)
    """Messages in flight over all connections. None: enough to keep the handlers busy."""
    msg_timeout: float = _seconds(0.0, 0)
    """0: the server's default."""
    max_msg_size: int = _option(0, low=0)
    """Largest frame, in bytes, that is accepted from a server; 0: no limit."""
    auth_secret: str = dataclasses.field(default="", repr=False)
    lookupd_authorization: bool = True
    """Whether nsqlookupd gets the secret too."""
    auth_requires_tls: bool = False
    """Send the secret only over TLS, or to this machine. For nsqd and nsqlookupd."""
    auth_secret_for: tuple[str, ...] = ("*",)
    """Which nsqd get the secret: hosts, `host:port`, networks such as `10.1.0.0/16`, patterns such
    as `*.nsq.example.com`; `*` is every nsqd that asks, as in NSQ's clients. Restrict it: anybody
    who reaches nsqlookupd can register an nsqd there."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"invalid {field.name}: {value}")
            low, high = field.metadata.get("low"), field.metadata.get("high")
            if value is not None and low is not None and value < low:
                raise ConfigError(f"invalid {field.name}: {value} is less than {low}")
            if value is not None and high is not None and value > high:
                raise ConfigError(f"invalid {field.name}: {value} is more than {high}")
        if self.heartbeat_interval > self.read_timeout:
            raise ConfigError("heartbeat_interval must not be longer than read_timeout")
        if self.backoff_strategy not in ("exponential", "full_jitter"):
            raise ConfigError(f"unknown backoff_strategy {self.backoff_strategy!r}")
        if self.tls_min_version not in _TLS_VERSIONS:
            raise ConfigError(f"unknown tls_min_version {self.tls_min_version!r}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key must be given together")
        if self.local_addr and split_address(self.local_addr) is None:
            raise ConfigError(f"local_addr is not host:port: {self.local_addr!r}")
        try:
            SecretScope(self.auth_secret_for)
        except ValueError as error:
            raise ConfigError(f"invalid auth_secret_for: {error}") from None
        if self.deflate and self.snappy:
            raise ConfigError("deflate and snappy exclude each other")
        if self.snappy and not all(map(importlib.util.find_spec, ("cramjam", "crc32c"))):
            raise ConfigError("snappy needs the packages cramjam and crc32c")

    @classmethod
    def from_strings(cls, options: Iterable[str], **more: Any) -> Config:
        """From texts `name,value`; without a comma the value is `true`. They override `more`."""
        values: dict[str, Any] = dict(more)
        for option in options:
            name, comma, text = option.partition(",")
            key = name.strip().replace("-", "_")
            values[_ALIASES.get(key, key)] = _read(key, text.strip() if comma else "true")
        return cls(**values)

    def backoff(self, attempt: int) -> float:
        """How long to pause at the given depth of back-off."""
        longest = self.backoff_multiplier * 2.0 ** min(attempt, 64)
        return longest if self.backoff_strategy == "exponential" else private_random.uniform(0, longest)

    def requeue_delay(self, attempts: int) -> float:
        """Seconds before a message that has failed so often is sent again."""
        return min(self.default_requeue_delay * attempts, self.max_requeue_delay)

    def ssl_context(self) -> ssl.SSLContext:
        """Raises ConfigError for files that are missing or invalid."""
        if self.tls_config is not None:
            return self.tls_config
        try:
            context = ssl.create_default_context(cafile=self.tls_root_ca_file or None)
        except OSError as error:
            raise ConfigError(f"tls_root_ca_file {self.tls_root_ca_file}: {reason_of(error)}") from error
        with warnings.catch_warnings():
            # Versions before 1.2 are deprecated, but old servers support nothing newer.
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = _TLS_VERSIONS[self.tls_min_version]
        if self.tls_cert:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:
                files = f"tls_cert {self.tls_cert}, tls_key {self.tls_key}"
                raise ConfigError(f"{files}: {reason_of(error)}") from error
        if self.tls_insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def identify(self) -> dict[str, Any]:
        """The body of IDENTIFY, with the keys for old servers too."""
        return {
            "client_id": self.client_id,
            "hostname": self.hostname,
            "short_id": self.client_id,
            "long_id": self.hostname,
            "user_agent": self.user_agent,
            "feature_negotiation": True,
            "tls_v1": self.tls_v1,
            "deflate": self.deflate,
            "deflate_level": self.deflate_level,
            "snappy": self.snappy,
            "heartbeat_interval": milliseconds(self.heartbeat_interval),
            "sample_rate": self.sample_rate,
            "output_buffer_size": self.output_buffer_size,
            "output_buffer_timeout": milliseconds(self.output_buffer_timeout),
            "msg_timeout": milliseconds(self.msg_timeout),
            "topology_region": self.topology_region,
            "topology_zone": self.topology_zone,
            "headers": self.headers,
            **({"observe": True} if self.observe else {}),
        }


_ALIASES: Final = {"skip_lookupd_authorization": "lookupd_authorization"}
"""The reference client's name says the opposite of what the option does."""


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, rounded down; -1 for any negative value. Exact to the microsecond first,
    because 0.57 * 1000 is slightly less than 570."""
    return -1 if seconds < 0 else round(seconds * 1e6) // 1000


def _read(name: str, text: str) -> Any:
    """The value of an option given as text. Raises ConfigError."""
    field = {field.name: field for field in dataclasses.fields(Config)}.get(_ALIASES.get(name, name))
    kind = "" if field is None else "duration" if field.metadata.get("duration") else str(field.type)
    reader = _READERS.get(kind)
    if reader is None:
        # It does not exist, or its values cannot be given as text.
        raise ConfigError(f"invalid option {name}")
    try:
        return reader(text)
    except ValueError:
        raise ConfigError(f"invalid value {text!r} of option {name}") from None


def _duration(text: str) -> float:
    return int(text) / 1000 if text.lstrip("-").isdigit() else parse_duration(text)


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "duration": _duration,
    "bool": parse_bool,
    "int": int,
    "int | None": int,
    "float": float,
    "str": str,
    "tuple[str, ...]": lambda text: tuple(part.strip() for part in text.split(",")),
}
