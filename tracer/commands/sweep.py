"""`lifetrace sweep`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    GroupedCommand,
    detail_option,
    generate_options,
    measuring_options,
    model_options,
    model_source,
    option,
    progress,
    prompt_options,
    prompt_texts,
)

if TYPE_CHECKING:
    from lifetrace.analysis.sweep import Sweep
    from lifetrace.sweep import SweepSettings

DTYPES = ("auto", "float32", "float16", "bfloat16")


def _words(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str | None, ...]:
    """Read a comma list; of nothing, the one choice that is the model's."""
    if value is None:
        return (None,)
    words = tuple(word.strip() for word in value.split(","))
    if not all(words):
        raise click.BadParameter(f"{value!r} has an empty place; write values between commas, such as a,b.")
    return words


def _numbers(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int | None, ...]:
    """Read a comma list of whole numbers above 0."""
    if value is None:
        return (None,)
    words = [word.strip().replace("_", "") for word in value.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise click.BadParameter(f"{value!r} is no list of whole numbers above 0; write 32,128,512.")
    return tuple(int(word) for word in words)


def _dtypes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str | None, ...]:
    words = _words(ctx, parameter, value)
    for word in words:
        if word not in DTYPES:
            raise click.BadParameter(f"{word!r} is not one of {', '.join(DTYPES)}.")
    return words


@click.command(cls=GroupedCommand, short_help="Trace a grid of settings, into one table and one page.")
@option("Grid", "--prompt-length", callback=_numbers, default="128", metavar="N,…", help="Tokens of each prompt.")
@option("Grid", "--batch", callback=_numbers, default="1", metavar="N,…", help="How often each prompt is given.")
@option("Grid", "--max-new-tokens", callback=_numbers, default="64", metavar="N,…", help="Tokens to generate.")
@option("Grid", "--dtype", callback=_dtypes, default="auto", metavar="NAME,…", help="auto, float32, float16, bfloat16.")
@option(
    "Grid",
    "--attn-implementation",
    "attention",
    callback=_words,
    metavar="NAME,…",
    help="eager, sdpa, flash_attention_2, …  [default: the model's]",
)
@option(
    "Grid",
    "--cache-implementation",
    "cache",
    callback=_words,
    metavar="NAME,…",
    help="dynamic, static, offloaded, quantized, …  [default: the model's]",
)
@option("Grid", "--threads", callback=_numbers, metavar="N,…", help="Threads of torch.  [default: as many as it takes]")
@prompt_options
@model_options
@generate_options
@detail_option("layer")
@measuring_options
@option(
    "Output",
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the sweep.  [default: traces/sweep-<model>]",
)
@option("Output", "--report/--no-report", default=True, help="Write sweep.html into the folder.")
@option("Output", "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def sweep(as_json: bool, report: bool, **given: Any) -> None:
    """Trace every combination of the values that the options of the grid list.

    \b
    lifetrace sweep --prompt-length 32,128,512 --batch 1,4,16
    lifetrace sweep --dtype float32,bfloat16 --threads 1,2,4 --max-new-tokens 16

    Prompts are repeated or cut to exactly their length, and each point gives exactly its new tokens.
    Each point is a trace in a folder of its own below DIR, beside sweep.parquet (a row a point) and
    sweep.html. The same command goes on where one was ended or killed; another grid with the same
    other settings extends the folder. A point that fails is noted with its reason, and the exit code
    is 1.
    """
    settings = _settings(given)
    from lifetrace import sweep as sweeping
    from lifetrace.analysis.sweep import read_sweep

    failed = sweeping.sweep(settings, _inside, _announce)
    progress("")
    found = read_sweep(settings.out)
    page = _write(found, report)
    if as_json:
        document = found.to_json() | {"report": str(page) if page else None, "failed": failed}
        click.echo(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False))
    else:
        _print(found, page)
    sys.exit(1 if failed else 0)


def _inside(text: str) -> None:
    """Show what goes on inside a point, where a line can be rewritten."""
    if sys.stderr.isatty():
        progress(text)


def _announce(text: str) -> None:
    progress("")
    click.echo(text, err=True)


def _write(found: "Sweep", report: bool) -> Path | None:
    """Write the table, and the page if it is wanted."""
    from lifetrace.analysis.sweep import write_table

    write_table(found)
    if not report:
        return None
    from lifetrace.analysis.sweep_page import write_page

    return write_page(found)


def _print(found: "Sweep", page: Path | None) -> None:
    from lifetrace.analysis.console import TextConsole
    from lifetrace.analysis.sweep import TABLE
    from lifetrace.analysis.sweep_view import print_sweep

    print_sweep(found, TextConsole())
    click.echo(f"table   {found.path / TABLE}")
    if page is not None:
        click.echo(f"report  {page}")


def _settings(given: dict[str, Any]) -> "SweepSettings":
    from lifetrace.analysis.sweep import AXES, grid
    from lifetrace.run_command import RunSettings
    from lifetrace.session import Options, safe_name
    from lifetrace.sweep import SweepSettings
    from lifetrace.workload import Prompts, parse_settings

    source = model_source(given, "auto", None)
    base = RunSettings(
        source=source,
        prompts=Prompts(tuple(prompt_texts(given["prompts"], given["prompt_files"])), given["chat"]),
        options=Options(given["detail"]),
        generation=parse_settings(given["pairs"]),
        seed=given["seed"],
        warmup=given["warmup"],
        repeats=given["repeats"],
        baseline=given["baseline"],
        memory=given["memory"],
    )
    return SweepSettings(
        points=grid({axis.key: given[axis.key] for axis in AXES}),
        base=base,
        out=given["out"] or Path("traces") / f"sweep-{safe_name(source.name)}",
    )
