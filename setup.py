"""The one thing pyproject.toml cannot say: the compiled kernel is optional."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Without a C compiler the install goes on, and nsparq.kernel uses its Python twins.
        Extension("nsparq._kernel", ["src/nsparq/_kernel.c"], extra_compile_args=["-O3"], optional=True)
    ]
)
