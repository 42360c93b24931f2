"""`nsparq policy`: show, set and remove the delivery policy of a topic or a channel."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Final

from nsparq.delivery_policy import DEAD_SUFFIX, DeliveryPolicy, parse_policy
from nsparq.option_table import BOOL, DURATION, FLOAT, INT, STRING, OptionError, choice, opt
from nsparq.tools.cluster import AskFailed
from nsparq.tools.command_table import CommandTable, run_command
from nsparq.tools.output import Column, age, print_json, print_rows
from nsparq.tools.settings import change_all, parse_age
from nsparq.tools.source import Answers, Source, SourceFlags

__all__ = ["POLICY", "policy"]

DEFAULT: Final = DeliveryPolicy()
LONG_DURATION: Final = replace(DURATION, from_text=parse_age)
PROGRAM: Final = "nsparq policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFlags(SourceFlags):
    action: str = opt("", "what to do", choice("show", "set", "remove"))
    topic: str = opt("", "the topic", STRING)
    channel: str = opt("", "a channel of the topic; without it, the topic itself", STRING)
    dry_run: bool = opt(False, "check the change on every nsqd, show it, and do not make it", BOOL)
    max_attempts: int = opt(
        DEFAULT.max_attempts,
        "failed attempts after which a message becomes a dead letter; 0 for no limit",
        INT,
        heading="Fields of a policy, for `set`",
    )
    count: str = opt(
        DEFAULT.count,
        "which attempts count: `failures` are REQ and timeouts, `deliveries` also those whose client "
        "disconnected",
        choice("failures", "deliveries"),
    )
    retry_delay: float = opt(
        DEFAULT.retry_delay, "delay after the first failed attempt, such as `5s`", LONG_DURATION
    )
    retry_factor: float = opt(DEFAULT.retry_factor, "each further delay is longer by this factor", FLOAT)
    max_retry_delay: float = opt(DEFAULT.max_retry_delay, "the longest delay", LONG_DURATION)
    retry_jitter: float = opt(DEFAULT.retry_jitter, "delays vary by up to this share", FLOAT)
    dead_letters: str = opt(
        "", "topic for dead letters", STRING, default_text=f"the name of the topic and `{DEAD_SUFFIX}`"
    )
    expire_after: float = opt(
        DEFAULT.expire_after,
        "age from which a message is no longer delivered, such as `7d`; 0 for never",
        LONG_DURATION,
    )
    expired: str = opt(DEFAULT.expired, "what to do with such a message", choice("dead_letters", "drop"))

    def validate(self) -> None:
        SourceFlags.validate(self)
        given = asdict(self.policy())
        if self.action == "set":
            try:
                parse_policy(given, self.topic)
            except ValueError as error:
                raise OptionError(str(error)) from None
            return
        if self.dry_run and self.action == "show":
            raise OptionError("--dry-run is for set and remove")
        for name, value in given.items():
            if value != getattr(DEFAULT, name):
                raise OptionError(f"--{name.replace('_', '-')} is for set")

    def policy(self) -> DeliveryPolicy:
        """The policy that the flags describe, not checked."""
        return DeliveryPolicy(**{one.name: getattr(self, one.name) for one in fields(DeliveryPolicy)})


POLICY: Final = CommandTable(
    "policy",
    PolicyFlags,
    words=("action", "topic", "channel"),
    required=2,
    about="""
Shows, sets or removes the delivery policy of a topic, or of a channel, on every nsqd that has it.
`set` replaces the policy as a whole: a field that is not given has its default. A channel's policy
replaces the topic's. If one nsqd refuses the change, none makes it.

An nsqd that gets the topic later has no policy. For that, use --topics-file of nsqd.
""",
    examples=(
        "nsparq policy show orders",
        "nsparq policy set orders --max-attempts=4 --retry-delay=5s",
        "nsparq policy set orders billing --max-attempts=10 --expire-after=7d --dry-run",
        "nsparq policy remove orders billing",
    ),
)

Values = Mapping[str, Any]
"""The fields of a policy, as nsqd gives them."""


def _attempts(policy: Values) -> str:
    return f"{policy['max_attempts']} {policy['count']}" if policy["max_attempts"] else "no limit"


def _retry(policy: Values) -> str:
    if not policy["retry_delay"]:
        return "at once"
    return (
        f"{age(policy['retry_delay'])}, ×{policy['retry_factor']:g} up to {age(policy['max_retry_delay'])}, "
        f"±{policy['retry_jitter']:.0%}"
    )


def _expiry(policy: Values) -> str:
    if not policy["expire_after"]:
        return "never"
    end = "dropped" if policy["expired"] == "drop" else "dead letter"
    return f"after {age(policy['expire_after'])}, {end}"


def _column(heading: str, show: Callable[[Values], str]) -> Column:
    return Column("policy", heading, show, left=True)


COLUMNS: Final = (
    Column("name", "POLICY OF", left=True),
    _column("ATTEMPTS", _attempts),
    _column("RETRY", _retry),
    Column("letters", "DEAD LETTERS", left=True),
    _column("EXPIRY", _expiry),
    Column("origin", "ORIGIN", left=True),
    Column("nodes", "NODES", left=True),
)


def _policy(options: PolicyFlags) -> int:
    source = Source(options)
    kind, names = "topic", {"topic": options.topic}
    if options.channel:
        kind, names = "channel", {**names, "channel": options.channel}
    path = f"/{kind}/settings"

    def get(address: str) -> Values:
        answer = source.ask("GET", address, path, **names)
        if "policy" not in answer:
            raise AskFailed(f"{address} runs an older nsqd, which has no policies", 501)
        return answer

    found = source.each_of(options.topic, get, options.channel)
    before = found.done
    if options.action != "show":
        wanted = {"policy": asdict(options.policy()) if options.action == "set" else None}
        found = change_all(source, found, path, wanted, names, is_dry_run=options.dry_run)
    if options.json:
        nodes = [{"node": node, **_shown(answer)} for node, answer in found.done.items()]
        change = {} if options.action == "show" else {"dry_run": options.dry_run}
        print_json(
            {"action": options.action, **names, **change, "nodes": nodes, "unreachable": found.unreachable()}
        )
    else:
        _print(options, before, found)
    return found.report(PROGRAM)


def _shown(answer: Values) -> dict[str, Any]:
    return {
        "policy": answer.get("policy"),
        "effective": answer["effective"].get("policy"),
        **{name: answer[name] for name in ("channel_policies",) if name in answer},
    }


def _print(options: PolicyFlags, before: Mapping[str, Values], found: Answers[Values]) -> None:
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    policies: dict[str, Values | None] = {}
    for node, answer in found.done.items():
        for name, policy, origin in _entries(options, answer):
            policies[repr(policy)] = policy
            groups[name, origin, repr(policy)].append(node)
    rows = [
        {
            "name": name,
            "policy": policies[values],
            "letters": _letters(policies[values], options.topic),
            "origin": origin,
            "nodes": _nodes(nodes, len(found.done)),
        }
        for (name, origin, values), nodes in groups.items()
    ]
    print_rows(rows, COLUMNS)
    if len({(origin, values) for name, origin, values in groups if name == rows[0]["name"]}) > 1:
        sys.stderr.write(f"{PROGRAM}: the nodes disagree; `nsparq policy set` makes them equal\n")
    if options.action == "show":
        return
    changed = [node for node, answer in found.done.items() if answer.get("policy") != before[node]["policy"]]
    what = f"{options.channel or options.topic} on {_nodes(changed, len(found.done))}" if changed else ""
    if options.dry_run:
        print(f"This would change {what}." if what else "This would change nothing.")
    else:
        print(f"Changed {what}." if what else "Nothing has changed: it was like this before.")


def _entries(options: PolicyFlags, answer: Values) -> Iterator[tuple[str, Values | None, str]]:
    """Name, policy and its origin, for each line about one nsqd."""
    policy = answer["effective"].get("policy")
    if options.channel:
        origin = (
            "own" if answer.get("policy") is not None else "of the topic" if policy is not None else "none"
        )
        yield options.channel, policy, origin
        return
    yield options.topic, policy, "own" if policy is not None else "none"
    for name, own in (answer.get("channel_policies") or {}).items():
        yield f"{options.topic}/{name}", own, "own"


def _letters(policy: Values | None, topic: str) -> str | None:
    return None if policy is None else policy["dead_letters"] or topic + DEAD_SUFFIX


def _nodes(nodes: list[str], count: int) -> str:
    return f"all {count} nodes" if len(nodes) == count > 1 else ", ".join(nodes)


policy = partial(run_command, POLICY, _policy)
