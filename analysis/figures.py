"""Pictures of a trace, each a pure function from a trace to a Plotly figure.

All share one x axis, the step over the whole trace, and one palette (Okabe–Ito, told apart by
the colour-blind). A trace without the rows that a figure needs gives an empty figure that says so.
"""

from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa

from . import units
from .blocks import Array, Block, first_rank, layer_times, numbers, ordered_blocks, step_rows, step_times
from .breakdown import breakdown
from .ceilings import of_manifest
from .cells import layer_efficiency
from .drawing import DIGITS, INK, PLAIN_TICKS, Bins, byte_unit, color_range, cut_axis, empty, style, time_unit
from .kv_form import kv_form
from .latency import percentile
from .queries import OWN
from .trace import Trace

MAX_BARS = 240
MAX_LINES = 6
FEW_TOKENS = 12


def timeline(trace: Trace) -> go.Figure:
    """Draw each step as a bar of its blocks, and the time until the next step of its call.

    Beyond `MAX_BARS` steps the bars become stepped areas, which draw as one path a block.
    """
    times = step_times(trace)
    if not len(times):
        return empty("No steps were recorded.")
    scale, unit = time_unit(float(np.median(times.wall_ns)))
    bins = Bins.of(len(times))
    time_ns = bins.mean(times.time_ns.T).T
    figure = go.Figure()
    shape = _bar if len(times) <= MAX_BARS else _area
    for block, column in zip(times.blocks, time_ns.T, strict=True):
        figure.add_trace(shape(times.step[bins.first], (column / scale).astype(np.float32), block, unit))
    style(figure, bins.title("step", "each point is the mean of {} steps"), unit)
    figure.update_layout(barmode="stack", bargap=0.12 if len(times) <= MAX_BARS else 0, hovermode="x unified")
    figure.update_xaxes(unifiedhovertitle_text=bins.hover("step"))
    cut_axis(figure, time_ns.sum(axis=1), scale)
    return figure


def heat_map(trace: Trace) -> go.Figure:
    """Draw the time of each layer in each step; colours saturate where a prefill would drown the rest."""
    steps, layers, time_ns = layer_times(trace)
    if not len(steps):
        return empty("No layer's time was recorded.")
    bins = Bins.of(len(steps))
    time_ns = bins.mean(time_ns)
    low, high = color_range(time_ns[~np.isnan(time_ns)])
    scale, unit = time_unit(high)
    return _grid(steps, layers, bins, time_ns / scale, unit, low / scale, high / scale)


def heat_map_efficiency(trace: Trace) -> go.Figure:
    """Draw how much of each layer's time in each step its roof accounts for: roof ÷ measured, in percent."""
    ceilings, _ = of_manifest(trace.meta)
    steps, layers, _ = layer_times(trace)
    bins = Bins.of(len(steps))
    percent = bins.mean(layer_efficiency(trace, ceilings) * 100)
    known = percent[~np.isnan(percent)]
    if not len(known):
        return empty("No layer's efficiency is known: it takes counts of its work and the device's ceilings.")
    return _grid(steps, layers, bins, percent, "%", 0.0, max(100.0, float(known.max())))


def _grid(steps: Array, layers: Array, bins: Bins, cells: Array, unit: str, low: float, high: float) -> go.Figure:
    figure = go.Figure(
        go.Heatmap(
            x=steps[bins.first],
            y=layers,
            z=cells.astype(np.float32),
            zmin=low,
            zmax=high,
            colorscale="Cividis",
            hoverongaps=False,
            hovertemplate=f"{bins.hover('step')}, layer %{{y}}<br>%{{z:{DIGITS}}} {unit}<extra></extra>",
            colorbar={"title": {"text": unit, "side": "top"}, "thickness": 10, "outlinewidth": 0, "len": 1}
            | PLAIN_TICKS,
        )
    )
    style(figure, bins.title("step", "each column is the mean of {} steps"), "layer")
    figure.update_yaxes(showgrid=False, rangemode="normal", tickformat="d")
    figure.update_layout(margin={"t": 12})
    return figure


def kv_growth(trace: Trace) -> go.Figure:
    """Draw the bytes of the KV cache after each step: filled, held, and what the model's config says."""
    steps = step_rows(trace)
    filled, held = numbers(steps, "kv_bytes"), numbers(steps, "kv_allocated_bytes")
    if not len(steps) or (np.isnan(filled).all() and np.isnan(held).all()):
        return empty("No KV cache was recorded.")
    lines = [Line("allocated", held, "#E69F00", "mlp", 6.0), Line("filled", filled, "#0072B2", "attention", 2.0)]
    form = kv_form(trace)
    if form is not None:
        lines.append(Line("by the config", form.bytes_after(trace), INK, "ink", 1.5, "dot"))
    return _byte_lines(steps, lines)


def memory(trace: Trace) -> go.Figure:
    """Draw weights, weights with KV, and the memory that was measured around them, after each step.

    On CUDA the caching allocator is asked, on a CPU the live tensors are followed in an untimed
    pass; resident memory is that of the whole host process, libraries included. They measure
    different things and need not agree.
    """
    steps = step_rows(trace)
    whose = "allocator" if (trace.meta.get("device") or {}).get("type") == "cuda" else "live tensors"
    weights = (trace.meta.get("model") or {}).get("weight_bytes")
    flat = np.full(len(steps), np.nan if weights is None else weights)
    lines = [
        Line("resident, whole process", numbers(steps, "rss_bytes"), "#8b949e", "prepare", 2.0),
        Line(f"{whose}: reserved", numbers(steps, "mem_reserved_bytes"), "#CC79A7", "sample", 2.0),
        Line(f"{whose}: peak so far", numbers(steps, "mem_peak_bytes"), "#D55E00", "layer", 2.0),
        Line(f"{whose}: in use", numbers(steps, "mem_allocated_bytes"), "#56B4E9", "embed", 2.0),
        Line("weights and KV held", flat + numbers(steps, "kv_allocated_bytes"), "#E69F00", "mlp", 2.0),
        Line("weights", flat, "#0072B2", "attention", 2.0),
    ]
    lines = [line for line in lines if not np.isnan(line.values).all()]
    if not len(steps) or not lines:
        return empty("No memory was recorded.")
    return _byte_lines(steps, lines)


@dataclass(frozen=True)
class Line:
    """Bytes after each step; `ink` is the page's own name of the colour."""

    name: str
    values: Array
    color: str
    ink: str
    width: float
    dash: str = "solid"


def _byte_lines(steps: pa.Table, lines: list[Line]) -> go.Figure:
    """Draw lines over the steps, broken where a call ends."""
    scale, unit = byte_unit(max(float(np.nanmax(line.values)) for line in lines if not np.isnan(line.values).all()))
    bins = Bins.of(len(steps))
    shown = steps.take(pa.array(bins.last))
    starts = np.flatnonzero(np.diff(numbers(shown, "call"))) + 1
    figure = go.Figure()
    for line in lines:
        figure.add_trace(
            go.Scatter(
                x=np.insert(shown["step"].to_numpy().astype(np.float64), starts, np.nan),
                y=np.insert(line.values[bins.last] / scale, starts, np.nan).astype(np.float32),
                name=line.name,
                mode="lines+markers" if len(steps) < 3 else "lines",
                line={"color": line.color, "width": line.width, "shape": "hv", "dash": line.dash},
                hovertemplate=f"%{{y:,.4~r}} {unit}",
                meta={"ink": line.ink},
            )
        )
    style(figure, bins.title("step", "one of {} is drawn"), unit)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(unifiedhovertitle_text="after step %{x}")
    return figure


def stage_times(trace: Trace) -> go.Figure:
    """Draw prefill beside decode: the share of its phase that each stage and part took."""
    rows = [row for row in breakdown(trace) if row.stage != "layer" or row.part is not None]
    rows = [row for row in rows if row.part is None or row.stage == "layer"]
    if not rows:
        return empty("No spans were recorded.")
    keys = list(dict.fromkeys(_row_key(row.stage, row.part) for row in rows))
    labels = {item.key: escape(item.label) for item in ordered_blocks(set(keys))}
    figure = go.Figure()
    for phase, color, ink in (("decode", "#E69F00", "mlp"), ("prefill", "#0072B2", "attention")):
        of_phase = {_row_key(row.stage, row.part): row for row in rows if row.phase == phase}
        scale, unit = time_unit(max((row.time_ns for row in of_phase.values()), default=0))
        present = [key for key in labels if key in of_phase]
        figure.add_trace(
            go.Bar(
                y=[labels[key] for key in present],
                x=[of_phase[key].share * 100 for key in present],
                text=[f"{of_phase[key].share:.1%} · {of_phase[key].time_ns / scale:,.3g} {unit}" for key in present],
                textposition="outside",
                cliponaxis=False,
                orientation="h",
                name=phase,
                marker={"color": color},
                meta={"ink": ink},
                hovertemplate="%{y}: %{text}",
            )
        )
    style(figure, "share of the phase, %", "")
    figure.update_layout(barmode="group", bargap=0.3, margin={"l": 150, "r": 90})
    figure.update_xaxes(showgrid=True, rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=list(labels.values())[::-1], showgrid=False)
    return figure


def token_latency(trace: Trace) -> go.Figure:
    """Draw the time between consecutive tokens: a line a call, or the middle and spread of many."""
    gaps = token_gaps(trace)
    if not gaps:
        return empty("Fewer than two generated tokens were recorded.")
    every = np.sort(np.concatenate(list(gaps.values())))
    scale, unit = time_unit(float(np.median(every)))
    figure = go.Figure()
    bins = Bins.of(max(map(len, gaps.values())))
    for line in _gap_lines(gaps, bins, scale, unit):
        figure.add_trace(line)
    levels = {name: percentile(every.tolist(), fraction) or 0.0 for name, fraction in (("p50", 0.5), ("p95", 0.95))}
    for level in levels.values():
        figure.add_hline(level / scale, line={"color": INK, "width": 1, "dash": "dot"})
    dotted = ", ".join(f"{name} {units.time(level)}" for name, level in levels.items())
    style(figure, f"{bins.title('new token', 'each point is the mean of {} tokens')}<br>dotted: {dotted}", unit)
    figure.update_layout(hovermode="x unified", showlegend=len(gaps) > 1)
    figure.update_xaxes(unifiedhovertitle_text=bins.hover("new token"))
    if max(map(len, gaps.values())) <= FEW_TOKENS:
        figure.update_xaxes(dtick=1)  # there is no token one and a half
    cut_axis(figure, every, scale)
    return figure


def token_gaps(trace: Trace) -> dict[int, Array]:
    """Times in ns between kept tokens of the longest sequence, for each call that gave two or more."""
    tokens = first_rank(trace.table("tokens", ["rank", "call", "sequence", "arrival_ns", "kept"]))
    call, sequence, arrival = (numbers(tokens, name) for name in ("call", "sequence", "arrival_ns"))
    kept = np.asarray(tokens["kept"].fill_null(False).to_numpy()).astype(bool) & ~np.isnan(arrival)
    kept &= np.isin(call, np.unique(numbers(step_rows(trace), "call")))
    gaps = {}
    for one in np.unique(call[kept]):
        mine = kept & (call == one)
        longest = np.bincount(sequence[mine].astype(np.int64)).argmax()
        times = np.sort(arrival[mine & (sequence == longest)])
        if len(times) > 1:
            gaps[int(one)] = np.diff(times)
    return gaps


def _row_key(stage: str, part: str | None) -> str:
    return part if part is not None and part != OWN else stage


def _bar(x: Array, y: Array, block: Block, unit: str) -> go.Bar:
    return go.Bar(
        x=x,
        y=y,
        name=escape(block.label),
        marker={"color": block.color, "line": {"width": 0}},
        meta={"ink": block.key},
        hovertemplate=f"%{{y:{DIGITS}}} {unit}",
    )


def _area(x: Array, y: Array, block: Block, unit: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=escape(block.label),
        mode="lines",
        stackgroup="step",
        line={"width": 0, "shape": "hvh", "color": block.color},
        fillcolor=block.color,
        meta={"ink": block.key},
        hovertemplate=f"%{{y:{DIGITS}}} {unit}",
    )


def _gap_lines(gaps: dict[int, Array], bins: Bins, scale: float, unit: str) -> list[go.Scatter]:
    """A line a call, or for many calls the median and the range from p5 to p95 at each token."""
    hover = f"%{{y:{DIGITS}}} {unit}"
    if len(gaps) <= MAX_LINES:
        return [
            go.Scatter(
                x=Bins(len(gap), bins.size).first + 1,
                y=(Bins(len(gap), bins.size).mean(gap) / scale).astype(np.float32),
                name=f"call {call}",
                mode="lines" if len(gap) > 1 else "markers",
                line={"width": 1.5, "color": _LINES[i]},
                hovertemplate=hover,
            )
            for i, (call, gap) in enumerate(gaps.items())
        ]
    table = np.full((len(gaps), max(map(len, gaps.values()))), np.nan)
    for line, gap in zip(table, gaps.values(), strict=True):
        line[: len(gap)] = gap / scale
    low, middle, high = np.nanpercentile(bins.mean(table), (5, 50, 95), axis=0)
    x = bins.first + 1
    edge: dict[str, Any] = {
        "x": x,
        "mode": "lines",
        "line": {"width": 0, "color": "#56B4E9"},
        "hovertemplate": hover,
    }
    return [
        go.Scatter(y=high, name="p95", showlegend=False, **edge),
        go.Scatter(y=low, name="p5 to p95 of the calls", fill="tonexty", fillcolor="rgba(86,180,233,0.35)", **edge),
        go.Scatter(
            x=x,
            y=middle,
            name="median of the calls",
            line={"width": 1.5, "color": "#0072B2"},
            hovertemplate=hover,
        ),
    ]


_LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
