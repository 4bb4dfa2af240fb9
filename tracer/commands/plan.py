"""`lifetrace plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lifetrace.errors import UsageError

from .options import GroupedCommand, option

if TYPE_CHECKING:
    from lifetrace.plan import Planner


def _number(group: str, name: str, text: str) -> Any:
    return option(group, name, type=int, metavar="N", help=text)


@click.command(cls=GroupedCommand, short_help="Tell what a model would take and what would fit, without weights.")
@click.argument("model", required=False)
@_number("Dimensions, in place of a model", "--hidden-size", "Width of the hidden state.")
@_number("Dimensions, in place of a model", "--layers", "Decoder layers.")
@_number("Dimensions, in place of a model", "--heads", "Attention heads.")
@_number("Dimensions, in place of a model", "--kv-heads", "Heads of keys and values.  [default: as many as heads]")
@_number("Dimensions, in place of a model", "--head-dim", "Width of a head.  [default: width ÷ heads]")
@_number("Dimensions, in place of a model", "--intermediate-size", "Width inside the MLP.")
@_number("Dimensions, in place of a model", "--vocab-size", "Tokens of the vocabulary.")
@option("Dimensions, in place of a model", "--tied", is_flag=True, help="The head is the embedding's matrix.")
@option(
    "Run",
    "--dtype",
    metavar="NAME",
    help="auto, float32, float16, bfloat16, float8, int8 or int4.  [default: the model's, else bfloat16]",
)
@option(
    "Run", "--kv-dtype", metavar="NAME", help="Type of keys and values: float16, float8, …  [default: activations']"
)
@option("Run", "--batch", type=click.IntRange(min=1), metavar="N", help="Sequences at once.  [default: 1]")
@option(
    "Run",
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Positions in the cache at the end.  [default: 4,096, or the model's]",
)
@option(
    "Run",
    "--prompt-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of each prompt.  [default: the whole context]",
)
@option(
    "Run",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens to generate: the last of them needs no place in the cache.",
)
@option("Run", "--attn-implementation", "attention", metavar="NAME", help="eager or sdpa.  [default: the model's]")
@option("Device", "--gpu", metavar="NAME", help="A device of the table, or `local`: this one as calibrated.")
@option("Device", "--gpus", type=click.IntRange(min=1), default=1, metavar="N", help="How many of them.")
@option("Device", "--memory", metavar="SIZE", help="Memory of one device, such as 24GB (10⁹) or 24GiB (2³⁰).")
@option("Output", "--explain", is_flag=True, help="Show the formula of every number, with values filled in.")
@option("Output", "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@option("Output", "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with curves.")
@option("Other", "--trust-remote-code", is_flag=True, help="Run code that the model's repository brings.")
def plan(explain: bool, as_json: bool, plot: Path | None, **given: Any) -> None:
    """Tell what MODEL takes, what fits, and the least time of its steps, from its config alone.

    MODEL is a name of the catalogue (llama-2-7b, qwen2.5-32b, …), a config.json or its folder, a
    trace, or a hub id that is cached. No weights are loaded and no GPU is needed: the model is built
    without memory, and its real modules and cache are asked.

    \b
    lifetrace plan llama-2-7b --dtype float16 --context 4096 --batch 16
    lifetrace plan qwen2.5-32b --gpu "RTX 4090" --gpus 2
    lifetrace plan --layers 80 --hidden-size 4096 --heads 32 --context 1000 --explain
    """
    from lifetrace.plan import Planner
    from lifetrace.plan_subject import Dimensions, Request

    names = ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size", "tied")
    dimensions = Dimensions(**{name: given.pop(name) for name in names})
    planner = Planner(Request(dimensions=dimensions, **given))
    document = planner.plan()
    _write_plot(planner, plot)
    if as_json:
        click.echo(json.dumps(document.to_json() | {"plot": str(plot) if plot else None}, indent=2, allow_nan=False))
        return
    from lifetrace.analysis.console import TextConsole
    from lifetrace.analysis.plan_view import print_plan

    print_plan(document, TextConsole(), explain)
    if plot is not None:
        click.echo(f"plot  {plot}")


def _write_plot(planner: "Planner", path: Path | None) -> None:
    if path is None:
        return
    from lifetrace.analysis.plan_view import plan_page

    page = plan_page(planner.plan(), planner.curves())
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The plot {path} cannot be written: {error.strerror}. Give --plot another name.") from None
