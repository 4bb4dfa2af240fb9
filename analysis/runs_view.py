"""A folder of runs for a terminal and for programs."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from . import units
from .columns import Column, table
from .runs import Run
from .terminal import printable


def print_runs(runs: list[Run], console: Console) -> None:
    """Print one line a run, and below why some have no figures."""
    console.print(table(COLUMNS, runs, console.width))
    for run in runs:
        if run.error is not None:
            console.print(Text(f"{printable(run.name)}: {printable(run.error)}", style="yellow"))


def runs_document(runs: list[Run]) -> list[dict[str, Any]]:
    """The same as plain dictionaries."""
    return [asdict(run) for run in runs]


def bound_of(bound: str | None, efficiency: float | None) -> str:
    """What bounds a phase, with roof ÷ measured."""
    if bound is None:
        return units.NONE
    return bound if efficiency is None else f"{bound} {units.percent(efficiency)}"


def tokens_a_second(rate: float | None) -> str:
    """A rate without its unit, which stands in the heading."""
    return units.NONE if rate is None else units.significant(rate)


def _number(name: str) -> Any:
    return lambda run: units.count(getattr(run, name))


COLUMNS = (
    Column("run", lambda run: run.name, words=True),
    Column("model", lambda run: run.model or units.NONE, 4, words=True),
    Column("status", lambda run: run.status, words=True),
    Column("prompt", _number("prompt_tokens"), 1),
    Column("batch", _number("batch"), 1),
    Column("new", _number("new_tokens"), 6),
    Column("TTFT", lambda run: units.time(run.ttft_ns)),
    Column("TPOT", lambda run: units.time(run.tpot_ns)),
    Column("tokens/s", lambda run: tokens_a_second(run.decode_tokens_per_s), 2),
    Column("prefill, of roof", lambda run: bound_of(run.prefill_bound, run.prefill_efficiency), 5, words=True),
    Column("decode, of roof", lambda run: bound_of(run.decode_bound, run.decode_efficiency), 3, words=True),
)
