"""Only what pyproject.toml cannot express: the compiled kernel is optional."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Without a C compiler the installation continues, and nsparq.kernel uses the Python
        # versions.
        Extension("nsparq._kernel", ["src/nsparq/_kernel.c"], extra_compile_args=["-O3"], optional=True)
    ]
)
