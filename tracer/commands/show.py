"""`lifetrace show`."""

from pathlib import Path

import click

from .options import print_trace

FORMATS = ("text", "markdown", "csv", "json")


@click.command(short_help="Print the summary of a stored trace.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json: one document and nothing else.")
def show(path: Path, kind: str, as_json: bool) -> None:
    """Print the summary of the trace in PATH.

    markdown holds all of it; csv the stages alone, a row each, times in ns.
    """
    if as_json and kind not in ("text", "json"):
        raise click.UsageError(f"--json and --format {kind} exclude each other.")
    if kind in ("markdown", "csv"):
        from lifetrace.analysis import formats
        from lifetrace.analysis.summary import summarize
        from lifetrace.analysis.trace import read_trace

        write = formats.markdown if kind == "markdown" else formats.csv_text
        click.echo(write(summarize(read_trace(path))), nl=False)
        return
    report = path / "report.html"
    print_trace(path, report if report.is_file() else None, as_json or kind == "json")
