"""What the commands share: options under headings, progress on stderr, the summary on stdout."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of options under its heading, in the order in which they are declared."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class GroupedOption(click.Option):
    """An option that knows under which heading it stands."""

    def __init__(self, *args: Any, group: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def option(group: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    """Declare an option under a heading, with its default in the help."""
    settings.setdefault("show_default", settings.get("default") is not None and not settings.get("is_flag"))
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def steps_range(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int | None]:
    """Read A:B, A: or :B."""
    if value is None:
        return 0, None
    first, colon, last = value.partition(":")
    try:
        bounds = (int(first or 0), int(last) if last else None)
    except ValueError:
        bounds = (-1, None)
    if not colon or bounds[0] < 0 or (bounds[1] is not None and bounds[1] <= bounds[0]):
        raise click.BadParameter(f"{value!r} is no range of steps; write A:B, such as 0:8, with A below B.")
    return bounds


def progress(text: str) -> None:
    """Show what goes on, on stderr: one line rewritten in a terminal, a line each elsewhere.

    No thread redraws it: a second thread would slow what is being timed.
    """
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[2K{text}", err=True, nl=False)
    elif text:
        click.echo(text, err=True)


def write_trace_report(path: Path) -> Path:
    """Write the report into a trace and return where it lies."""
    from lifetrace.analysis.report import write_report
    from lifetrace.analysis.trace import read_trace

    return write_report(read_trace(path), path / "report.html")


def print_trace(path: Path, report_path: Path | None, as_json: bool) -> None:
    """Print the summary of a trace: for people, or as one JSON document."""
    from lifetrace.analysis.summary import summarize
    from lifetrace.analysis.trace import read_trace

    summary = summarize(read_trace(path))
    if as_json:
        document = summary.to_json() | {"report": str(report_path) if report_path else None}
        click.echo(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False))
        return
    from rich.console import Console

    from lifetrace.analysis.terminal import print_summary

    console = Console()
    print_summary(summary, console)
    click.echo(f"trace   {path}")
    if report_path is not None:
        click.echo(f"report  {report_path}")
