"""Who keeps copies of a data path: one record in a coordinator that all nodes reach.

The record is changed by compare-and-set alone. So of two nodes that want to change it, one learns
that the other was first, whatever their clocks say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Membership:
    epoch: int
    """Grows with every change of the primary."""
    primary: str
    """Name of the node that serves clients."""
    in_sync: frozenset[str]
    """Nodes that have everything that was acknowledged; the primary is one of them. Only these may
    take over."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Where nodes are found, by name."""
    tcp_address: str = ""
    """`host:port` where clients find the primary; empty if it is not known."""
    http_address: str = ""

    def with_in_sync(self, names: frozenset[str]) -> Membership:
        return replace(self, in_sync=names)

    def taken_over_by(self, name: str) -> Membership:
        """The next epoch. The old primary has to join again, and its clients go elsewhere."""
        return replace(
            self,
            epoch=self.epoch + 1,
            primary=name,
            in_sync=frozenset([name]),
            tcp_address="",
            http_address="",
        )

    def to_json(self) -> bytes:
        fields = {
            "epoch": self.epoch,
            "primary": self.primary,
            "in_sync": sorted(self.in_sync),
            "addresses": dict(self.addresses),
            "tcp_address": self.tcp_address,
            "http_address": self.http_address,
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Membership:
        fields = json.loads(text)
        return cls(
            fields["epoch"],
            fields["primary"],
            frozenset(fields["in_sync"]),
            fields["addresses"],
            fields.get("tcp_address", ""),
            fields.get("http_address", ""),
        )
