"""The errors of the API in words, for pages and forms."""

from __future__ import annotations

from typing import Final

from nsparq.http.api import ApiError

ERRORS: Final = {
    "TOPIC_NOT_FOUND": "topic not found",
    "CHANNEL_NOT_FOUND": "channel not found",
    "NODE_NOT_FOUND": "node not found",
    "NO_PRODUCERS": "no node has this topic",
    "FORBIDDEN": "you are not allowed to do this",
    "INVALID_TOPIC": "not a valid topic name",
    "INVALID_CHANNEL": "not a valid channel name",
    "MSG_EMPTY": "the message is empty",
    "NOTHING_CHOSEN": "no messages are selected",
    "SAME_TOPIC": "the messages are already in this topic: enter another one",
    "POLICY_REFUSED": "a node refuses the policy, and none has changed",
    "ORDER_REFUSED": "a node refuses this key, and none has changed",
    "NOT_POSSIBLE": "no follower has everything: nobody could take over",
    "NOT_PRIMARY": "this node is not the primary",
    "NOT_REPLICATED": "this node is in no cluster",
    "NOT_SUPPORTED": "the nodes run NSQ's own nsqd, which does not support this",
}
"""Error codes in words."""


def error_text(error: ApiError) -> str:
    return str(error.more.get("reason", "")) or ERRORS.get(error.code, error.code)
