"""What a subscribed function takes: the type of its payload, and whether it wants the message."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin

from nsparq.client.message import Message
from nsparq.client.payloads.decode import payload_decoder
from nsparq.dead_letter import DeadLetter

__all__ = ["HandlerShape", "handler_shape"]

_LISTS: Final = (list, Sequence, Iterable)


@dataclass(frozen=True)
class HandlerShape:
    """How to call a handler: `decode` makes its first argument of a message."""

    decode: Callable[[Message], Any]
    takes_message: bool


def handler_shape(
    handler: Callable[..., Any], payload: Any, is_batch: bool, names: Mapping[str, Any]
) -> HandlerShape:
    """Raises TypeError if the handler cannot be called with a payload."""
    shown = getattr(handler, "__qualname__", repr(handler))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [*inspect.signature(handler).parameters.values()]
    first = [one for one in parameters if one.kind in positional]
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if not first or any(one not in first[:2] for one in needed):
        raise TypeError(f"{shown} must take the payload, and optionally the message after it")
    kind = payload
    if kind is None:
        if first[0].annotation is inspect.Parameter.empty:
            raise TypeError(f"{shown} has no type for its payload: annotate {first[0].name!r}")
        kind = _evaluate(first[0].annotation, handler, names)
        if is_batch:
            if get_origin(kind) not in _LISTS:
                raise TypeError(f"{shown} handles batches: annotate {first[0].name!r} as a list of something")
            kind = get_args(kind)[0]
    takes_message = len(first) > 1 and first[1] in needed
    if kind is Message:
        return HandlerShape(lambda message: message, takes_message)
    decode = payload_decoder(kind, names)
    if kind is DeadLetter:
        return HandlerShape(lambda message: _dead_letter(message) or decode(message.body), takes_message)
    return HandlerShape(lambda message: decode(message.body), takes_message)


def _dead_letter(message: Message) -> DeadLetter | None:
    """A dead letter of nsqd, whose origin is in the headers. Others are JSON."""
    return DeadLetter.from_message(message.body, message.headers) if message.headers else None


def _evaluate(annotation: Any, handler: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """Evaluate one annotation only: others may be for type checkers."""
    function: Any = handler.func if isinstance(handler, functools.partial) else handler
    function = inspect.unwrap(function)
    where = getattr(function, "__globals__", None) or getattr(type(function).__call__, "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={"payload": annotation})
    try:
        return typing.get_type_hints(holder, where, dict(names), include_extras=True)["payload"]
    except NameError as error:
        raise TypeError(f"the annotation {annotation!r} cannot be resolved: {error}") from error
