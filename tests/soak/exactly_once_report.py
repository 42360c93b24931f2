"""What became of everything that was published, for people to read."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from tests.soak.support import table


@dataclass
class Result:
    """What became of everything that was published, in one sink."""

    batches: int
    found: int
    lost: list[int]
    duplicates: list[int]
    unknown: list[int]
    """Never published."""
    origins: list[str]
    """Where some of the duplicates come from."""

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.duplicates or self.unknown)

    def __str__(self) -> str:
        text = table(
            [
                ("micro-batches", self.batches),
                ("rows in the result", self.found),
                ("lost", len(self.lost)),
                ("duplicates", len(self.duplicates)),
                ("never published", len(self.unknown)),
            ]
        )
        for name in ("lost", "duplicates", "unknown"):
            if numbers := getattr(self, name):
                text += f"\n{name}: {_ranges(numbers)}"
        return "\n".join([text, *self.origins])


@dataclass
class Report:
    published: int = 0
    uncertain: int = 0
    """Messages whose publish was not answered."""
    kills: Counter[str] = field(default_factory=Counter)
    fail_overs: int = 0
    """Of a replicated nsqd."""
    starts: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Of queries, by sink, which were then started again without a new driver."""
    seconds: float = 0.0
    left_over: list[str] = field(default_factory=list)
    """Processes of Spark's that outlived their driver."""
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        return bool(self.results) and all(result.is_exact for result in self.results.values())

    def __str__(self) -> str:
        rows = [(f"killed: {name}", count) for name, count in sorted(self.kills.items())]
        rows += [
            ("killed in all", self.kills.total()),
            ("fail-overs", self.fail_overs),
            ("starts of the driver", self.starts),
            ("failures of queries", len(self.failures)),
            ("seconds", round(self.seconds)),
            ("messages published", self.published),
            ("... or perhaps not", self.uncertain),
        ]
        texts = [table(rows)]
        texts += [f"-- {name}\n{result}" for name, result in self.results.items()]
        texts += [f"left over: {one}" for one in self.left_over]
        texts += [f"{count} x {kind}" for kind, count in kinds_of(self.failures).items()]
        return "\n".join(texts)


def _ranges(numbers: list[int]) -> str:
    """Neighbours together, a few of them."""
    shown: list[list[int]] = []
    for number in sorted(numbers):
        if shown and shown[-1][1] == number - 1:
            shown[-1][1] = number
        else:
            shown.append([number, number])
    return ", ".join(f"{low}-{high}" for low, high in shown[:10]) + (" ..." if len(shown) > 10 else "")


def kinds_of(failures: list[tuple[str, str]]) -> Counter[str]:
    """What they say, without what differs each time."""
    found: Counter[str] = Counter()
    for sink, text in failures:
        said = text.partition("=== Streaming Query")[0].strip().splitlines()
        causes = [
            line for line in said if re.match(r"(Caused by: )?[\w.]*(Error|Exception|Loss|Lost)\b", line)
        ]
        found[f"{sink}: {(causes or said or ['?'])[-1][:200]}"] += 1
    return found
