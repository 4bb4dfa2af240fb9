"""`lifetrace export`."""

from pathlib import Path

import click

FORMATS = ("perfetto", "png", "svg")
# named here so that --help loads no plotly; a test holds it equal to the figures that there are
FIGURES = ("timeline", "breakdown", "roofline", "heatmap", "efficiency", "kv-growth", "memory", "token-latency")


@click.command(short_help="Write a stored trace for another program, or a figure as a picture.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(FORMATS), default="perfetto", show_default=True)
@click.option("--figure", type=click.Choice(FIGURES), help="Which figure, with png and svg.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write.  [default: perfetto.json or <figure>.<format> in the trace]",
)
def export(path: Path, kind: str, figure: str | None, output: Path | None) -> None:
    """Write the trace in PATH in another format and print where it lies.

    perfetto is trace-event JSON, which ui.perfetto.dev and chrome://tracing open: steps, stages,
    KV and memory counters, tokens. png and svg are one figure each, and need the package kaleido.
    """
    if (kind == "perfetto") == (figure is not None):
        needs = "takes no --figure" if kind == "perfetto" else f"needs --figure: one of {', '.join(FIGURES)}"
        raise click.UsageError(f"--format {kind} {needs}.")
    from lifetrace.analysis.files import place_in
    from lifetrace.analysis.trace import read_trace

    trace = read_trace(path)
    if kind == "perfetto":
        from lifetrace.analysis.perfetto import write_perfetto

        click.echo(write_perfetto(trace, output or place_in(trace.path, "perfetto.json")))
        return
    from lifetrace.analysis.gallery import write_picture

    click.echo(write_picture(trace, str(figure), output or place_in(trace.path, f"{figure}.{kind}"), kind))
