"""Functions of a pipeline file, `module:function`: importing them, sending them to the tasks."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.sinks import Python
from nsparq.pipeline.file.spec import PipelineFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def load_function(name: str, place: str, directory: Path) -> Callable[..., object]:
    """Imports `module:function`. `directory` is searched first. Raises PipelineError."""
    module_name, _, function_name = name.partition(":")
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise PipelineError(f"{place} python: {module_name} cannot be imported: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PipelineError(f"{place} python: {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return]  # it is callable; nothing more is known


def send_modules(spark: SparkSession, file: PipelineFile) -> None:
    """Sends the modules of all functions to the executors, if they are beside the pipeline file."""
    steps = (step.python for one in file.pipelines for step in one.steps)
    sinks = (output.sink for one in file.pipelines for output in one.outputs)
    functions = [*steps, *(sink.function for sink in sinks if isinstance(sink, Python))]
    for name in sorted({function.partition(":")[0].partition(".")[0] for function in functions} - {""}):
        module, package = file.path.parent / f"{name}.py", file.path.parent / name
        if module.is_file():
            spark.sparkContext.addPyFile(str(module))
        elif package.is_dir():
            spark.sparkContext.addPyFile(str(_zipped(package)))


def _zipped(package: Path) -> Path:
    """A ZIP file in the cache, because executors may fetch it as long as the session lasts."""
    from nsparq.spark.session.cache import cache_directory, digest, make_once

    stamps = [(str(path), path.stat().st_mtime_ns) for path in sorted(package.rglob("*.py"))]

    def make(path: Path) -> None:
        made = shutil.make_archive(str(path), "zip", package.parent, package.name)
        os.replace(made, path)

    return make_once(cache_directory() / f"{package.name}-{digest(*stamps)}.zip", make)
