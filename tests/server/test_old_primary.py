"""The node that a new primary has replaced is hidden at nsqlookupds that know nothing of
clusters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from nsparq.server.lookup_peer import LookupPeers
from nsparq.server.old_primary import REPEAT_S, ROUNDS, OldPrimary
from tests.server.test_lookup_peer import IDENTITY
from tests.support.aio import run
from tests.support.lookupd import LookupdThread
from tests.support.polling import wait_until


def test_a_silent_node_is_tombstoned_until_nsqlookupd_has_given_it_up() -> None:
    slept: list[float] = []
    seen: list[list[str]] = []
    # To peers that name no cluster, ours behaves as NSQ's.
    with LookupdThread(tombstone_lifetime=REPEAT_S * 3) as lookupd, ThreadPoolExecutor(1) as threads:

        def listed() -> list[str]:
            return [one["broadcast_address"] for one in lookupd.lookup("t")["producers"]]

        async def hide(leads: bool) -> None:
            peers = LookupPeers(
                ["{}:{}".format(*lookupd.address)],
                identity=lambda: {**IDENTITY, "broadcast_address": "new"},
                registrations=lambda: [("t", "c"), ("other", "")],
                max_body_size=1000,
            )

            async def sleep(seconds: float) -> None:
                slept.append(seconds)
                seen.append(listed())

            async def is_still_replaced() -> bool:
                return leads

            await peers.start()
            try:
                old = OldPrimary("old:4151", peers, lambda: ["t", "other"], threads)
                await old.hide(is_still_replaced, sleep)
            finally:
                await peers.stop()

        with lookupd.peer(broadcast_address="old", http_port=4151) as silent:
            silent.register("t", "c")
            # Who is not primary any more hides nobody.
            run(hide(False))
            assert slept == []
            # nsqlookupd notices a little later that the new one has gone.
            wait_until(lambda: "new" not in listed())
            assert listed() == ["old"]
            run(hide(True))
            assert len(slept) == ROUNDS and "old" not in seen[0]
            # NSQ's nsqlookupd lists a silent node for five minutes.
            assert sum(slept) > 300


def test_ours_needs_no_tombstones() -> None:
    with LookupdThread() as lookupd:

        async def addresses() -> list[str]:
            peers = LookupPeers(
                ["{}:{}".format(*lookupd.address)],
                identity=lambda: {**IDENTITY, "cluster": "orders:1", "epoch": 1},
                registrations=lambda: [],
                max_body_size=1000,
            )
            await peers.start()
            try:
                await peers.settled()
                assert peers.http_addresses
                return peers.http_addresses_without_clusters
            finally:
                await peers.stop()

        assert run(addresses()) == []
