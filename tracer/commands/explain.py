"""`lifetrace explain`."""

import json
from pathlib import Path

import click


@click.command(short_help="Walk through one layer of one step.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Which forward.")
@click.option("--layer", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Which layer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def explain(path: Path, step: int, layer: int, as_json: bool) -> None:
    """Walk through one layer of one step of the trace in PATH, with the shapes of this run.

    Each module and each matrix product with its operands, FLOPs, bytes, measured time and the time
    at this device's ceilings; what is written for a moment, and the keys and values that stay.
    Record with `--detail module` to time every projection by itself.
    """
    from lifetrace.analysis.explain import explain_layer
    from lifetrace.analysis.trace import read_trace

    walk = explain_layer(read_trace(path), step, layer)
    if as_json:
        click.echo(json.dumps(walk.to_json(), indent=2, allow_nan=False))
        return
    from lifetrace.analysis.console import TextConsole
    from lifetrace.analysis.explain_view import print_walk

    print_walk(walk, TextConsole())
