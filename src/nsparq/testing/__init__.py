"""For tests of programs that use NSQ: a real broker that starts in milliseconds, a proxy that
simulates network faults, and pipelines without a broker.

    with run_broker() as broker, FaultProxy(broker.tcp_address) as proxy:
        ...

`nsparq.testing.plugin` offers them as pytest fixtures. The broker needs the extra `server`,
pipelines need the extra `spark`, the proxy needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsparq.testing.brokers import Broker, Lookupd, run_broker, run_lookupd
    from nsparq.testing.pipelines import PipelineResult, given, try_pipeline
    from nsparq.testing.proxy import FaultProxy

__all__ = [
    "Broker",
    "FaultProxy",
    "Lookupd",
    "PipelineResult",
    "given",
    "run_broker",
    "run_lookupd",
    "try_pipeline",
]


def __getattr__(name: str) -> Any:
    """Loads at first use: pytest imports this package for its plugin wherever nsparq is
    installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    pipelines = ("PipelineResult", "given", "try_pipeline")
    module = "proxy" if name == "FaultProxy" else "pipelines" if name in pipelines else "brokers"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
