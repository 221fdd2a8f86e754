"""A picture of what `kvtier bench fs` measured. The only module that imports matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from kvtier.cli.bench_fio import FioBest

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.cli.bench_fs import Measured


def draw(measured: Measured, file: Path) -> None:
    """Throughput over block size, a line per size of job; fio's best is dashed.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    jobs = sorted({job for _, job in measured.times})
    sizes = sorted({size for size, _ in measured.times})
    for place, operation in enumerate(("store", "load")):
        axes = figure.add_subplot(1, 2, place + 1)
        for index, job in enumerate(jobs):
            shapes = [(size, job) for size in sizes if (size, job) in measured.times]
            color = f"C{index}"
            axes.plot(
                [size for size, _ in shapes],
                [
                    size * job / getattr(measured.times[size, job], operation) / 1e9
                    for size, _ in shapes
                ],
                marker="o",
                color=color,
                label=f"jobs of {job}",
            )
            fio = [
                (size, _speed(measured.fio[shape], operation))
                for shape in shapes
                if shape in measured.fio
                for size in shape[:1]
            ]
            axes.plot(
                [size for size, _ in fio],
                [speed for _, speed in fio],
                linestyle="--",
                marker="x",
                alpha=0.6,
                color=color,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [_label(size) for size in sizes])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("block")
        axes.set_ylabel("GB/s")
        axes.set_title(f"{operation} (dashed: fio)" if measured.fio else operation)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, format="png", dpi=120)


def _speed(best: FioBest, operation: str) -> float:
    return best.write if operation == "store" else best.read


def _label(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
