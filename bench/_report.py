"""One form for every benchmark: a table, or one JSON object with `--json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its baseline; `ratio` = value / baseline."""

    name: str
    value: float
    unit: str
    baseline: float
    baseline_name: str
    better: str  # "higher" or "lower"

    @property
    def ratio(self) -> float:
        """Value over baseline."""
        return self.value / self.baseline if self.baseline else float("nan")


def main(doc: str, measure: Callable[[], list[Row]], *parents: argparse.ArgumentParser) -> None:
    """Measure and print. `parents` hold options of one benchmark, made with `add_help=False`."""
    parser = argparse.ArgumentParser(description=doc, parents=parents)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = measure()
    if options.json:
        ratios = [row.ratio if row.baseline else None for row in rows]
        report = [{**asdict(row), "ratio": ratio} for row, ratio in zip(rows, ratios, strict=True)]
        print(json.dumps({"rows": report}))
        return
    print(doc.strip().splitlines()[0])
    print(f"{'':44}{'kvtier':>12}{'baseline':>12}{'ratio':>9}")
    for row in rows:
        label = f"{row.name} ({row.unit}, {row.better} is better)"
        print(f"{label:44.60}{row.value:12.3f}{row.baseline:12.3f}{row.ratio:9.3f}")
