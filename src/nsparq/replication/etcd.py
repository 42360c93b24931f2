"""etcd as coordinator, over the JSON gateway of its v3 API."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from nsparq.fetch import FetchError, fetch
from nsparq.replication.coordinator import Found, NoAnswer, State
from nsparq.replication.membership import Membership

REQUEST_S: Final = 2.0
PREFIX: Final = "nsparq/"
"""The keys of a cluster are `nsparq/NAME/record` and `nsparq/NAME/alive`."""


class Etcd:
    """One cluster's keys in etcd. `urls` are those of etcd's members; any that answers will do."""

    def __init__(self, urls: Sequence[str], cluster: str, alive_s: float) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._record = _text(f"{PREFIX}{cluster}/record")
        self._alive = _text(f"{PREFIX}{cluster}/alive")
        self._alive_s = alive_s
        self._lease = ""
        """Id of the lease that our sign of life depends on."""

    async def observe(self) -> State:
        wanted = [{"request_range": {"key": key}} for key in (self._record, self._alive)]
        answer = await self._call("kv/txn", {"success": wanted})
        text, version, name = b"", 0, ""
        with _understanding(answer):
            record, alive = (one["response_range"].get("kvs", []) for one in answer["responses"])
            # etcd leaves an empty value out.
            if record:
                text, version = b64decode(record[0].get("value", "")), int(record[0]["mod_revision"])
            if alive:
                name = b64decode(alive[0].get("value", "")).decode()
        return State(Found(Membership.from_json(text), version) if version else None, name)

    async def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        # A key that does not exist has the revision 0.
        compare = {
            "key": self._record,
            "target": "MOD",
            "result": "EQUAL",
            "mod_revision": str(version),
        }
        put = {"request_put": {"key": self._record, "value": b64encode(wanted.to_json()).decode()}}
        answer = await self._call("kv/txn", {"compare": [compare], "success": [put]})
        with _understanding(answer):
            revision = int(answer["header"]["revision"])
            return Found(wanted, revision) if answer.get("succeeded") else None

    async def keep_alive(self, name: str) -> None:
        if self._lease:
            answer = await self._call("lease/keepalive", {"ID": self._lease})
            with _understanding(answer):
                if int(answer["result"].get("TTL", 0)) > 0:
                    return
        # etcd counts in whole seconds.
        answer = await self._call("lease/grant", {"TTL": str(max(1, round(self._alive_s)))})
        with _understanding(answer):
            self._lease = answer["ID"]
        put = {"key": self._alive, "value": _text(name), "lease": self._lease}
        await self._call("kv/put", put)

    async def release(self) -> None:
        if self._lease:
            lease, self._lease = self._lease, ""
            await self._call("lease/revoke", {"ID": lease})

    def close(self) -> None:
        """Every request has its own connection."""

    async def _call(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._ask, path, json.dumps(request).encode())

    def _ask(self, path: str, body: bytes) -> dict[str, Any]:
        """Ask one member after the other. The one that answered is asked first next time."""
        failures = []
        for url in [*self._urls]:
            try:
                answer = fetch(f"{url}/v3/{path}", method="POST", body=body, request_timeout=REQUEST_S)
                if answer.status == 200:
                    found: dict[str, Any] = json.loads(answer.body)
                    return found
                text = answer.body[:200].decode(errors="replace")
                failures.append(f"{url}: status {answer.status}: {text}")
            except (FetchError, ValueError) as error:
                failures.append(str(error))
            self._urls.append(self._urls.pop(0))
        raise NoAnswer(f"etcd does not answer: {'; '.join(failures)}")


@contextmanager
def _understanding(answer: object) -> Iterator[None]:
    """An answer without what etcd's has, such as an error of its gateway, is none."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        shown = json.dumps(answer)[:200]
        raise NoAnswer(f"the answer of etcd cannot be understood: {shown}") from error


def _text(value: str) -> str:
    return b64encode(value.encode()).decode()
