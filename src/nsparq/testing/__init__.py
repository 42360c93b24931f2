"""For tests of programs that use NSQ: the real broker in milliseconds, and a network that misbehaves.

    with run_broker() as broker, FaultProxy(broker.tcp_address) as proxy:
        ...

`nsparq.testing.plugin` has them as pytest fixtures. The broker needs the extra `server`; the proxy does not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsparq.testing.brokers import Broker, Lookupd, run_broker, run_lookupd
    from nsparq.testing.proxy import FaultProxy

__all__ = ["Broker", "FaultProxy", "Lookupd", "run_broker", "run_lookupd"]


def __getattr__(name: str) -> Any:
    """Loaded at first use: pytest imports this package for its plugin, wherever it is installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nsparq.testing import brokers, proxy

    return getattr(proxy if name == "FaultProxy" else brokers, name)
