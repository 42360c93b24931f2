"""`nsparq pipeline run` as a child of `nsparq up`, with three differences.

It uses the stack's nsqlookupd in place of the addresses in [nsq], keeps checkpoints in the stack's
folder, and serves its status where nsqadmin asks for it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nsparq import logs
from nsparq.errors import NsparqError
from nsparq.pipeline.file.reading import load
from nsparq.pipeline.file.spec import PipelineFile, SpecError
from nsparq.tools.pipeline_common import FAILED, WRONG, configure_logs, run_file

__all__ = ["main", "relocated"]

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Returns the status of `nsparq pipeline run`."""
    parser = argparse.ArgumentParser(prog="nsparq.up.pipelines")
    parser.add_argument("file", type=Path)
    parser.add_argument("--nsqlookupd", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--metrics-address", required=True)
    arguments = parser.parse_args(argv, argparse.Namespace(master="", conf=[], plain=True))
    configure_logs()
    # The parent puts the name in front of each line.
    logs.configure("info", "")
    try:
        file = relocated(load(arguments.file), arguments.nsqlookupd, arguments.checkpoint)
        return run_file(file, arguments, fail_fast=True)
    except SpecError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG
    except (NsparqError, OSError) as error:
        logger.critical("%s", error)
        return FAILED


def relocated(file: PipelineFile, nsqlookupd: str, checkpoint: str) -> PipelineFile:
    """The same pipelines with another nsqlookupd and another checkpoint folder. A pipeline that
    names its own checkpoint keeps it."""
    elsewhere = {"nsqd", "nsqlookupd"}
    nsq = {name: value for name, value in file.nsq.items() if name not in elsewhere}
    pipelines = [
        replace(one, checkpoint=f"{checkpoint}/{one.name}")
        if one.checkpoint == f"{file.run.checkpoint}/{one.name}"
        else one
        for one in file.pipelines
    ]
    return replace(
        file,
        nsq={**nsq, "nsqlookupd": nsqlookupd},
        run=replace(file.run, checkpoint=checkpoint),
        pipelines=tuple(pipelines),
    )
