"""The demo's pipeline file, where it can be run."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

__all__ = ["pipeline_file"]


def pipeline_file(directory: Path) -> Path:
    """A copy in a directory of its own: its results will be beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "shop.toml"
    with resources.as_file(resources.files("nsparq.demo") / target.name) as source:
        shutil.copyfile(source, target)
    return target
