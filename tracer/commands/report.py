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
    help="Where to write.  [default: report.html in the trace, sweep.html in the sweep]",
)
def report(path: Path, output: Path | None) -> None:
    """Write the HTML report of the trace, or the page of the sweep, in PATH and print where it lies."""
    from lifetrace.analysis.sweep import is_sweep, read_sweep

    if is_sweep(path):
        from lifetrace.analysis.sweep_page import write_page

        click.echo(write_page(read_sweep(path), output))
        return
    from lifetrace.analysis.files import place_in
    from lifetrace.analysis.report import write_report
    from lifetrace.analysis.trace import read_trace

    trace = read_trace(path)
    click.echo(write_report(trace, output or place_in(trace.path, "report.html")))
