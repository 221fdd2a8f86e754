"""The one compiled part; all else stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvtier.tiers.fs.native_files",
            ["src/kvtier/tiers/fs/native_files.c"],
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra"],
            py_limited_api=True,
            optional=True,  # without a C compiler kvtier is installed all the same
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
