"""The roofline of a trace: its stages as points under the device's measured ceilings."""

from html import escape

import numpy as np
import plotly.graph_objects as go

from . import units
from .blocks import ordered_blocks
from .ceilings import Ceilings, of_manifest
from .drawing import FAINT, INK, empty, style
from .queries import OWN
from .roofline import PhaseVerdict, StageVerdict, phase_verdicts, rooflines
from .trace import Trace

SYMBOLS = {"prefill": "circle", "decode": "diamond"}
LINES = {"prefill": "solid", "decode": "dash"}
SMALLEST, LARGEST = 8.0, 26.0


def roofline(trace: Trace) -> go.Figure:
    """Draw FLOP/s over FLOP a byte, both logarithmic: a point a stage and phase, larger where it took longer.

    The slope is the bandwidth at the phase's working set, the level the best matrix product in the
    model's dtype; they meet at the ridge. Work without FLOPs has no place on a logarithm.
    """
    ceilings, _ = of_manifest(trace.meta)
    rows = [row for row in rooflines(trace, ceilings) if _has_place(row)]
    if not rows:
        return empty("No stage has its FLOPs, bytes and time counted.")
    figure = go.Figure()
    phases = [phase for phase in phase_verdicts(trace, ceilings) if any(row.phase == phase.phase for row in rows)]
    edges = _edges(rows, phases)
    if ceilings is not None:
        for phase in phases:
            _add_roof(figure, phase, ceilings, edges, shared=_alike(phases))
    for trace_ in _points(rows, ceilings):
        figure.add_trace(trace_)
    for phase in phases:
        figure.add_trace(_legend_entry(phase.phase))
    _lay_out(figure, ceilings, edges)
    return figure


def _has_place(row: StageVerdict) -> bool:
    counted = bool(row.work.flops and row.work.bytes_ and row.time_ns)
    # a layer that is split into parts is drawn as its parts, and what remains has no bytes of its own
    return counted and row.part != OWN


def _roof(phase: PhaseVerdict, ceilings: Ceilings) -> tuple[float | None, float | None]:
    return ceilings.peak_flops_per_s(phase.dtype), ceilings.read_bytes_per_s(phase.working_set_bytes)


def _alike(phases: list[PhaseVerdict]) -> bool:
    """Whether one line stands for all: working sets that differ by a few positions hardly change the bandwidth."""
    ridges = [phase.verdict.ridge for phase in phases if phase.verdict.ridge is not None]
    return not ridges or max(ridges) <= 1.02 * min(ridges)


def _edges(rows: list[StageVerdict], phases: list[PhaseVerdict]) -> tuple[float, float]:
    """Intensities at the ends of the axis, the ridges inside."""
    inside = [row.work.flops / row.work.bytes_ for row in rows if row.work.flops and row.work.bytes_]
    inside += [phase.verdict.ridge for phase in phases if phase.verdict.ridge is not None]
    return min(inside) / 3, max(inside) * 3


def _add_roof(
    figure: go.Figure, phase: PhaseVerdict, ceilings: Ceilings, edges: tuple[float, float], shared: bool
) -> None:
    """The line min(peak, intensity × bandwidth) of a phase; nothing where one of the two is not known."""
    peak, bandwidth = _roof(phase, ceilings)
    if peak is None or bandwidth is None or (shared and any(trace.mode == "lines" for trace in figure.data)):
        return
    ridge = peak / bandwidth
    x = np.unique(np.concatenate([np.geomspace(*edges, 60), [ridge]]))
    name = "roof" if shared else f"roof of {phase.phase}"
    figure.add_trace(
        go.Scatter(
            x=x, y=np.minimum(peak, x * bandwidth), mode="lines", name=name, meta={"ink": "ink"},
            line={"color": INK, "width": 1.5, "dash": "solid" if shared else LINES[phase.phase]},
            hovertemplate=f"{name}<br>%{{x:,.3~r}} FLOP/B × {units.byte_count(bandwidth)}/s, "
            f"at most {units.flop_count(peak)}/s<extra></extra>",
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=[ridge], y=[peak], mode="markers+text", name="ridge", showlegend=False, meta={"ink": "ink"},
            marker={"symbol": "line-ns-open", "size": 12, "color": INK},
            text=[f"ridge {units.significant(ridge)} FLOP/B"], textposition="top left",
            hovertemplate=f"{units.flop_count(peak)}/s ÷ {units.byte_count(bandwidth)}/s = "
            f"{units.significant(ridge)} FLOP/B<extra></extra>",
        )
    )  # fmt: skip


def _points(rows: list[StageVerdict], ceilings: Ceilings | None) -> list[go.Scatter]:
    """A set of points a stage or part: one a phase, told apart by their shape."""
    blocks = ordered_blocks({_key(row) for row in rows})
    split = {row.stage for row in rows if row.part is not None}
    found = []
    for block in blocks:
        mine = [row for row in rows if _key(row) == block.key]
        label = "whole layers" if block.key == "layer" and "layer" in split else block.label
        told = [arithmetic(row, label, ceilings) for row in mine]
        found.append(
            go.Scatter(
                x=[row.work.flops / row.work.bytes_ for row in mine if row.work.flops and row.work.bytes_],
                y=[row.work.flops / row.time_ns * 1e9 for row in mine if row.work.flops],
                mode="markers",
                name=escape(label),
                marker={
                    "symbol": [SYMBOLS[row.phase] for row in mine],
                    "size": [SMALLEST + (LARGEST - SMALLEST) * row.share**0.5 for row in mine],
                    "color": block.color,
                    "line": {"width": 1, "color": INK},
                },
                customdata=[" · ".join(lines) for lines in told],
                hovertext=["<br>".join(map(escape, lines)) for lines in told],
                hovertemplate="%{hovertext}<extra></extra>",
                meta={"ink": block.key},
            )
        )
    return found


def _key(row: StageVerdict) -> str:
    return row.part or row.stage


def _legend_entry(phase: str) -> go.Scatter:
    marker = {"symbol": f"{SYMBOLS[phase]}-open", "size": 11, "color": INK}
    return go.Scatter(x=[None], y=[None], mode="markers", name=phase, marker=marker, meta={"ink": "ink"})


def arithmetic(row: StageVerdict, label: str, ceilings: Ceilings | None) -> list[str]:
    """How a point came to its place, line by line: its intensity, its rate, its roof."""
    work, judged = row.work, row.verdict
    if not work.flops or not work.bytes_:
        return [label]
    flops, moved, took = units.flop_count(work.flops), units.byte_count(work.bytes_), units.time(row.time_ns)
    lines = [
        f"{label}, {row.phase}",
        f"{flops} ÷ {moved} = {units.significant(work.flops / work.bytes_)} FLOP/B",
        f"{flops} ÷ {took} = {units.flop_count(work.flops / row.time_ns * 1e9)}/s",
    ]
    if ceilings is not None and judged.roof_ns:
        lines += [
            f"compute {units.time(judged.compute_ns)}, memory {units.time(judged.memory_ns)}, "
            f"launch {units.time(judged.launch_ns)}",
            f"roof {units.time(judged.roof_ns)} ÷ {took} = {units.share(judged.efficiency)}, {judged.bound}-bound",
        ]
    return [*lines, judged.fault] if judged.fault else lines


def _lay_out(figure: go.Figure, ceilings: Ceilings | None, edges: tuple[float, float]) -> None:
    style(figure, "FLOP a byte", "FLOP/s")
    figure.update_layout(height=420, hovermode="closest")
    ticks = {"type": "log", "dtick": 1, "exponentformat": "SI", "showgrid": True, "gridcolor": FAINT}
    figure.update_xaxes(**ticks, range=[float(np.log10(edge)) for edge in edges])
    figure.update_yaxes(**ticks, rangemode="normal")
    if ceilings is None:
        figure.add_annotation(
            text="no ceilings are known for this device", xref="paper", yref="paper", x=1, y=1,
            xanchor="right", yanchor="bottom", showarrow=False, font={"size": 11},
        )  # fmt: skip
