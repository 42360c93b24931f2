"""Our version, and the version of NSQ that we report to clients."""

import sys
from typing import Final

from nsparq.kernel import BUILD

__all__ = ["NSQ_VERSION", "__version__", "version_line"]

__version__ = "0.1.0"

# Sent to clients and nsqlookupds, and in /info. Client libraries use it to detect features.
NSQ_VERSION: Final = "1.3.0"


def version_line(program: str) -> str:
    """The text of `--version`. Test suites of clients parse it: its last word has only
    [a-z0-9.-]."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{program} v{NSQ_VERSION} (built w/nsparq-{__version__}-{BUILD}-python{python})"
