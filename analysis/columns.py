"""Tables for a terminal of any width: the columns that matter least are left out until the rest fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .terminal import printable

GAP = 2  # blanks between two columns
EDGES = 2  # a blank before and behind the table


@dataclass(frozen=True)
class Column:
    """A column: its heading, the text of a row in it, and its rank: those of rank 0 are never left out."""

    heading: str
    cell: Callable[[Any], str]
    rank: int = 0
    words: bool = False


def fitting(columns: Sequence[Column], rows: Sequence[Any], width: int) -> list[Column]:
    """The columns that fit beside each other, those of the highest rank left out first."""
    kept = list(columns)
    while _width(kept, rows) > width and max(column.rank for column in kept) > 0:
        kept.remove(max(reversed(kept), key=lambda column: column.rank))
    return kept


def _width(columns: Sequence[Column], rows: Sequence[Any]) -> int:
    widths = [max([len(column.heading), *(len(column.cell(row)) for row in rows)]) for column in columns]
    return sum(widths) + GAP * (len(widths) - 1) + EDGES


def table(columns: Sequence[Column], rows: Sequence[Any], width: int) -> Table:
    """A table of the columns that fit."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    kept = fitting(columns, rows, width)
    for column in kept:
        made.add_column(column.heading, justify="left" if column.words else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(printable(column.cell(row))) for column in kept))
    return made
