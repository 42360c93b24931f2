"""An NSQ-compatible message broker on an append-only log."""

from nsparq.version import __version__

__all__ = ["__version__"]
