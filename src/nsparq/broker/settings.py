"""Settings of a topic that override the daemon's flags. They can change at any time and are
kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nsparq.delivery_policy import DeliveryPolicy, parse_policy
from nsparq.flags import parse_duration
from nsparq.options import NsqdOptions
from nsparq.storage.log import Durability, LogSettings


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """None means: as the flag says."""

    retention_age: float | None = None
    """Seconds for which messages are kept after every channel has passed them."""
    retention_bytes: int | None = None
    """Bytes that are kept after every channel has passed them."""
    durability: str | None = None
    """When a publish is acknowledged: "os", "fsync" or "memory"."""
    archive: bool | None = None
    """Whether sealed segments go to the archive of the daemon."""
    archive_retention_age: float | None = None
    """Seconds for which the archive keeps messages after every channel has passed them."""
    archive_retention_bytes: int | None = None
    """Bytes of the log with its archive."""
    archive_local_bytes: int | None = None
    """Bytes of archived segments that stay on disk although channels need them."""
    policy: DeliveryPolicy | None = None
    """The delivery policy of the channels that have none of their own. There is no flag for it."""

    def changed(self, changes: Mapping[str, object], topic: str = "") -> TopicSettings:
        """A copy with other values, by name. Raises ValueError with a text for the user."""
        return replace(self, **{name: _checked(name, value, topic) for name, value in changes.items()})

    def check(self, options: NsqdOptions) -> None:
        """Raises ValueError if they do not work with these flags."""
        if self.archive and not options.archive:
            raise ValueError("there is no archive: nsqd runs without --archive")
        if self.durability == Durability.MEMORY.value and options.replication_cluster:
            raise ValueError(
                'durability "memory" does not work with --replication-cluster: messages would be '
                "acknowledged before they are copied"
            )

    def applied_to(self, flags: LogSettings) -> LogSettings:
        """The settings of the topic's log."""
        settings = flags
        if self.retention_age is not None:
            settings = settings._replace(retention_s=self.retention_age)
        if self.retention_bytes is not None:
            settings = settings._replace(retention_bytes=self.retention_bytes)
        if self.durability is not None:
            settings = settings._replace(durability=Durability(self.durability))
        if self.archive is not None and flags.has_archive:
            settings = settings._replace(is_archived=self.archive)
        if self.archive_retention_age is not None:
            settings = settings._replace(archive_retention_s=self.archive_retention_age)
        if self.archive_retention_bytes is not None:
            settings = settings._replace(archive_retention_bytes=self.archive_retention_bytes)
        if self.archive_local_bytes is not None:
            settings = settings._replace(archive_local_bytes=self.archive_local_bytes)
        return settings

    def stored(self) -> dict[str, Any]:
        """For the topic's state: the settings that override flags."""
        stored = {name: value for name, value in asdict(self).items() if value is not None}
        if self.policy is not None:
            stored["policy"] = self.policy.stored()
        return stored


def _checked(name: str, value: Any, topic: str) -> Any:
    if name not in TopicSettings.__slots__:
        raise ValueError(f"there is no setting {name!r}; there are {', '.join(TopicSettings.__slots__)}")
    if value is None:
        return None
    if name == "policy":
        return parse_policy(value, topic)
    if name == "durability":
        if value not in [mode.value for mode in Durability]:
            raise ValueError(f'durability must be "os", "fsync", "memory" or null, not {value!r}')
        return value
    if name == "archive":
        if type(value) is not bool:
            raise ValueError(f"archive must be true, false or null, not {value!r}")
        return value
    if name.endswith("_bytes"):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be a whole number, not negative, or null, not {value!r}")
        return value
    try:
        age = parse_duration(value) if type(value) is str else value
    except ValueError:
        raise ValueError(f"{name} must be seconds, or a duration such as 24h, not {value!r}") from None
    if type(age) not in (int, float) or not 0 <= age <= sys.float_info.max:
        raise ValueError(f"{name} must be a number of seconds, not negative, or null, not {value!r}")
    return float(age)
