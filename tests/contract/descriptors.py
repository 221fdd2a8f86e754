"""Which descriptors of this process are of files that a test made."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def opened_below(root: Path) -> list[str]:
    """Path of each open file and directory below `root`, removed ones too; other threads may open
    and close what they like elsewhere meanwhile.
    """
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in paths if path.startswith(os.path.realpath(root)))
