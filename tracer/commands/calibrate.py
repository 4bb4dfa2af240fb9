"""`lifetrace calibrate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lifetrace.errors import UsageError

from .options import progress

if TYPE_CHECKING:
    from lifetrace.analysis.ceilings import Ceilings


@click.command(short_help="Measure what this device reaches at most.")
@click.option("--device", default="auto", metavar="DEVICE", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--quick", is_flag=True, help="A few seconds, with fewer sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with the curves.")
def calibrate(device: str, quick: bool, as_json: bool, plot: Path | None) -> None:
    """Measure matrix products, memory bandwidth and the cost of launching an operator: the ceilings.

    The figures are kept in the user's cache directory for this device, torch and thread count, and
    go into the traces of later runs. Takes about a minute; let the machine be quiet meanwhile.

    \b
    Keys of --json, rates per second, each figure as median, low, high:
      source, device, created, quick   what was measured, when
      matmul, linear      FLOP/s by dtype: over shapes; of few rows
      read, copy, matvec  bytes/s over working_set_bytes
      launch_ns           of one operator
      host_to_device_bytes_per_s       null without CUDA
      quietness           quiet, spread, others_cpu, load_average
      stored, notes       the file that keeps them; what to know
    """
    from lifetrace import calibrate as measuring
    from lifetrace.workload import pick_device

    ceilings = measuring.calibrate(pick_device(device), quick, progress)
    progress("")
    stored, notes = measuring.keep(ceilings)
    _write_plot(ceilings, plot)
    if as_json:
        document = ceilings.to_json() | {"stored": stored, "notes": notes}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    from lifetrace.analysis.ceilings_view import print_ceilings
    from lifetrace.analysis.console import TextConsole

    print_ceilings(ceilings, notes, TextConsole())
    for name, place in (("kept in", stored), ("plot", plot)):
        if place is not None:
            click.echo(f"{name}  {place}")


def _write_plot(ceilings: "Ceilings", path: Path | None) -> None:
    if path is None:
        return
    from lifetrace.analysis.ceilings_view import ceilings_figure

    try:
        path.write_text(ceilings_figure(ceilings).to_html(include_plotlyjs=True), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The plot {path} cannot be written: {error.strerror}. Give --plot another name.") from None
