"""`lifetrace show`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lifetrace.errors import UsageError

from .options import print_trace

if TYPE_CHECKING:
    from rich.console import Console

FORMATS = ("text", "markdown", "csv", "json")


@click.command(short_help="Print the summary of a stored trace.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json: one document and nothing else.")
def show(path: Path, kind: str, as_json: bool) -> None:
    """Print the summary of the trace in PATH; of a folder of runs a line each (they may lie up to three
    folders deep), of a sweep its table.

    markdown holds all of it; csv the stages alone, a row each, times in ns.
    """
    if as_json and kind not in ("text", "json"):
        raise click.UsageError(f"--json and --format {kind} exclude each other.")
    if _is_folder_of_runs(path):
        _show_runs(path, "json" if as_json else kind)
        return
    if kind in ("markdown", "csv"):
        from lifetrace.analysis import formats
        from lifetrace.analysis.summary import summarize
        from lifetrace.analysis.trace import read_trace

        write = formats.markdown if kind == "markdown" else formats.csv_text
        click.echo(write(summarize(read_trace(path))), nl=False)
        return
    report = path / "report.html"
    print_trace(path, report if report.is_file() else None, as_json or kind == "json")


def _is_folder_of_runs(path: Path) -> bool:
    from lifetrace.analysis.sweep import is_sweep
    from lifetrace.analysis.trace import trace_folders

    return is_sweep(path) or trace_folders(path) not in ([], [path])


def _show_runs(path: Path, kind: str) -> None:
    """Print a folder of runs: as the table of a sweep where it is one."""
    from lifetrace.analysis.runs import read_runs
    from lifetrace.analysis.runs_view import print_runs, runs_document
    from lifetrace.analysis.sweep import is_sweep, read_sweep
    from lifetrace.analysis.sweep_view import print_sweep

    if kind not in ("text", "json"):
        raise UsageError(
            f"--format {kind} is of one trace, and {path} is a folder of runs; give one of them, or --json."
        )
    if is_sweep(path):
        sweep = read_sweep(path)
        _print(kind, sweep.to_json, lambda console: print_sweep(sweep, console))
    else:
        runs = read_runs(path)
        _print(kind, lambda: runs_document(runs), lambda console: print_runs(runs, console))


def _print(kind: str, document: Callable[[], Any], write: "Callable[[Console], None]") -> None:
    if kind == "json":
        click.echo(json.dumps(document(), indent=2, ensure_ascii=True, allow_nan=False))
        return
    from lifetrace.analysis.console import TextConsole

    write(TextConsole())
