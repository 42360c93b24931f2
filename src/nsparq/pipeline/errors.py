"""Errors of a pipeline beyond its file, and whether a restart could help."""

from __future__ import annotations

import importlib
import re
from typing import Final

from nsparq.errors import NsparqError

MAX_WORDS = 1000

_OURS: Final = re.compile(r"\b(nsparq(?:\.\w+)+)\.([A-Z]\w*)(?=: )")
"""One of our own errors in a traceback from Spark."""
_STATE: Final = r"STREAMING_STATEFUL_OPERATOR_\w+|STATE_STORE_\w*(SCHEMA|TYPE_CHANGE)\w*"
"""Spark's error classes for a query that does not fit its state."""
_REFUSED_STATE: Final = re.compile(rf"\[({_STATE})\]|sources in the checkpoint offsets and now there are")
_PERMANENT: Final = re.compile(
    r"\[(USER_RAISED_EXCEPTION|UNRESOLVED_COLUMN|TABLE_OR_VIEW_NOT_FOUND|DATA_SOURCE_NOT_FOUND)\b"
)
"""Spark's error classes for a refused message or row, and for a wrong query."""
_TEMPORARY: Final = re.compile(r"\[FAILED_JDBC\.CONNECTION\b")
"""A database that cannot be reached, for which Spark raises AnalysisException."""


class PipelineError(NsparqError):
    """A pipeline that cannot be built or run. The text names the pipeline and the key."""

    retry_helps = False


class NothingYet(PipelineError):
    """There are no messages yet to infer a schema from."""

    retry_helps = True


class FunctionFailed(PipelineError):
    """A function that is a sink has failed, for a reason that may be temporary."""

    retry_helps = True


def retry_helps(error: BaseException) -> bool:
    """Whether a restart may help a pipeline that ended with this error.

    It does not help if the error would come again or needs a decision: a wrong query, schema or
    option, a message that does not decode, lost messages, a refused checkpoint.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no stubs
    from pyspark.errors import AnalysisException, PySparkException

    cause = error.__cause__
    if type(error) is PipelineError and isinstance(
        cause, NsparqError | PySparkException | Py4JError | OSError
    ):
        # The cause says why.
        return retry_helps(cause)
    if isinstance(error, NsparqError):
        return error.retry_helps
    text = str(error)
    if named := _OURS.findall(text):
        return _class_helps(*named[-1])
    if _TEMPORARY.search(text):
        return True
    return not (isinstance(error, AnalysisException) or _PERMANENT.search(text) or is_refused_state(error))


def is_refused_state(error: BaseException) -> bool:
    """Whether Spark refused a query because it does not fit the state in its checkpoint."""
    return _REFUSED_STATE.search(str(error)) is not None


def _class_helps(module: str, name: str) -> bool:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return True
    return bool(getattr(found, "retry_helps", True))


def in_words(error: BaseException) -> str:
    """Spark's error text, without plans and tracebacks."""
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
        # Stack frames are indented, the error itself is not.
        raised = [line for line in rest.splitlines() if line and not line.startswith((" ", "\t"))]
        text = f"{head} {' '.join(raised)}"
    words = " ".join(text.split())
    words = re.sub(r" ?SQLSTATE: \w{5}$", "", words).removeprefix("[USER_RAISED_EXCEPTION] ")
    return words[:MAX_WORDS] or type(error).__name__
