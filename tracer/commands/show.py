"""`lifetrace show`."""

from pathlib import Path

import click

from .options import print_trace


@click.command(short_help="Print the summary of a stored trace.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def show(path: Path, as_json: bool) -> None:
    """Print the summary of the trace in PATH."""
    report = path / "report.html"
    print_trace(path, report if report.is_file() else None, as_json)
