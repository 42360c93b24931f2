"""The object store: a few calls that S3, GCS, Azure and local directories have in common.

Every call waits for the store, at most about half a minute, so none runs on an event loop.
Credentials and endpoints come from the environment variables that the store's own tools use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from nsparq.errors import ArchiveUnavailable, StartError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_SIZE: Final = 8 << 20
"""Bytes that are sent or fetched at a time. It bounds the memory, and what a lost connection
repeats."""
SCHEMES: Final = ("s3", "gs", "az", "file")
PROBE: Final = "conditional-put"
"""An object that shows whether the store overwrites. It stays."""

_REQUEST_S: Final = 10
_RETRIES: Final = 2


class StoredObject(NamedTuple):
    """An object of the store, without its bytes."""

    key: str
    size: int
    modified_s: float
    """When it was written, by the clock of the store."""


class Store:
    """Objects below one URL. Any thread may call it. All calls raise ArchiveUnavailable."""

    def __init__(self, url: str) -> None:
        """Raises StartError. Does not talk to the store yet."""
        self.url = url
        self._root = check_url(url)
        self._keeps_existing = self._root is not None
        """Whether it is known that put_new() overwrites nothing."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise StartError("--archive needs the package obstore: pip install 'nsparq[archive]'") from error
        self._api = obstore
        options: dict[str, Any] = {"mkdir": True}
        if self._root is None:
            options = {
                "client_options": {
                    "timeout": f"{_REQUEST_S}s",
                    "connect_timeout": "3s",
                    "allow_http": _allows_http(),
                },
                "retry_config": {
                    "max_retries": _RETRIES,
                    "retry_timeout": timedelta(seconds=1.5 * _REQUEST_S),
                },
            }
        try:
            self._store: ObjectStore = from_url(url, **options)
        except Exception as error:  # obstore has no common class for what may be wrong with a URL
            raise StartError(f"--archive {url}: {_first_line(error)}") from error

    # writing

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object, unless there is one of this name. False if there is one."""
        self._refuse_overwriting()
        if not self._create(key, data):
            return False
        self._sync(key)
        return True

    def put(self, key: str, parts: Iterable[bytes]) -> None:
        """Write an object from parts of PART_SIZE bytes; the last one may be shorter."""
        self._refuse_overwriting()
        rest = iter(parts)
        first = next(rest, b"")
        with self._write_errors(key):
            if len(first) < PART_SIZE:
                # One request instead of three.
                self._api.put(self._store, key, first, use_multipart=False)
            else:
                whole = chain([first], rest)
                self._api.put(self._store, key, whole, chunk_size=PART_SIZE, max_concurrency=1)
        self._sync(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. Missing ones are no error."""
        for key in keys:
            with self._errors(f"remove {key}"):
                try:
                    self._api.delete(self._store, key)
                except FileNotFoundError:
                    continue

    # reading

    def get(self, key: str) -> bytes | None:
        """A small object; None if there is none."""
        with self._errors(f"read {key}"):
            try:
                return bytes(self._api.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def read(self, key: str, start: int, length: int) -> memoryview:
        """A part of an object. Shorter if the object ends before."""
        with self._errors(f"read {key}"):
            return memoryview(self._api.get_range(self._store, key, start=start, length=length))

    def size(self, key: str) -> int | None:
        """None if there is no such object."""
        with self._errors(f"look for {key}"):
            try:
                return int(self._api.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    def list(self, prefix: str, after: str | None = None) -> Iterator[StoredObject]:
        """The objects whose keys begin with `prefix`, behind the key `after`."""
        with self._errors(f"list {prefix}"):
            for page in self._api.list(self._store, prefix, offset=after, chunk_size=1000):
                for found in page:
                    yield StoredObject(found["path"], found["size"], found["last_modified"].timestamp())

    def directories(self, prefix: str) -> Sequence[str]:
        """The names directly below `prefix`, as complete keys."""
        with self._errors(f"list {prefix}"):
            return [*self._api.list_with_delimiter(self._store, prefix)["common_prefixes"]]

    # details

    def _refuse_overwriting(self) -> None:
        """Some stores ignore the condition of put_new(): of two writers the later one would win."""
        if self._keeps_existing:
            return
        if self._create(PROBE, b"nsparq") and self._create(PROBE, b"nsparq"):
            raise ArchiveUnavailable(
                f"{self.url} overwrites objects: the store needs conditional puts (If-None-Match: *)"
            )
        self._keeps_existing = True

    def _create(self, key: str, data: bytes) -> bool:
        try:
            with self._write_errors(key):
                self._api.put(self._store, key, data, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    @contextmanager
    def _write_errors(self, key: str) -> Iterator[None]:
        with self._errors(f"write {key}"):
            try:
                yield
            except FileNotFoundError as error:
                raise OSError("there is no such bucket") from error

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise
        except (self._api.exceptions.BaseError, OSError) as error:
            if isinstance(error, self._api.exceptions.AlreadyExistsError):
                raise FileExistsError from error
            raise ArchiveUnavailable(f"cannot {what} in {self.url}: {_first_line(error)}") from error

    def _sync(self, key: str) -> None:
        """A local directory: the object must survive a power cut, like in a real store."""
        if self._root is None:
            return
        path = self._root / key
        with self._errors(f"sync {key}"):
            while True:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
                if path == self._root:
                    break
                path = path.parent


def check_url(url: str) -> Path | None:
    """The directory of a `file:` URL, None for another store. Raises StartError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or (parts.scheme == "file" and (parts.netloc or len(parts.path) < 2)):
        known = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
        raise StartError(f"--archive must be {known}, not {url!r}")
    if parts.scheme != "file" and not parts.netloc:
        raise StartError(f"--archive names no bucket: {url!r}")
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _allows_http() -> bool:
    """Whether the environment asks for plain HTTP, as an S3-compatible store at home may need."""
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_ENDPOINT")
    is_plain = any(os.environ.get(name, "").startswith("http://") for name in names)
    return is_plain or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"


def _first_line(error: Exception) -> str:
    """obstore adds its internals in further lines."""
    return str(error).partition("\n")[0] or type(error).__name__
