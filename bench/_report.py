"""One form for every benchmark: a table, or one JSON object with `--json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from rich.console import Console

from kvtier.cli.bench_report import Row, rows_json, rows_table

__all__ = ["Row", "main"]


def main(doc: str, measure: Callable[[], list[Row]], *parents: argparse.ArgumentParser) -> None:
    """Measure and print. `parents` hold options of one benchmark, made with `add_help=False`."""
    parser = argparse.ArgumentParser(description=doc, parents=parents)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = measure()
    if options.json:
        print(json.dumps(rows_json(rows)))
        return
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(rows_table(rows, doc.strip().splitlines()[0]))
