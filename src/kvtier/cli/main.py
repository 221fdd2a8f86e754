"""The entry point `kvtier`: runs the commands, or says what is missing to run them."""

from __future__ import annotations

import sys

_EXTRA_PACKAGES = ("typer", "rich")


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        from kvtier.cli.app import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRA_PACKAGES:
            raise
        sys.stderr.write(
            f"kvtier: the command line needs {missing.name}, which is not installed: "
            "pip install 'kvtier[cli]'\n"
        )
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
