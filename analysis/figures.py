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
from .breakdown import OWN, breakdown
from .latency import percentile
from .trace import Trace

Array = np.ndarray[Any, Any]
MAX_BARS = 240
MAX_LINES = 6
BETWEEN = "between"
FORWARD = "forward"
_FALLBACK = ("#D55E00", "#7a6fac", "#4d7f71", "#a26b4a")
_INK, _FAINT = "#24292f", "rgba(120,130,145,0.25)"
_MARGIN = {"l": 56, "r": 12, "t": 34, "b": 44}


@dataclass(frozen=True)
class Block:
    """A kind of work that owns time in a step: a stage, or a part inside the layers."""

    key: str
    label: str
    color: str


BLOCKS = (
    Block("prepare", "prepare inputs", "#8b949e"),
    Block("embed", "embedding", "#56B4E9"),
    Block(FORWARD, "forward (not split)", "#7aa6c2"),
    Block("norm", "norms in layers", "#F0E442"),
    Block("attention", "attention", "#0072B2"),
    Block("mlp", "MLP", "#E69F00"),
    Block("layer", "rest of the layers", "#D55E00"),
    Block("final_norm", "final norm", "#b8ad1f"),
    Block("lm_head", "LM head", "#009E73"),
    Block("sample", "sample and stop check", "#CC79A7"),
    Block("nested", "nested forward", "#5c4b8a"),
    Block("other", "rotary, mask and gaps", "#b3bac2"),
    Block(BETWEEN, "between steps", "#dfe3e8"),
)


@dataclass(frozen=True)
class StepTimes:
    """Top-level steps in the order in which they ran, and who owned their time.

    `time_ns` has a row a step and a column a block; a block that did not run in a step has 0.
    `has_spans` is false where detail was thinned out: such a step is split by its own columns
    into `prepare`, `forward` and `sample`.
    """

    step: Array
    call: Array
    prefill: Array
    start_ns: Array
    wall_ns: Array
    has_spans: Array
    blocks: tuple[Block, ...]
    time_ns: Array

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class SpanBlocks:
    """The spans of top-level steps, sorted by step and start, each with the block that owns it.

    `row` is the span's row in the first rank's table, `step` its index in the `StepTimes`, `block` an
    index into `blocks` or -1 where an enclosing span owns its time, `own_ns` the time it adds.
    """

    row: Array
    step: Array
    parent: Array
    block: Array
    own_ns: Array
    blocks: tuple[Block, ...]


def codes(table: pa.Table, name: str) -> tuple[Array, list[str]]:
    """Return a text column as codes (-1 for null) and the words that they stand for."""
    column = table[name].combine_chunks()
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return column.indices.fill_null(-1).to_numpy(zero_copy_only=False), column.dictionary.to_pylist()


def numbers(table: pa.Table, name: str) -> Array:
    """Return a numeric column as float64, NaN for null; integers to 2⁵³ stay exact."""
    return table[name].to_numpy().astype(np.float64)


def first_rank(table: pa.Table) -> pa.Table:
    """Rows of the lowest rank: where several processes share the work, one is drawn."""
    ranks = numbers(table, "rank")
    if not len(ranks) or np.isnan(ranks).all() or (ranks == ranks[0]).all():
        return table
    return table.filter(pa.array(ranks == np.nanmin(ranks)))


def step_rows(trace: Trace) -> pa.Table:
    """Top-level steps that count, in the order in which they ran: no warm-up unless that is all."""
    steps = first_rank(trace.table("steps")).sort_by("step")
    top = steps.filter(steps["parent_step"].is_null())
    measured = top.filter(np.asarray(top["warmup"].fill_null(False).to_numpy()) == 0)
    return measured if len(measured) else top


def span_blocks(trace: Trace, step_ids: Array) -> SpanBlocks:
    """Give every span of the steps to a block: its stage, or inside a layer its part."""
    spans = first_rank(trace.table("spans"))
    step = numbers(spans, "step")
    index = np.searchsorted(step_ids, step)
    known = (index < len(step_ids)) & np.isin(step, step_ids)
    row = np.flatnonzero(known)
    row = row[np.lexsort((numbers(spans, "span")[row], numbers(spans, "start_ns")[row], index[row]))]
    parent = _parent_index(numbers(spans, "span")[row], numbers(spans, "parent")[row])
    names = _block_names(spans, row, parent)
    blocks = ordered_blocks({str(name) for name in np.unique(names) if name})
    place = {item.key: i for i, item in enumerate(blocks)} | {"": -1}
    block = np.array([place[name] for name in names.tolist()], dtype=np.int64)
    host = np.nan_to_num(numbers(spans, "host_ns")[row])
    return SpanBlocks(row, index[row], parent, block, _own_time(host, parent, block), blocks)


def step_times(trace: Trace) -> StepTimes:
    """Split the time of every top-level step among the blocks that own it."""
    steps = step_rows(trace)
    step_ids = steps["step"].to_numpy()
    spans = span_blocks(trace, step_ids)
    blocks = ordered_blocks({item.key for item in spans.blocks} | {"prepare", FORWARD, "sample", BETWEEN})
    place = {item.key: i for i, item in enumerate(blocks)}
    time_ns = np.zeros((len(steps), len(blocks)))
    owned = spans.block >= 0
    column = np.array([place[item.key] for item in spans.blocks], dtype=np.int64)
    np.add.at(time_ns, (spans.step[owned], column[spans.block[owned]]), spans.own_ns[owned])
    has_spans = np.isin(np.arange(len(steps)), spans.step)
    for key, name in (("prepare", "prepare_ns"), (FORWARD, "forward_ns"), ("sample", "sample_ns")):
        time_ns[~has_spans, place[key]] = np.nan_to_num(numbers(steps, name))[~has_spans]
    call, start, wall = numbers(steps, "call"), numbers(steps, "start_ns"), numbers(steps, "wall_ns")
    time_ns[:, place[BETWEEN]] = _between(call, start, wall)
    phase, words = codes(steps, "phase")
    used = np.flatnonzero(time_ns.any(axis=0))
    return StepTimes(
        step=step_ids,
        call=call,
        prefill=np.array([word == "prefill" for word in words] + [False])[phase],
        start_ns=start,
        wall_ns=wall,
        has_spans=has_spans,
        blocks=tuple(blocks[i] for i in used),
        time_ns=time_ns[:, used],
    )


def layer_times(trace: Trace) -> tuple[Array, Array, Array]:
    """Return step numbers, layers, and the time in ns of each layer in each step (NaN: none)."""
    spans = first_rank(trace.table("spans"))
    stage, words = codes(spans, "stage")
    step, layer, host = (numbers(spans, name) for name in ("step", "layer", "host_ns"))
    top = step_rows(trace)["step"].to_numpy()
    whole = np.array([word == "layer" for word in words] + [False])[stage]
    whole &= np.isnan(numbers(spans, "parent")) & ~np.isnan(layer) & np.isin(step, top)
    steps, column = np.unique(step[whole], return_inverse=True)
    layers, line = np.unique(layer[whole], return_inverse=True)
    time_ns = np.full((len(layers), len(steps)), np.nan)
    time_ns[line, column] = 0
    np.add.at(time_ns, (line, column), host[whole])
    return steps.astype(np.int64), layers.astype(np.int64), time_ns


def timeline(trace: Trace) -> go.Figure:
    """Draw each step as a bar of its blocks, and the time until the next step of its call.

    Beyond `MAX_BARS` steps the bars become stepped areas, which draw as one path a block.
    """
    times = step_times(trace)
    if not len(times):
        return _empty("No steps were recorded.")
    scale, unit = time_unit(float(np.median(times.wall_ns)))
    figure = go.Figure()
    shape = _bar if len(times) <= MAX_BARS else _area
    for block, column in zip(times.blocks, times.time_ns.T, strict=True):
        figure.add_trace(shape(times.step, (column / scale).astype(np.float32), block, unit))
    _style(figure, "step", unit)
    figure.update_layout(barmode="stack", bargap=0.12 if len(times) <= MAX_BARS else 0, hovermode="x unified")
    figure.update_xaxes(unifiedhovertitle_text="step %{x}")
    _cut_axis(figure, times.time_ns.sum(axis=1), scale)
    return figure


def heat_map(trace: Trace) -> go.Figure:
    """Draw the time of each layer in each step; colours saturate where a prefill would drown the rest."""
    steps, layers, time_ns = layer_times(trace)
    if not len(steps):
        return _empty("No layer's time was recorded.")
    scale, unit = time_unit(float(np.nanmedian(time_ns)))
    low, high = _ceiling(time_ns[~np.isnan(time_ns)] / scale)
    figure = go.Figure(
        go.Heatmap(
            x=steps,
            y=layers,
            z=(time_ns / scale).astype(np.float32),
            zmin=low,
            zmax=high,
            colorscale="Cividis",
            hoverongaps=False,
            hovertemplate=f"step %{{x}}, layer %{{y}}<br>%{{z:.3~g}} {unit}<extra></extra>",
            colorbar={"title": {"text": unit, "side": "top"}, "thickness": 10, "outlinewidth": 0, "len": 1},
        )
    )
    _style(figure, "step", "layer")
    figure.update_yaxes(showgrid=False, rangemode="normal", tickformat="d")
    figure.update_layout(margin={"t": 12})
    return figure


def kv_growth(trace: Trace) -> go.Figure:
    """Draw the bytes of the KV cache after each step: positions filled, and storage held for them."""
    steps = step_rows(trace)
    filled, held = numbers(steps, "kv_bytes"), numbers(steps, "kv_allocated_bytes")
    if not len(steps) or (np.isnan(filled).all() and np.isnan(held).all()):
        return _empty("No KV cache was recorded.")
    scale, unit = byte_unit(float(np.nanmax(np.concatenate([filled, held]))))
    starts = np.flatnonzero(np.diff(numbers(steps, "call"))) + 1
    figure = go.Figure()
    lines = (("allocated", held, "#E69F00", 6.0), ("filled", filled, "#0072B2", 2.0))
    for name, values, color, width in lines:
        figure.add_trace(
            go.Scatter(
                x=np.insert(steps["step"].to_numpy().astype(np.float64), starts, np.nan),
                y=np.insert(values / scale, starts, np.nan).astype(np.float32),
                name=name,
                mode="lines+markers" if len(steps) < 3 else "lines",
                line={"color": color, "width": width, "shape": "hv"},
                hovertemplate=f"%{{y:.4~g}} {unit}",
                meta={"ink": "mlp" if name == "allocated" else "attention"},
            )
        )
    _style(figure, "step", unit)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(unifiedhovertitle_text="after step %{x}")
    return figure


def stage_times(trace: Trace) -> go.Figure:
    """Draw prefill beside decode: the share of its phase that each stage and part took."""
    rows = [row for row in breakdown(trace) if row.stage != "layer" or row.part is not None]
    rows = [row for row in rows if row.part is None or row.stage == "layer"]
    if not rows:
        return _empty("No spans were recorded.")
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
    _style(figure, "share of the phase, %", "")
    figure.update_layout(barmode="group", bargap=0.3, margin={"l": 150, "r": 90})
    figure.update_xaxes(showgrid=True, rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=list(labels.values())[::-1], showgrid=False)
    return figure


def token_latency(trace: Trace) -> go.Figure:
    """Draw the time between consecutive tokens: a line a call, or the middle and spread of many."""
    gaps = token_gaps(trace)
    if not gaps:
        return _empty("Fewer than two generated tokens were recorded.")
    every = np.sort(np.concatenate(list(gaps.values())))
    scale, unit = time_unit(float(np.median(every)))
    figure = go.Figure()
    for line in _gap_lines(gaps, scale, unit):
        figure.add_trace(line)
    for name, fraction, side in (("p50", 0.5, "bottom right"), ("p95", 0.95, "top right")):
        level = percentile(every.tolist(), fraction) or 0.0
        figure.add_hline(
            level / scale, line={"color": _INK, "width": 1, "dash": "dot"}, annotation_text=name,
            annotation_position=side, annotation_font_size=11,
        )  # fmt: skip
    _style(figure, "new token", unit)
    figure.update_layout(hovermode="x unified", showlegend=len(gaps) > 1)
    figure.update_xaxes(unifiedhovertitle_text="new token %{x}")
    _cut_axis(figure, every, scale)
    return figure


def token_gaps(trace: Trace) -> dict[int, Array]:
    """Times in ns between kept tokens of the longest sequence, for each call that gave two or more."""
    tokens = first_rank(trace.table("tokens"))
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


def time_unit(typical_ns: float) -> tuple[float, str]:
    """Return the nanoseconds in the unit that suits a typical value, and the unit's name."""
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if typical_ns >= scale:
            return scale, unit
    return 1.0, "ns"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the bytes in the decimal unit that suits the largest value, and the unit's name."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= scale:
            return scale, unit
    return 1.0, "B"


def _parent_index(span: Array, parent: Array) -> Array:
    """Place of each span's parent among the spans, -1 at the top."""
    order = np.argsort(span)
    found = np.searchsorted(span[order], parent)
    found = order[np.minimum(found, max(len(order) - 1, 0))] if len(order) else found
    return np.where(np.isin(parent, span), found, -1)


def _block_names(spans: pa.Table, row: Array, parent: Array) -> Array:
    """Name the block of each span; empty where the span's time belongs to an enclosing one."""
    stage_code, stage_words = codes(spans, "stage")
    part_code, part_words = codes(spans, "part")
    stage = np.array([*stage_words, "other"], dtype=object)[stage_code[row]]
    part = np.array([*part_words, ""], dtype=object)[part_code[row]]
    names = np.where(parent < 0, stage, "")
    inside = parent >= 0
    in_layer = np.zeros(len(row), dtype=bool)
    in_layer[inside] = (parent[parent[inside]] < 0) & (stage[parent[inside]] == "layer") & (part[inside] != "")
    return np.where(in_layer, part, names)


def _own_time(host: Array, parent: Array, block: Array) -> Array:
    """Time of each owning span less that of the owning spans right inside it."""
    own = np.where(block >= 0, host, 0.0)
    inside = (parent >= 0) & (block >= 0)
    np.subtract.at(own, parent[inside], host[inside])
    return np.maximum(own, 0.0)


def ordered_blocks(keys: set[str]) -> tuple[Block, ...]:
    """Return the blocks of these keys in lifecycle order; a part that is not listed stands before the MLP."""
    known = [item for item in BLOCKS if item.key in keys]
    extra = sorted(keys - {item.key for item in BLOCKS})
    place = next((i for i, item in enumerate(known) if BLOCKS.index(item) >= 5), len(known))
    added = [Block(key, key.replace("_", " "), _FALLBACK[i % len(_FALLBACK)]) for i, key in enumerate(extra)]
    return (*known[:place], *added, *known[place:])


def _between(call: Array, start: Array, wall: Array) -> Array:
    """Time from the end of each step to the start of the next step of the same call."""
    after = np.zeros(len(call))
    if len(call) > 1:
        gap = start[1:] - (start[:-1] + wall[:-1])
        after[:-1] = np.where(call[1:] == call[:-1], np.maximum(np.nan_to_num(gap), 0), 0)
    return after


def _row_key(stage: str, part: str | None) -> str:
    return part if part is not None and part != OWN else stage


def _bar(x: Array, y: Array, block: Block, unit: str) -> go.Bar:
    return go.Bar(
        x=x,
        y=y,
        name=escape(block.label),
        marker={"color": block.color, "line": {"width": 0}},
        meta={"ink": block.key},
        hovertemplate=f"%{{y:.3~g}} {unit}",
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
        hovertemplate=f"%{{y:.3~g}} {unit}",
    )


def _gap_lines(gaps: dict[int, Array], scale: float, unit: str) -> list[go.Scatter]:
    """A line a call, or for many calls the median and the range from p5 to p95 at each token."""
    hover = f"%{{y:.3~g}} {unit}"
    if len(gaps) <= MAX_LINES:
        return [
            go.Scatter(
                x=np.arange(1, len(gap) + 1),
                y=(gap / scale).astype(np.float32),
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
    low, middle, high = np.nanpercentile(table, (5, 50, 95), axis=0)
    x = np.arange(1, table.shape[1] + 1)
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


def _ceiling(values: Array) -> tuple[float, float]:
    """The smallest value, and where a scale should end so that outliers do not flatten the rest."""
    low, most, high = float(values.min()), float(np.percentile(values, 98)), float(values.max())
    return low, most * 1.1 if high > 2 * most else high


def _cut_axis(figure: go.Figure, values_ns: Array, scale: float) -> None:
    """End the y axis above most values where a few tall ones would flatten the rest, and say so."""
    if len(values_ns) < 4:
        return
    _, top = _ceiling(values_ns)
    highest = float(values_ns.max())
    if highest > top:
        figure.update_yaxes(range=[0, top / scale * 1.15], autorange=False)
        figure.add_annotation(
            text=f"tallest {units.time(highest)}, cut off", xref="paper", yref="paper", x=1, y=1,
            xanchor="right", yanchor="bottom", showarrow=False, font={"size": 11},
        )  # fmt: skip


def _style(figure: go.Figure, x_title: str, y_title: str) -> None:
    """The house look: no frame, faint lines across, one small legend above."""
    figure.update_layout(
        template=None,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": _INK},
        margin=_MARGIN,
        height=300,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        hoverlabel={"align": "left"},
    )
    axis = {"zeroline": False, "showline": False, "ticks": "", "title": {"standoff": 8}, "automargin": True}
    figure.update_xaxes(title_text=x_title, showgrid=False, **axis)
    figure.update_yaxes(title_text=y_title, gridcolor=_FAINT, rangemode="tozero", **axis)


def _empty(why: str) -> go.Figure:
    figure = go.Figure()
    _style(figure, "", "")
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=why, xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False)
    return figure
