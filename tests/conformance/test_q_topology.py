"""Q227: topology-aware consumption, an experiment that the released NSQ 1.3.0 may lack."""

from __future__ import annotations

import pytest


@pytest.mark.deviation("NSQ as released may lack the experiment, and lets a far client have some of it")
def test_case_227_clients_in_the_same_zone_come_first(shared_broker, topic, channel):
    broker = shared_broker(
        topology_zone="here", topology_region="r", enable_experiment=("topology-aware-consumption",)
    )
    with broker.connect() as far, broker.connect() as near:
        far.identify(topology_zone="there", topology_region="r")
        far.sub(topic, channel, rdy=20)
        near.identify(topology_zone="here", topology_region="r")
        near.sub(topic, channel, rdy=20)
        far.barrier()
        near.barrier()
        broker.publish(topic, *(b"%d" % number for number in range(21)))
        assert len(near.read_messages(20)) == 20
        far.read_message()
        stats = broker.channel_stats(topic, channel)
        assert (stats["zone_local_msg_count"], stats["region_local_msg_count"]) == (20, 1)
        assert "global_msg_count" not in stats
