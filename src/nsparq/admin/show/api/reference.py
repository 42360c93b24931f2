"""`python -m nsparq.admin.show.api.reference --markdown` prints docs/reference/nsqadmin-http.md."""

from __future__ import annotations

import sys
from typing import Final

from nsparq.admin.daemon import Nsqadmin
from nsparq.admin.options import NsqadminOptions
from nsparq.admin.routing import AdminApi
from nsparq.http.describe import markdown

__all__ = ["describe", "page"]

INTRODUCTION: Final = """\
# HTTP API of nsqadmin

Generated from the source by `make docs`; do not edit.

All paths stand below `--base-path`. Errors are `{"message":"CODE"}`; a path that is not listed is 404
`NOT_FOUND`, a wrong method 405 `METHOD_NOT_ALLOWED`. If some of the daemons did not answer, the answer has
what the others reported, and `message` says so: `WARNING: …`. If none answered, it is a 502. A node is
called `broadcast_address:http_port`, as it announces itself.

A change that a browser sends must carry the token of the page that it comes from (`X-CSRF-Token`); programs
need none."""


def describe() -> AdminApi:
    """The API without a running daemon."""
    return Nsqadmin(NsqadminOptions()).api


def page() -> str:
    return markdown(describe(), INTRODUCTION)


if __name__ == "__main__":
    if sys.argv[1:] != ["--markdown"]:
        sys.exit("usage: python -m nsparq.admin.show.api.reference --markdown")
    sys.stdout.write(page())
