"""How properties are searched: the same examples in every run, or, with
`--hypothesis-profile=search`, other ones each time.

Tests start hundreds of Python processes: they share compiled files even where the environment says
that there should be none, and do without a thread per core in numpy's linear algebra.

Programs of administrators (mkfs, losetup) are found where they are, whatever the user's PATH.

Shells have their background jobs ignore SIGINT, and so would the children that tests interrupt.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534

settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", settings.get_profile("fixed"), derandomize=False)
settings.load_profile("fixed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nothing that was imported or collected is looked at by the garbage collector again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory of an ordinary user, and that user's rights while the test runs."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() != 0:
            yield Path(directory)
            return
        os.chown(directory, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(directory)
        finally:
            os.seteuid(0)
