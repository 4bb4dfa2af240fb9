"""`lifetrace report`."""

from pathlib import Path

import click


@click.command(short_help="Write the HTML report of a stored trace.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write.  [default: report.html in the trace]",
)
def report(path: Path, output: Path | None) -> None:
    """Write the HTML report of the trace in PATH and print where it lies."""
    from lifetrace.analysis.report import write_report
    from lifetrace.analysis.trace import read_trace

    click.echo(write_report(read_trace(path), output or path / "report.html"))
