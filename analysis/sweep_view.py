"""A sweep for people: its table in a terminal, and the sentences that page and terminal share."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from . import units
from .columns import Column, table
from .runs_view import bound_of, tokens_a_second
from .sweep import AXES, Axis, Point, Sweep, Turn
from .terminal import printable

FRONT = "◆"
TURNS_SHOWN = 6
SETTINGS_SHOWN = 3
OVER = {"max_new_tokens": "new tokens", "prompt_length": "prompt length"}
PLAIN = {"max_new_tokens": "new tokens", "prompt_length": "prompt"}


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Print what is the same for all points, a line a point, what they tell, and why some failed."""
    console.print(Text(printable(head_words(sweep))))
    console.print(table(columns(sweep), sweep.points, console.width))
    for sentence in sentences(sweep):
        console.print(Text(printable(sentence)))
    for reason, names in reasons(sweep).items():
        console.print(Text(printable(f"{', '.join(names)}: {reason}"), style="yellow"))


def columns(sweep: Sweep) -> list[Column]:
    """The axes that vary, and the figures; status only where a point has another than complete."""
    every = len(sweep.measured) == len(sweep.points)
    status = [] if every else [Column("status", lambda point: point.status, words=True)]
    return [*(_axis_column(axis) for axis in sweep.varying), *status, *FIGURES, _front_column(sweep)]


def _axis_column(axis: Axis) -> Column:
    return Column(
        axis.heading, lambda point: value_words(axis, getattr(point.setting, axis.key)), words=not axis.is_number
    )


def value_words(axis: Axis, value: Any) -> str:
    """A setting as a table shows it."""
    if value is None:
        return "default"
    return f"{value:,}" if axis.is_number else str(value)


def _front_column(sweep: Sweep) -> Column:
    return Column("", lambda point: FRONT if point.name in sweep.front else "", words=True)


def _time(name: str) -> Callable[[Point], str]:
    return lambda point: units.time(getattr(point.run, name))


def _size(name: str) -> Callable[[Point], str]:
    return lambda point: units.byte_count(getattr(point.run, name))


FIGURES = (
    Column("TTFT", _time("ttft_ns")),
    Column("TPOT", _time("tpot_ns")),
    Column("p50", _time("itl_p50_ns"), 8),
    Column("p95", _time("itl_p95_ns"), 5),
    Column("floor", _time("decode_roof_ns"), 3),
    Column("prefill/s", lambda point: tokens_a_second(point.run.prefill_tokens_per_s), 6),
    Column("tokens/s", lambda point: tokens_a_second(point.run.decode_tokens_per_s)),
    Column("peak", _size("peak_memory_bytes"), 2),
    Column("KV", _size("kv_bytes"), 7),
    Column(
        "prefill, of roof", lambda point: bound_of(point.run.prefill_bound, point.run.prefill_efficiency), 4, words=True
    ),
    Column(
        "decode, of roof", lambda point: bound_of(point.run.decode_bound, point.run.decode_efficiency), 1, words=True
    ),
)


# -- sentences ---------------------------------------------------------------------------------


def head_words(sweep: Sweep) -> str:
    """Model, device, what was the same for all points, and how many there are."""
    first = sweep.points[0].setting
    fixed = [(axis, getattr(first, axis.key)) for axis in AXES if axis not in sweep.varying]
    same = [setting_words(axis, value) for axis, value in fixed if value is not None]
    name = next((point.run.model for point in sweep.measured), None) or sweep.settings.get("model")
    count = len(sweep.points)
    parts = [name, sweep.device.get("name"), *same, f"{count} point{'s' * (count != 1)}"]
    return " · ".join(str(part) for part in parts if part)


def axes_words(sweep: Sweep) -> str:
    """What varies, in words."""
    names = [OVER.get(axis.key, axis.key) for axis in sweep.varying]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "one point"


def setting_words(axis: Axis, value: Any) -> str:
    """A value with the name of its axis, such as `batch 4` or `8 threads`; words stand for themselves."""
    if axis.key == "threads" and value is not None:
        return f"{value} thread{'s' * (value != 1)}"
    if axis.is_number or value is None:
        return f"{PLAIN.get(axis.key, axis.key)} {value_words(axis, value)}"
    return f"{value} cache" if axis.key == "cache" else str(value)


def point_words(sweep: Sweep, point: Point) -> str:
    """A point by what sets it apart."""
    return settings_words((axis, getattr(point.setting, axis.key)) for axis in sweep.varying)


def settings_words(pairs: Iterable[tuple[Axis, Any]]) -> str:
    """Several values in words."""
    return ", ".join(setting_words(axis, value) for axis, value in pairs)


def sentences(sweep: Sweep) -> list[str]:
    """The fastest points, where the bound turns, and how many failed."""
    return [*_best(sweep), *_turn_sentences(sweep), *_failures(sweep)]


def _best(sweep: Sweep) -> list[str]:
    rated = sweep.placed
    if len(rated) < 2:
        return []
    most = max(rated, key=lambda point: point.run.decode_tokens_per_s or 0.0)
    quickest = min(rated, key=lambda point: point.run.tpot_ns or 0.0)
    found = [
        f"Most decode tokens/s: {tokens_a_second(most.run.decode_tokens_per_s)}, at {point_words(sweep, most)}.",
        f"Lowest TPOT: {units.time(quickest.run.tpot_ns)}, at {point_words(sweep, quickest)}.",
    ]
    if 0 < len(sweep.front) < len(rated):
        found.append(f"{FRONT} no other of the same prompt and new tokens has both more tokens/s and a lower TPOT.")
    return found


def _turn_sentences(sweep: Sweep) -> list[str]:
    """Where the bound turns; turns that differ in the other axes alone share a sentence."""
    where: dict[Turn, list[Turn]] = {}
    for turn in sweep.turns():
        where.setdefault(replace(turn, others=()), []).append(turn)
    left = len(where) - TURNS_SHOWN
    more = [f"The bound turns in {left} more places, which the map on the page shows."] if left > 0 else []
    return [turn_words(turns) for turns in list(where.values())[:TURNS_SHOWN]] + more


def turn_words(turns: list[Turn]) -> str:
    """The same turn for several values of the other axes, in a sentence."""
    first = turns[0]
    settings = "; ".join(settings_words(turn.others) for turn in turns[:SETTINGS_SHOWN])
    if len(turns) > SETTINGS_SHOWN:
        settings += f"; and {len(turns) - SETTINGS_SHOWN} more"
    return (
        f"{first.phase.capitalize()} turns from {first.before}- to {first.after}-bound between "
        f"{PLAIN.get(first.axis.key, first.axis.key)} {first.low:,} and {first.high:,}"
        f"{f' ({settings})' if settings else ''}."
    )


def reasons(sweep: Sweep) -> dict[str, list[str]]:
    """Why points failed, each reason with the names of its points."""
    found: dict[str, list[str]] = {}
    for point in sweep.points:
        if point.reason is not None:
            found.setdefault(point.reason, []).append(point.name)
    return found


def _failures(sweep: Sweep) -> list[str]:
    missing = len(sweep.points) - len(sweep.measured)
    return [f"{missing} of {len(sweep.points)} points have no complete trace."] if missing else []
