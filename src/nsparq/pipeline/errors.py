"""What can be wrong with a pipeline beyond its file, and whether to start the pipeline again could help."""

from __future__ import annotations

import importlib
import re
from typing import Final

from nsparq.errors import NsparqError

__all__ = ["FunctionFailed", "NothingYet", "PipelineError", "in_words", "is_refused_state", "retry_helps"]

MAX_WORDS = 1000

_OURS: Final = re.compile(r"\b(nsparq(?:\.\w+)+)\.([A-Z]\w*)(?=: )")
"""An error of ours in a traceback that has come through Spark."""
_STATE: Final = r"STREAMING_STATEFUL_OPERATOR_\w+|STATE_STORE_\w*(SCHEMA|TYPE_CHANGE)\w*"
"""Spark's words for a query that does not fit its state."""
_REFUSED_STATE: Final = re.compile(rf"\[({_STATE})\]|sources in the checkpoint offsets and now there are")
_FOR_GOOD: Final = re.compile(
    r"\[(USER_RAISED_EXCEPTION|UNRESOLVED_COLUMN|TABLE_OR_VIEW_NOT_FOUND|DATA_SOURCE_NOT_FOUND)\b"
)
"""Spark's words for a message or a row that was refused, and for a query that cannot be."""
_MAY_PASS: Final = re.compile(r"\[FAILED_JDBC\.CONNECTION\b")
"""A database that is away, which Spark calls an AnalysisException."""


class PipelineError(NsparqError):
    """A pipeline that cannot be built or run; the text names pipeline and key."""

    retry_helps = False


class NothingYet(PipelineError):
    """What the pipeline needs to begin is not there, and may come: messages to infer a schema from."""

    retry_helps = True


class FunctionFailed(PipelineError):
    """A function of the user's that writes rows somewhere, for a reason that may pass."""

    retry_helps = True


def retry_helps(error: BaseException) -> bool:
    """Whether a pipeline that ended with this error is worth starting again.

    It is not after an error that would come again each time, or that a person has to decide about: a wrong
    query, schema or option, a message that does not decode, lost messages, a checkpoint that is refused.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no stubs
    from pyspark.errors import AnalysisException, PySparkException

    cause = error.__cause__
    if type(error) is PipelineError and isinstance(
        cause, NsparqError | PySparkException | Py4JError | OSError
    ):
        # A step that could not be done, and why.
        return retry_helps(cause)
    if isinstance(error, NsparqError):
        return error.retry_helps
    text = str(error)
    if named := _OURS.findall(text):
        return _class_helps(*named[-1])
    if _MAY_PASS.search(text):
        return True
    return not (isinstance(error, AnalysisException) or _FOR_GOOD.search(text) or is_refused_state(error))


def is_refused_state(error: BaseException) -> bool:
    """Whether Spark says that a query does not fit the state in its checkpoint."""
    return _REFUSED_STATE.search(str(error)) is not None


def _class_helps(module: str, name: str) -> bool:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return True
    return bool(getattr(found, "retry_helps", True))


def in_words(error: BaseException) -> str:
    """What Spark says, without the plans and traces that it adds."""
    text = str(error).strip()
    for end in (
        "\n\nJVM stacktrace",
        "\n=== Streaming Query",
        ";\n'",
        ";\n",
        "\n\tat ",
        "\nDriver stacktrace",
    ):
        text = text.partition(end)[0]
    text = text.removeprefix("An exception was raised by the Python Proxy. Return Message: ")
    head, trace, rest = text.partition("Traceback (most recent call last):")
    if trace:
        # Frames are indented; what was raised is not.
        raised = [line for line in rest.splitlines() if line and not line.startswith((" ", "\t"))]
        text = f"{head} {' '.join(raised)}"
    words = " ".join(text.split())
    words = re.sub(r" ?SQLSTATE: \w{5}$", "", words).removeprefix("[USER_RAISED_EXCEPTION] ")
    return words[:MAX_WORDS] or type(error).__name__
