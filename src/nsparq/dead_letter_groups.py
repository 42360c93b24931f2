"""Groups of dead letters, as nsqd's `GET /dead_letters` tells them, for those who ask several
nsqds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

STATES_IN_WORDS: Final = {
    "ready": "can be put back",
    "redriven": "were put back before",
    "no_channel": "have no channel any more",
    "not_kept": "have an ephemeral channel",
    "owned": "have a channel of a Spark query",
    "unfinished": "are still in their channel",
    "expired": "would expire at once",
}
"""The states of dead letters that `GET /dead_letters` of nsqd tells."""

Groups = dict[tuple[str, str, str], dict[str, Any]]
"""Groups of dead letters, as nsqd shows them, by topic, channel and reason."""


def merge_groups(groups: Groups, more: Iterable[Mapping[str, Any]], most: int) -> None:
    """Add the groups of another answer, or of another nsqd. `most` is the number of examples to
    keep of each, the newest."""
    for one in more:
        key = (one["topic"], one["channel"], one["reason"])
        known = groups.setdefault(key, {**one, "states": Counter(), "examples": []})
        known["states"].update(one["states"])
        known["first"], known["last"] = min(known["first"], one["first"]), max(known["last"], one["last"])
        examples = sorted([*known["examples"], *one["examples"]], key=lambda one: -one["given_up"])
        known["examples"] = examples[:most]
