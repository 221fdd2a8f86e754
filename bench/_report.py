"""One form for every benchmark: a table, or one JSON object with `--json`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvtier.cli.bench_report import Row, print_rows

__all__ = ["Row", "main"]


def main(doc: str, measure: Callable[[], list[Row]], *parents: argparse.ArgumentParser) -> None:
    """Measure and print. `parents` hold options of one benchmark, made with `add_help=False`."""
    parser = argparse.ArgumentParser(description=doc, parents=parents)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    print_rows(measure(), doc.strip().splitlines()[0], json=options.json)
