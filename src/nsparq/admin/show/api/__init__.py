"""The JSON API. Each module has the handlers of one subject, each below its entry in the table.

stats      topics, channels, nodes and the counter, as NSQ's nsqadmin answers them
changes    create, delete, pause, empty and tombstone, as in NSQ
history    the overview, the figures behind the charts, pipelines
messages   peek, publish, copy, move, replay
settings   retention and durability of a topic
daemon     /ping, /config, graphite, /openapi.json
metrics    /metrics
table      how an entry is declared; the parts that handlers share
reference  prints docs/reference/nsqadmin-http.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsparq.admin.show.api.changes import Changes
from nsparq.admin.show.api.daemon import Daemon
from nsparq.admin.show.api.history import History
from nsparq.admin.show.api.messages import Messages
from nsparq.admin.show.api.metrics import Metrics
from nsparq.admin.show.api.settings import Settings
from nsparq.admin.show.api.stats import Stats
from nsparq.http.api import Endpoint

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["api_endpoints"]


def api_endpoints(admin: Nsqadmin) -> list[Endpoint]:
    kinds = (Stats, Changes, History, Messages, Settings, Daemon, Metrics)
    return [endpoint for kind in kinds for endpoint in kind(admin).endpoints()]
