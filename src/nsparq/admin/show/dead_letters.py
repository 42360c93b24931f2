"""The page of dead letters: by reason, with an example of each; filter, rehearse, put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from nsparq.admin.change.dead_letters import FEATURE, FoundLetters
from nsparq.admin.change.operations import BadTarget, parse_target
from nsparq.admin.routing import path_values
from nsparq.dead_letter_groups import STATES_IN_WORDS
from nsparq.http.api import Request, Response

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["FILTER", "DeadLetterPages", "filter_of"]

FILTER: Final = ("origin_topic", "channel", "reason", "since", "until", "text", "field", "value")
"""Fields of the filter, with the names that nsqd has for them."""
REASONS: Final = ("requeued", "timed out", "disconnected", "expired")


def filter_of(fields: Mapping[str, str]) -> dict[str, str]:
    """The filter in nsqd's form. Raises BadTarget for a wrong time."""
    found = {name: fields[name].strip() for name in FILTER if fields.get(name, "").strip()}
    for name in ("since", "until"):
        if name in found:
            found[name] = parse_target("time", found[name])["time"]
    return found


class DeadLetterPages:
    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin

    async def show(self, request: Request) -> Response:
        (topic,) = path_values(request)
        letters, problem, found = self._admin.dead_letters, "", FoundLetters()
        if request.parameters.get("live") == "1":
            # The live part shows the progress alone.
            nodes = await self._admin.operations.nodes_with(topic, FEATURE)
        else:
            try:
                wanted = filter_of(request.parameters)
            except BadTarget as error:
                problem, wanted = str(error), {}
            nodes, found = await letters.read(topic, wanted)
        return self._admin.pages.render(
            request,
            "dead_letters.html",
            topic=topic,
            nodes=nodes,
            found=found,
            groups=[found.groups[key] for key in sorted(found.groups, key=lambda key: (key[2], key))],
            problem=problem,
            asked={name: request.parameters.get(name, "") for name in FILTER},
            reasons=REASONS,
            words=STATES_IN_WORDS,
            redrives=await letters.progress(topic) if nodes.able else [],
        )
