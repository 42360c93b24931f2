"""What a delivery policy costs a channel whose messages do not fail, inside the broker.

    python -m benchmarks.micro.bench_policy

The broker runs without a server, so nothing hides the cost: beside a server's system calls the
ratio is closer to 1. Sides take turns in passes of a few milliseconds, and the processor time of a
pass is compared with that of the pass without a policy beside it. So a change of 1 % shows on a
busy machine, too: `again` is a second side without a policy, and its distance from 1 is the noise.
The range has the true median with a probability of 95 %.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.macro.loads import POLICIES, median_range
from nsparq.delivery_policy import parse_policy
from nsparq.packed import PackedBodies
from tests.broker.rig import FakeClient, Receipt, Rig

BODY = b"0123456789abcdef" * 12
MODES = {"MPUBs of 200": (200, 40), "single messages": (1, 400)}
"""Messages of a publish, and publishes of a pass."""


class Dropping(FakeClient):
    """Drops what it gets."""

    def _keep(self, data: bytes | memoryview) -> None:
        pass


class Side:
    """A topic with a channel, whose client finishes everything at once."""

    def __init__(self, rig: Rig, name: str, policy: dict[str, object] | None) -> None:
        self._rig, self._topic, channel = rig, rig.topic(name), rig.channel("c", name)
        if policy is not None:
            channel.change_policy(parse_policy(policy, name))
        self._client = Dropping(name)
        rig.broker.subscribe(self._client, name, "c")
        rig.ready(self._client, 2500)

    def seconds(self, batch: int, publishes: int) -> float:
        """Processor time of a pass."""
        rig, topic, client = self._rig, self._topic, self._client
        channel = client.channel
        assert channel is not None
        bodies, answer = PackedBodies.of([BODY] * batch), Receipt()
        began = time.process_time()
        for _ in range(publishes):
            first = topic.first_id + topic.log.end
            topic.publishing.publish(bodies, 0, answer)
            rig.turn()
            assert not channel.delivery.finish(client, [(first, first + batch)], rig.clock())
            rig.turn()
        return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.bench_policy", description=__doc__)
    parser.add_argument("--passes", type=int, default=300, metavar="N", help="of each side (%(default)s)")
    options = parser.parse_args()
    gc.disable()
    for mode, (batch, publishes) in MODES.items():
        times: dict[str, list[float]] = {label: [] for label in POLICIES}
        with tempfile.TemporaryDirectory(prefix="bench-policy-") as directory:
            rig = Rig(Path(directory))
            sides = {
                label: Side(rig, f"t{number}", values)
                for number, (label, values) in enumerate(POLICIES.items())
            }
            for number in range(options.passes):
                first = number % len(sides)
                for label in [*sides][first:] + [*sides][:first]:
                    times[label].append(sides[label].seconds(batch, publishes))
            rig.close()
        without, *others = POLICIES
        used = statistics.median(times[without]) / (batch * publishes) * 1e6
        sys.stdout.write(f"{mode}: {used:.2f} us a message without a policy\n")
        for label in others:
            ratios = [one / base for one, base in zip(times[label], times[without], strict=True)]
            low, high = median_range(ratios)
            sys.stdout.write(f"    {label:22} {statistics.median(ratios):.3f} x ({low:.3f} to {high:.3f})\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
