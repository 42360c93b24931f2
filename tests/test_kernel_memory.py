"""The compiled kernel touches only memory of its own, also on bytes that end in the middle of a
frame."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.test_kernel import needs_kernel

ROOT = Path(__file__).parents[1]

SANITIZERS = ("address", "undefined")
TESTS = ("tests/test_kernel.py", "tests/test_headers.py", "tests/wire/test_client.py")
RUN = """
import importlib.util, sys, pytest
spec = importlib.util.spec_from_file_location("nsparq._kernel", sys.argv[1])
sys.modules["nsparq._kernel"] = kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
raise SystemExit(pytest.main(sys.argv[2:]))
"""


@needs_kernel
def test_sanitizers_find_nothing_in_the_kernel(tmp_path: Path) -> None:
    built = tmp_path / "_kernel.so"
    checks = [f"-fsanitize={','.join(SANITIZERS)}", "-fno-sanitize-recover=all"]
    include = f"-I{sysconfig.get_path('include')}"
    source = ROOT / "src/nsparq/_kernel.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-g", *checks, include, source, "-o", built], check=True)
    # The sanitizer has to replace malloc, and Python has to use that for every object.
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(library, ("libasan.so", "libubsan.so"))),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    run = subprocess.run(
        [sys.executable, "-c", RUN, built, "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


def library(name: str) -> str:
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()
