"""Who keeps copies of a data path: one record in a coordinator that all nodes reach.

The record is changed by compare-and-set alone. So of two nodes that want to change it, one learns
that the other was first, whatever their clocks say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

_FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class Membership:
    epoch: int
    """Grows with every change of the primary."""
    primary: str
    """Name of the node that serves clients."""
    copies: Mapping[str, str]
    """Ids of the copies that have everything that was acknowledged, by the name of their node; the
    primary is one of them. Only these may take over."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Where nodes are found, by name."""
    tcp_address: str = ""
    """`host:port` where clients find the primary; empty if it is not known."""
    http_address: str = ""

    @property
    def in_sync(self) -> frozenset[str]:
        """Names of the nodes that have everything that was acknowledged."""
        return frozenset(self.copies)

    def with_copies(self, copies: Mapping[str, str]) -> Membership:
        return replace(self, copies=copies)

    def taken_over_by(self, name: str, copy: str) -> Membership:
        """The next epoch. The old primary has to join again, and its clients go elsewhere."""
        return replace(
            self,
            epoch=self.epoch + 1,
            primary=name,
            copies={name: copy},
            tcp_address="",
            http_address="",
        )

    def to_json(self) -> bytes:
        fields = {
            "format": _FORMAT,
            "epoch": self.epoch,
            "primary": self.primary,
            "in_sync": dict(self.copies),
            "addresses": dict(self.addresses),
            "tcp_address": self.tcp_address,
            "http_address": self.http_address,
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Membership:
        """Raises ValueError if this version does not know the form."""
        try:
            fields = json.loads(text)
            found = fields.get("format", _FORMAT)
            if found == _FORMAT:
                return cls._from_fields(fields)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the record cannot be understood: {text[:200]!r}") from error
        raise ValueError(f"the record has format {found}, and this version knows {_FORMAT}")

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> Membership:
        copies = fields["in_sync"]
        return cls(
            fields["epoch"],
            fields["primary"],
            # Before format 2 it was a list of names.
            dict.fromkeys(copies, "") if isinstance(copies, list) else copies,
            fields["addresses"],
            fields.get("tcp_address", ""),
            fields.get("http_address", ""),
        )
