"""The version we are, and the version of NSQ that we speak as."""

import sys
from typing import Final

from nsparq.kernel import BUILD

__all__ = ["NSQ_VERSION", "__version__", "version_line"]

__version__ = "0.1.0"

# Told to clients, lookupds and /info. Client libraries decide by it what the broker can do.
NSQ_VERSION: Final = "1.3.0"


def version_line(program: str) -> str:
    """What `--version` prints. Client libraries' test harnesses parse it: the last token is of [a-z0-9.-]."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{program} v{NSQ_VERSION} (built w/nsparq-{__version__}-{BUILD}-python{python})"
