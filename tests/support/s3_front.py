"""Stands before an S3 server: counts requests by kind, and has troubles that only the store itself
can have.

with S3Front(endpoint) as front:      endpoint: http://host:port of the server
    front.url                         what clients are given
    front.counts                      requests by S3's names of the operations
    front.refuse_puts(507, "XMinioStorageFull")
    front.ignore_conditions()         puts overwrite, whatever they ask for
    front.freeze_lists("bucket")      lists show the objects of this moment, whatever happens after it
    front.heal()

python -m tests.support.s3_front PORT ENDPOINT: the same in a process of its own, which can be
killed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import parse_qsl, quote, urlsplit
from xml.etree import ElementTree

from tests.support.web import HandlerServer

SPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "server", "date"}


def operation(method: str, query: dict[str, str]) -> str:
    if method == "POST":
        if "delete" in query:
            return "DeleteObjects"
        return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
    if "uploadId" in query:
        return {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload"}.get(method, "ListParts")
    if method == "GET" and "list-type" in query:
        return "ListObjectsV2"
    return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}[method]


WRITES = {"PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload"}


class S3Front:
    def __init__(self, endpoint: str, port: int = 0) -> None:
        self._target = urlsplit(endpoint).netloc
        self._refusal: tuple[int, str] | None = None
        self._conditions = True
        self._frozen: dict[str, bytes] | None = None
        """Entries of lists by key."""
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, content = front._answer(self.command, self.path, dict(self.headers), body)
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                is_head = self.command == "HEAD"
                if not is_head:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if not is_head:
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = HandlerServer(Handler, port)
        self.url = f"http://{self._server.address}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    # troubles

    def refuse_puts(self, status: int, code: str) -> None:
        self._refusal = status, code

    def ignore_conditions(self) -> None:
        self._conditions = False

    def freeze_lists(self, bucket: str) -> None:
        content = self._forward("GET", f"/{bucket}?list-type=2", {}, b"")[2]
        found = ElementTree.fromstring(content).findall(f"{SPACE}Contents")
        assert len(found) < 1000
        self._frozen = {str(one.findtext(f"{SPACE}Key")): ElementTree.tostring(one) for one in found}

    def heal(self) -> None:
        self._refusal = self._frozen = None
        self._conditions = True

    # answers

    def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        query = dict(parse_qsl(urlsplit(path).query, keep_blank_values=True))
        kind = operation(method, query)
        with self._lock:
            self.counts[kind] += 1
        if self._refusal is not None and kind in WRITES:
            status, code = self._refusal
            text = f"<Error><Code>{code}</Code><Message>There is no room left.</Message></Error>"
            return status, [("Content-Type", "application/xml")], text.encode()
        if self._frozen is not None and kind == "ListObjectsV2":
            return 200, [("Content-Type", "application/xml")], self._listed(self._frozen, query)
        if not self._conditions:
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        return self._forward(method, path, headers, body)

    def _listed(self, entries: dict[str, bytes], query: dict[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        keys = [key for key in sorted(entries) if key.startswith(prefix) and key > after]
        shown, folders = b"", dict[str, None]()
        for key in keys:
            rest = key[len(prefix) :]
            if query.get("delimiter") == "/" and "/" in rest:
                folders[prefix + rest.partition("/")[0] + "/"] = None
            else:
                shown += entries[key]
        for one in folders:
            shown += f"<CommonPrefixes><Prefix>{quote(one)}</Prefix></CommonPrefixes>".encode()
        head = f"<KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
        root = f"ListBucketResult xmlns='{SPACE[1:-1]}'"
        return (
            f"<{root}><Name>b</Name><Prefix>{prefix}</Prefix>{head}".encode() + shown + b"</ListBucketResult>"
        )

    def _forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(self._target, timeout=30)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP_HEADERS]
            if method == "HEAD":
                kept.append(("Content-Length", answer.getheader("Content-Length") or "0"))
            return answer.status, kept, answer.read()
        finally:
            connection.close()


if __name__ == "__main__":
    S3Front(sys.argv[2], int(sys.argv[1]))
    threading.Event().wait()
