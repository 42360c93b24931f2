"""The health check of the container image: `python -m nsparq.tools.healthcheck [URL]`.

It requests the URL, by default `/ping` of the daemon that the container runs, at its standard port.
The status is 0 if the answer is 200, otherwise 1. A container that runs a tool has no HTTP port, so
it is healthy as long as it runs.
"""

from __future__ import annotations

import http.client
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

__all__ = ["main"]

PORTS: Final = {"nsqd": 4151, "nsqlookupd": 4161, "nsqadmin": 4171}
TIMEOUT_S: Final = 4.0


def url_of(command: Sequence[str]) -> str | None:
    """What to request if this command runs; None if it has no HTTP port that we know."""
    # An init (`docker-init --`), the interpreter and `nsparq` may stand before the name, flags
    # behind it.
    names = itertools.takewhile(lambda word: word == "--" or not word.startswith("-"), command)
    port = next((PORTS[name] for word in names if (name := Path(word).name) in PORTS), None)
    return None if port is None else f"http://127.0.0.1:{port}/ping"


def main(argv: Sequence[str]) -> int:
    command = Path("/proc/1/cmdline").read_text(errors="replace").split("\0")
    url = (argv[0] if argv else "") or os.environ.get("NSPARQ_HEALTH_URL") or url_of(command)
    if url is None:
        print("no daemon: nothing to check")
        return 0
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=TIMEOUT_S) as answer:
            print(f"{url}: {answer.read(1000).decode(errors='replace')}")
        return 0
    except HTTPError as error:
        print(f"{url}: {error.code} {error.read(1000).decode(errors='replace')}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{url}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
