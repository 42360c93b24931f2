"""Only what pyproject.toml cannot express: an optional compiled kernel, the files of deploy/ inside
the package, and a README whose links work on the package index too."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/nsparq/version.py").read_text(), re.MULTILINE)[0]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


class BuildWithDeploy(build_py):
    """Copies deploy/ into the package, as nsparq/deploy, for `nsparq deploy`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "deploy", Path(self.build_lib, "nsparq/deploy"), dirs_exist_ok=True)


class BuildKernel(build_ext):
    """Continues without a C compiler, and says what that costs. pip shows it with -v."""

    def run(self) -> None:
        super().run()
        if not Path(self.get_ext_fullpath("nsparq._kernel")).exists():
            sys.stderr.write(
                "WARNING: nsparq is built without its compiled kernel: the C compiler is missing or failed.\n"
                "Everything works, with about half the throughput. See docs/how-to/install.md.\n"
            )


def absolute(link: re.Match[str]) -> str:
    """A link of README.md, which is relative to the repository, as the package index needs it."""
    before, place = link.groups()
    is_picture = place.endswith((".png", ".svg"))
    return f"{before}{REPOSITORY}/{'raw' if is_picture else 'blob'}/v{VERSION}/{place}"


# Links with a scheme, and those inside the page, stay.
README = re.sub(r'(\]\(|src=")(?!https?:|#)([^()\s"]+)', absolute, (ROOT / "README.md").read_text("utf-8"))

setup(
    long_description=README,
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension("nsparq._kernel", ["src/nsparq/_kernel.c"], extra_compile_args=["-O3"], optional=True)
    ],
    cmdclass={"build_py": BuildWithDeploy, "build_ext": BuildKernel},
)
