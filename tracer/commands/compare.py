"""`lifetrace compare`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lifetrace.errors import UsageError

if TYPE_CHECKING:
    from lifetrace.analysis.compare import Comparison, Verdict


def _share(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Read `5%` or `0.05`."""
    if value is None:
        return None
    try:
        share = float(value.removesuffix("%")) / 100 if value.endswith("%") else float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise click.BadParameter(f"{value!r} is no share; write 5% or 0.05.")
    return share


@click.command(short_help="Compare runs: what changed, and where the time moved.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FIRST SECOND [MORE]...")
@click.option(
    "--fail-above",
    "allowed",
    callback=_share,
    metavar="SHARE",
    help="Exit 1 where TTFT, TPOT, peak memory or a stage got worse by more than this, such as 5%, beyond the noise.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Also write one HTML page.")
def compare(paths: tuple[Path, ...], allowed: float | None, as_json: bool, output: Path | None) -> None:
    """Compare runs with the FIRST: what was different, what took longer beyond the noise, where the time moved.

    Each path is a trace, or a folder of traces of the same work, which count as more repeats. How
    sure a difference is comes from drawing repeats and steps anew; of single calls nothing is judged.
    """
    from lifetrace.analysis import compare as comparing
    from lifetrace.analysis.trace import read_traces

    if len(paths) < 2:
        raise UsageError("There is nothing to compare with; give two or more traces.")
    first, *others = [read_traces(path) for path in paths]
    found = [comparing.compare(first, other) for other in others]
    verdicts = [comparing.gate(first, other, allowed) for other in others] if allowed is not None else []
    if output is not None:
        _write_page(found, output)
    if as_json:
        documents = [comparison.to_json() for comparison in found]
        for document, verdict in zip(documents, verdicts, strict=False):
            document["gate"] = {
                "allowed": allowed,
                "judged": verdict.judged,
                "unjudged": verdict.unjudged,
                "regressions": [{"phase": row.phase, "name": row.name} for row in verdict.regressions],
            }
        click.echo(json.dumps(documents, indent=2, allow_nan=False))
    else:
        _print(found, output)
    _end(verdicts, allowed)


def _print(found: "list[Comparison]", output: Path | None) -> None:
    from lifetrace.analysis.compare_view import print_comparison
    from lifetrace.analysis.console import TextConsole

    console = TextConsole()
    for comparison in found:
        print_comparison(comparison, console)
    if output is not None:
        click.echo(f"page    {output}")


def _end(verdicts: "list[Verdict]", allowed: float | None) -> None:
    """Say what the gate decided, and exit by it: 1 for a regression, 2 where nothing could be judged."""
    from lifetrace.analysis.compare_view import gate_words

    for verdict in verdicts:
        click.echo(gate_words(verdict, allowed or 0.0), err=True)
    if any(verdict.regressions for verdict in verdicts):
        sys.exit(1)
    if any(verdict.unjudged for verdict in verdicts):
        sys.exit(2)


def _write_page(found: "list[Comparison]", output: Path) -> None:
    from lifetrace.analysis.compare_page import page

    try:
        output.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The page {output} cannot be written: {error.strerror}. Give -o another name.") from None
