"""What a benchmark prints: rows of figures beside a baseline, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from kvtier.cli.admin_output import print_json, results_console

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its baseline.

    Attributes:
        name: stable over releases.
        value: in `unit`.
        unit: of value and baseline.
        baseline: 0 if there is none.
        baseline_name: what it is of.
        better: which direction is good.
    """

    name: str
    value: float
    unit: str
    baseline: float
    baseline_name: str
    better: Literal["higher", "lower"]

    @property
    def ratio(self) -> float | None:
        """Value over baseline; None without one."""
        return self.value / self.baseline if self.baseline else None


def rows_json(rows: Sequence[Row]) -> dict[str, Any]:
    """One object: `{"rows": [{"name", "value", "unit", "baseline", ..., "ratio"}]}`."""
    return {"rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}


def print_rows(rows: Sequence[Row], title: str, *, json: bool) -> None:
    """To the standard output, for programs or for people."""
    if json:
        print_json(rows_json(rows))
    else:
        results_console().print(rows_table(rows, title))


def rows_table(rows: Sequence[Row], title: str) -> Table:
    """The same for people."""
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("kvtier", "baseline", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.3g} {row.unit}",
            f"{row.baseline:.3g} {row.unit}" if row.baseline else "-",
            f"{row.ratio:.2f}" if row.ratio is not None else "-",
            f"{row.baseline_name}, {row.better} is better" if row.baseline else "",
        )
    return table
