"""Pictures of a sweep: figures over an axis, the batch–latency front, and the map of bounds."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from . import units
from .drawing import DIGITS, byte_unit, style, time_unit
from .sweep import Axis, Point, Sweep, lines
from .sweep_view import point_words, setting_words, settings_words

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
WIDE_RANGE = 8  # largest ÷ smallest from which an axis is logarithmic
MOST_TICKS = 12
MOST_LABELS = 8
# Where a point's settings stand in the order in which people look for a trend.
TREND_AXES = ("prompt_length", "batch", "max_new_tokens", "threads")


@dataclass(frozen=True)
class Measure:
    """A figure of a run that is drawn over an axis; `floor` names the one that it cannot fall below."""

    key: str
    title: str
    unit: str
    floor: str | None = None


MEASURES = (
    Measure("ttft_ns", "Time to the first token", "ns", "prefill_roof_ns"),
    Measure("tpot_ns", "Time per token after it", "ns", "decode_roof_ns"),
    Measure("prefill_tokens_per_s", "Prefill tokens a second", "tokens/s"),
    Measure("decode_tokens_per_s", "Decode tokens a second, all sequences", "tokens/s"),
    Measure("peak_memory_bytes", "Peak memory", "B"),
    Measure("kv_bytes", "KV cache after the last step", "B"),
)


@dataclass(frozen=True)
class Legend:
    """A line's colour and what it stands for; nothing where there is one line alone."""

    color: str
    text: str


@dataclass(frozen=True)
class Trend:
    """The charts over one axis, with the legend that they share."""

    axis: Axis
    charts: list[tuple[Measure, go.Figure]]
    legend: list[Legend]
    has_floor: bool


def trend_axes(sweep: Sweep) -> list[Axis]:
    """The axes to draw over: those of numbers that vary, else of words."""
    numbers = [axis for key in TREND_AXES for axis in sweep.varying if axis.key == key]
    return numbers or sweep.varying


def trends(sweep: Sweep) -> list[Trend]:
    """A set of charts for each axis that varies."""
    return [_trend(sweep, axis) for axis in trend_axes(sweep)]


def _trend(sweep: Sweep, axis: Axis) -> Trend:
    others = [other for other in sweep.varying if other != axis]
    found = lines(sweep.measured, axis, others)
    colors = line_colors(len(found))
    known = [measure for measure in MEASURES if any(_values(line, measure.key) for _, line in found)]
    return Trend(
        axis=axis,
        charts=[(measure, over_axis(axis, measure, [line for _, line in found], colors, sweep)) for measure in known],
        legend=[
            Legend(color, settings_words(zip(others, key, strict=True)))
            for color, (key, _) in zip(colors, found, strict=True)
            if others
        ],
        has_floor=any(_values(line, m.floor) for _, line in found for m in known if m.floor is not None),
    )


def line_colors(count: int) -> list[str]:
    """As many colours: told apart by the colour-blind while they are few, in one order where they are many."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    places = [0.12 + 0.78 * number / (count - 1) for number in range(count)]
    return list(sample_colorscale("Turbo", places))


def over_axis(
    axis: Axis, measure: Measure, found: Sequence[Sequence[Point]], colors: Sequence[str], sweep: Sweep
) -> go.Figure:
    """Draw a figure of the runs over one axis, a line for each combination of the others, its floor dotted."""
    every = [value for line in found for key in (measure.key, measure.floor) for value in _values(line, key)]
    scale, unit = _scale(measure.unit, every)
    figure = go.Figure()
    for line, color in zip(found, colors, strict=True):
        figure.add_trace(_line(axis, line, measure.key, scale, unit, color, sweep))
        if _values(line, measure.floor):
            figure.add_trace(_line(axis, line, measure.floor or "", scale, unit, color, sweep, is_floor=True))
    style(figure, PLAIN_AXIS.get(axis.key, axis.heading), unit)
    figure.update_layout(showlegend=False, height=260, margin={"t": 12})
    _number_axis(figure, axis, found)
    if _wide(every):
        figure.update_yaxes(type="log", rangemode="normal", **_log_ticks([value / scale for value in every]))
    return figure


PLAIN_AXIS = {"prompt_length": "prompt tokens", "max_new_tokens": "new tokens", "batch": "batch"}


def _values(line: Iterable[Point], key: str | None) -> list[float]:
    found = [getattr(point.run, key) for point in line] if key else []
    return [value for value in found if value is not None]


def _scale(unit: str, values: Sequence[float]) -> tuple[float, str]:
    if unit == "ns":
        return time_unit(median(values) if values else 1.0)
    return byte_unit(max(values, default=1.0)) if unit == "B" else (1.0, unit)


def _line(
    axis: Axis,
    line: Sequence[Point],
    key: str,
    scale: float,
    unit: str,
    color: str,
    sweep: Sweep,
    is_floor: bool = False,
) -> go.Scatter:
    known = [point for point in line if getattr(point.run, key) is not None]
    what = "<br>floor at this device's ceilings" if is_floor else ""
    return go.Scatter(
        x=[getattr(point.setting, axis.key) for point in known],
        y=[getattr(point.run, key) / scale for point in known],
        mode="lines" if is_floor and len(known) > 1 else "lines+markers",
        line={"color": color, "width": 1.5 if is_floor else 2, "dash": "dot" if is_floor else "solid"},
        marker={"color": color, "size": 5 if is_floor else 7, "symbol": "line-ew-open" if is_floor else "circle"},
        text=[point_words(sweep, point) for point in known],
        hovertemplate=f"%{{text}}<br>%{{y:{DIGITS}}} {unit}{what}<extra></extra>",
    )


def _number_axis(figure: go.Figure, axis: Axis, found: Sequence[Sequence[Point]]) -> None:
    """Mark the values that were run; over a wide range the axis is logarithmic."""
    values = sorted({getattr(point.setting, axis.key) for line in found for point in line}) if axis.is_number else []
    if not values or len(values) > MOST_TICKS:
        return
    figure.update_xaxes(tickvals=values, ticktext=[f"{value:,}" for value in values])
    if _wide(values):
        figure.update_xaxes(type="log")


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Round values to mark on a logarithmic axis: 1, 2 and 5 of each power of ten, fewer over a wide range."""
    above = [value for value in values if value > 0]
    powers = range(math.floor(math.log10(min(above))), math.floor(math.log10(max(above))) + 1)
    steps = (1, 2, 5) if len(powers) < 3 else (1, 3) if len(powers) < 5 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def _wide(values: Sequence[float]) -> bool:
    above = [value for value in values if value > 0]
    return bool(above) and max(above) / min(above) >= WIDE_RANGE


# -- the front ---------------------------------------------------------------------------------


def front(sweep: Sweep) -> go.Figure | None:
    """Draw TPOT against decode tokens/s, the undominated points joined; null of fewer than two points."""
    if len(sweep.placed) < 2:
        return None
    scale, unit = time_unit(median(_values(sweep.placed, "tpot_ns")))
    groups = list(sweep.same_work().items())
    figure = go.Figure()
    for color, (_, group) in zip(line_colors(len(groups)), groups, strict=True):
        on_front = sorted((p for p in group if p.name in sweep.front), key=lambda p: p.run.decode_tokens_per_s or 0.0)
        beaten = [point for point in group if point.name not in sweep.front]
        for points, is_front in ((beaten, False), (on_front, True)):
            if points:
                figure.add_trace(_front_points(sweep, points, is_front, color, scale, unit))
    style(figure, "decode tokens a second, all sequences", f"TPOT, {unit}")
    figure.update_layout(showlegend=False, height=360, margin={"t": 12})
    rates, times = _values(sweep.placed, "decode_tokens_per_s"), _values(sweep.placed, "tpot_ns")
    if _wide(rates):
        figure.update_xaxes(type="log", **_log_ticks(rates))
    if _wide(times):
        figure.update_yaxes(type="log", rangemode="normal", **_log_ticks([value / scale for value in times]))
    return figure


def front_legend(sweep: Sweep) -> list[Legend]:
    """A colour for each prompt length and number of new tokens, where there are several."""
    works = [axis for axis in sweep.varying if axis.key in ("prompt_length", "max_new_tokens")]
    groups = list(sweep.same_work().values())
    if len(groups) < 2:
        return []
    return [
        Legend(color, settings_words((axis, getattr(group[0].setting, axis.key)) for axis in works))
        for color, group in zip(line_colors(len(groups)), groups, strict=True)
    ]


def _front_points(
    sweep: Sweep, points: Sequence[Point], is_front: bool, color: str, scale: float, unit: str
) -> go.Scatter:
    labels = is_front and len(sweep.same_work()) == 1 and len(points) <= MOST_LABELS
    return go.Scatter(
        x=[point.run.decode_tokens_per_s for point in points],
        y=[(point.run.tpot_ns or 0.0) / scale for point in points],
        mode=("lines+markers+text" if labels else "lines+markers") if is_front else "markers",
        line={"color": color, "width": 1.5},
        marker={"color": color, "size": 10 if is_front else 7, "symbol": "diamond" if is_front else "circle-open"},
        text=[_label(sweep, point) for point in points] if labels else None,
        textposition="top center",
        cliponaxis=False,
        customdata=[point_words(sweep, point) for point in points],
        hovertemplate=f"%{{customdata}}<br>%{{x:{DIGITS}}} tokens/s, TPOT %{{y:{DIGITS}}} {unit}<extra></extra>",
    )


def _label(sweep: Sweep, point: Point) -> str:
    """A point by what sets it apart from those of the same work."""
    axes = [axis for axis in sweep.varying if axis.key not in ("prompt_length", "max_new_tokens")]
    return settings_words((axis, getattr(point.setting, axis.key)) for axis in axes)


# -- the map of bounds -------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What bounds a phase at one point; `turns` where it is another thing than in the cell before."""

    bound: str
    efficiency: str
    close_to: str | None
    turns: bool


@dataclass(frozen=True)
class BoundMap:
    """The bounds of a phase: a column a value of one axis, a row for each combination of the others."""

    phase: str
    axis: Axis
    columns: list[str]
    rows: list[tuple[str, list[Cell | None]]]


def bound_map(sweep: Sweep, phase: str) -> BoundMap | None:
    """Lay the bounds of a phase out over the axes; null where nothing varies or nothing was judged."""
    if not sweep.varying or not _values(sweep.measured, f"{phase}_bound"):
        return None
    axis, *_ = trend_axes(sweep)
    others = [other for other in sweep.varying if other != axis]
    values = sorted({getattr(point.setting, axis.key) for point in sweep.points}, key=lambda v: (v is not None, v))
    rows = [
        (settings_words(zip(others, key, strict=True)), _cells(line, axis, values, phase))
        for key, line in lines(sweep.points, axis, others)
    ]
    return BoundMap(phase, axis, [setting_words(axis, value) for value in values], rows)


def _cells(line: Sequence[Point], axis: Axis, values: Sequence[Any], phase: str) -> list[Cell | None]:
    by_value = {getattr(point.setting, axis.key): point.run for point in line}
    cells: list[Cell | None] = []
    before: str | None = None
    for value in values:
        run = by_value.get(value)
        bound = getattr(run, f"{phase}_bound", None)
        if bound is None:
            cells.append(None)
            continue
        efficiency = units.share(getattr(run, f"{phase}_efficiency")) if run else units.NONE
        cells.append(Cell(bound, efficiency, getattr(run, f"{phase}_close_to"), before not in (None, bound)))
        before = bound
    return cells


def plain(figure: go.Figure) -> dict[str, Any]:
    """A figure as JSON's own types."""
    document: dict[str, Any] = json.loads(figure.to_json())
    document["layout"].pop("template", None)
    return document
