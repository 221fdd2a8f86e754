"""`<root>/kvtier.json`: that a directory is ours, and which layout is used in it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from typing import TYPE_CHECKING, Literal

from kvtier.errors import TierError

if TYPE_CHECKING:
    from pathlib import Path

MARKER_FILE = "kvtier.json"

FORMAT = 1
"""Of everything below the root. Another number is never touched."""

Layout = Literal["files", "segments"]


def read_marker(root: Path) -> Layout | None:
    """The layout that was chosen for a root; None if it is not marked yet.

    Raises:
        TierError: the marker is damaged, or of a format that this release does not know.
        OSError: it cannot be read.
    """
    path = root / MARKER_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        marker = json.loads(text)
        found, layout = marker["format"], marker["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise TierError(
            f"{path} is damaged ({error!r}): remove it if the directory is kvtier's"
        ) from error
    if found != FORMAT or layout not in ("files", "segments"):
        raise TierError(
            f"{path} says format {found!r}, layout {layout!r}; this release knows format {FORMAT} "
            f"with files or segments: use another directory, or remove this one"
        )
    return "files" if layout == "files" else "segments"


def mark(root: Path, layout: Layout) -> Layout:
    """Mark a root unless somebody else did first.

    Returns:
        The layout that the marker says: of whoever came first.

    Raises:
        TierError: see `read_marker`.
        OSError: it cannot be written.
    """
    if (found := read_marker(root)) is not None:
        return found
    temp = root / f"{os.getpid()}-{secrets.token_hex(8)}-0.tmp"
    try:
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(json.dumps({"format": FORMAT, "layout": layout}) + "\n")
        try:
            # a link, unlike a rename, does not replace the marker of one who came first
            os.link(temp, root / MARKER_FILE)
        except FileExistsError:
            pass
        except OSError:  # no hard links here: the last of those who come at once wins
            os.rename(temp, root / MARKER_FILE)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
    found = read_marker(root)
    return layout if found is None else found
