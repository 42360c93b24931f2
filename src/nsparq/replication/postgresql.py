"""PostgreSQL as coordinator: one row for each cluster. Its clock decides how long a sign of life
holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg

from nsparq.replication.coordinator import Found, NoAnswer, State
from nsparq.replication.membership import Membership

REQUEST_S: Final = 2.0

_CREATE: Final = """
create table if not exists nsparq_replication (
    cluster text primary key,
    version bigint not null default 0,
    record text,
    alive text not null default '',
    alive_until timestamptz not null default '-infinity'
)"""
_INSERT: Final = "insert into nsparq_replication (cluster) values (%s) on conflict do nothing"
_OBSERVE: Final = """
select version, record, case when alive_until > clock_timestamp() then alive else '' end
from nsparq_replication where cluster = %s"""
_SET: Final = """
update nsparq_replication set version = version + 1, record = %s where cluster = %s and version = %s
returning version"""
_ALIVE: Final = """
update nsparq_replication set alive = %s, alive_until = clock_timestamp() + make_interval(secs => %s)
where cluster = %s"""

T = TypeVar("T")


class PostgreSql:
    """One cluster's row. The user needs the right to create the table, or it must be there."""

    def __init__(self, url: str, cluster: str, alive_s: float) -> None:
        self._url = url
        self._cluster = cluster
        self._alive_s = alive_s
        self._connection: psycopg.Connection[Any] | None = None
        self._lock = asyncio.Lock()

    async def observe(self) -> State:
        row = await self._run(lambda connection: connection.execute(_OBSERVE, [self._cluster]).fetchone())
        if row is None:
            raise NoAnswer(f"PostgreSQL: the row of cluster {self._cluster!r} was removed")
        version, record, alive = row
        found = None if record is None else Found(Membership.from_json(record.encode()), version)
        return State(found, alive)

    async def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        row = await self._run(
            lambda connection: connection.execute(
                _SET, [wanted.to_json().decode(), self._cluster, version]
            ).fetchone()
        )
        return None if row is None else Found(wanted, row[0])

    async def keep_alive(self, name: str) -> None:
        await self._run(lambda connection: connection.execute(_ALIVE, [name, self._alive_s, self._cluster]))

    async def release(self) -> None:
        await self._run(lambda connection: connection.execute(_ALIVE, ["", 0, self._cluster]))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _run(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """One statement, which is a transaction. After an error its outcome is unknown, and the
        next one takes a new connection."""
        async with self._lock:
            try:
                async with asyncio.timeout(REQUEST_S):
                    return await asyncio.to_thread(self._work, work)
            except (psycopg.Error, TimeoutError) as error:
                self._connection = None
                raise NoAnswer(f"PostgreSQL does not answer: {error}") from error

    def _work(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        if self._connection is None:
            connection = psycopg.connect(self._url, autocommit=True, connect_timeout=2)
            connection.execute(f"set statement_timeout = {int(REQUEST_S * 1000)}")
            connection.execute(_CREATE)
            connection.execute(_INSERT, [self._cluster])
            self._connection = connection
        return work(self._connection)
