"""What can be wrong with a pipeline beyond its file."""

from __future__ import annotations

import re

from nsparq.errors import NsparqError

__all__ = ["PipelineError", "in_words"]

MAX_WORDS = 1000


class PipelineError(NsparqError):
    """A pipeline that cannot be built or run; the text names pipeline and key."""


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
    head, trace, rest = text.partition("Traceback (most recent call last):")
    if trace:
        # Frames are indented; what was raised is not.
        raised = [line for line in rest.splitlines() if line and not line.startswith((" ", "\t"))]
        text = f"{head.strip()} {' '.join(raised)}"
    words = " ".join(text.split())
    words = re.sub(r" ?SQLSTATE: \w{5}$", "", words).removeprefix("[USER_RAISED_EXCEPTION] ")
    return words[:MAX_WORDS] or type(error).__name__
