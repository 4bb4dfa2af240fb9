"""A comparison for people: in a terminal, and as a page."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import units
from .compare import Cause, Change, Comparison, Row, Verdict
from .terminal import printable

LEAST_SHOWN = 0.01


def print_comparison(found: Comparison, console: Console) -> None:
    """Print what differs, what cannot be compared, and what took longer."""
    console.print(Text(f"first   {printable(found.first)}  ({_calls(found.calls[0])})"))
    console.print(Text(f"second  {printable(found.second)}  ({_calls(found.calls[1])})"))
    for change in found.changes:
        console.print(Text(f"differs: {printable(change_words(change))}"))
    for refusal in found.refused:
        console.print(Text(refusal, style="yellow"))
    if found.headline:
        console.print(_table([*found.headline, *shown_stages(found)]))
    for cause in found.causes:
        console.print(Text(cause_words(cause), style="bold"))
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def change_words(change: Change) -> str:
    """What differs, in words."""
    return f"{change.key}: {_value(change.first)} → {_value(change.second)}"


def _value(value: object) -> str:
    return units.NONE if value is None else str(value)


def shown_stages(found: Comparison) -> list[Row]:
    """The stages worth a line: those of 1 % of their phase, as the mean of both runs."""
    return [row for row in found.stages if _mean_share(row) >= LEAST_SHOWN]


def _mean_share(row: Row) -> float:
    """The mean of both times, as a part of the first side's phase."""
    found = row.difference
    return row.share * (found.first + found.second) / 2 / found.first if row.share and found.first else 0.0


def _table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("first", "second", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("95 % sure", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    phase: str | None = None
    for row in rows:
        if row.stage is not None and row.phase != phase:
            table.add_section()
            table.add_row(Text(f"{row.phase}, a step", style="bold"))
            phase = row.phase
        table.add_row(*row_cells(row), style=_style(row))
    return table


def row_cells(row: Row) -> list[str]:
    """Name, both values, the difference, its bounds, and what to think of it."""
    found = row.difference
    indent = "    " if row.part else "  " if row.stage else ""
    change = f" ({found.change:+.1%})" if found.change is not None else ""
    bounds = units.NONE
    if found.low is not None and found.high is not None:
        bounds = "exact" if found.low == found.high else f"{_amount(row, found.low)} … {_amount(row, found.high)}"
    return [
        f"{indent}{row.part or row.stage or row.name}",
        _plain(row, found.first),
        _plain(row, found.second),
        f"{_amount(row, found.delta)}{change}",
        bounds,
        judgement(row),
    ]


def judgement(row: Row) -> str:
    """`slower`, `faster`, `more`, `less`, `within noise`, or a dash where nothing is known of the noise."""
    found = row.difference
    if found.beyond_noise is None:
        return units.NONE
    if not found.beyond_noise:
        return "same" if found.low == found.high else "within noise"
    worse, better = ("slower", "faster") if row.unit == "ns" else ("more", "less")
    return worse if found.delta > 0 else better


def _plain(row: Row, value: float) -> str:
    return units.time(value) if row.unit == "ns" else units.byte_count(value)


def _amount(row: Row, value: float) -> str:
    return f"{'+' if value > 0 else ''}{_plain(row, value)}"


def _style(row: Row) -> str:
    return {"slower": "red", "more": "red", "faster": "green", "less": "green"}.get(
        judgement(row), "dim" if row.part else ""
    )


def cause_words(cause: Cause) -> str:
    """Where the time moved, in a sentence."""
    where = cause.stage if cause.layer is None else f"layer {cause.layer}"
    place = where if cause.part is None else f"{where}, {cause.part}"
    all_layers = " (over all layers)" if cause.layer is None and cause.stage == "layer" else ""
    more = "more" if cause.delta_ns > 0 else "less"
    return (
        f"{cause.phase}: {min(cause.share, 1.0):.0%} of the change is in {place}{all_layers}, "
        f"which takes {units.time(abs(cause.delta_ns))} {more} {'a step' if cause.phase == 'decode' else 'each time'}"
    )


def gate_words(verdict: Verdict, allowed: float) -> str:
    """What the gate decided, in a sentence."""
    if verdict.unjudged is not None:
        return f"The gate cannot judge these runs: {verdict.unjudged}."
    if not verdict.regressions:
        return f"No regression above {allowed:.1%} beyond the noise, in {verdict.judged} quantities."
    named = ", ".join(f"{_full_name(row)} {row.difference.change:+.1%}" for row in verdict.regressions)
    return f"Regression above {allowed:.1%} beyond the noise: {named}."


def _full_name(row: Row) -> str:
    return row.name if row.phase is None else f"{row.phase} {row.name}"
