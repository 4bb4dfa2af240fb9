"""Figures of small traces whose numbers are stated by arithmetic."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_traces import judged, rows_of_call
from report_traces import write_trace as write_report_trace

from lifetrace.analysis import blocks, figures, read_trace, schema
from lifetrace.analysis.kv_form import KVForm, kv_form
from lifetrace.analysis.roofline_figure import roofline
from lifetrace.analysis.trace import Trace

MS = 1_000_000
# a detailed step: 1 prepare, 2 embed, layers of 10 (1 norm, 3 attention, 5 mlp, 1 own), 4 sample
LAYER_MS, OUTER_MS = 10, 7


def write_trace(folder: Path, **tables: list[dict]) -> Trace:
    """Write rows as a trace; what a row leaves out is null."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"format_version": 1, "run_id": "r", "status": "complete", "calls": tables.pop("calls", [])}
    (folder / "run.json").write_text(json.dumps(meta))
    for name, rows in tables.items():
        table = schema.TABLES[name]
        file = folder / name / "part-00000.parquet" if table.in_parts else folder / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        full = [{column.name: row.get(column.name) for column in table.columns} for row in rows]
        pq.write_table(pa.Table.from_pylist(full, schema=table.schema), file)
    return read_trace(folder)


def step_row(step: int, start_ms: float, wall_ms: float, **more) -> dict:
    phase = "decode" if step else "prefill"
    row = {"rank": 0, "call": 0, "step": step, "phase": phase, "warmup": False, "discarded": False}
    row |= {"start_ns": int(start_ms * MS), "wall_ns": int(wall_ms * MS)}
    return row | more


def span_rows(step: int, start_ms: float, layers: int) -> list[dict]:
    """A step's spans, one after another, layers with a norm, attention and an MLP inside."""
    rows: list[dict] = []
    now = start_ms

    def add(stage: str, ms: float, at: float, **more) -> int:
        number = step * 1000 + len(rows)
        phase = "decode" if step else "prefill"
        row = {"rank": 0, "step": step, "phase": phase, "span": number, "stage": stage}
        rows.append(row | {"start_ns": int(at * MS), "host_ns": int(ms * MS)} | more)
        return number

    for stage, ms in (("prepare", 1), ("embed", 2)):
        add(stage, ms, now)
        now += ms
    for layer in range(layers):
        whole = add("layer", LAYER_MS, now, layer=layer)
        inner = now
        for part, ms in (("norm", 1), ("attention", 3), ("mlp", 5)):
            add("layer", ms, inner, layer=layer, part=part, parent=whole)
            inner += ms
        now += LAYER_MS
    add("sample", 4, now)
    return rows


def detailed(folder: Path, steps: int = 3, layers: int = 2, gap_ms: float = 0.5) -> Trace:
    wall = OUTER_MS + LAYER_MS * layers
    starts = [step * (wall + gap_ms) for step in range(steps)]
    return write_trace(
        folder,
        steps=[step_row(step, start, wall, kv_bytes=1000 * (step + 4)) for step, start in enumerate(starts)],
        spans=[row for step, start in enumerate(starts) for row in span_rows(step, start, layers)],
    )


def test_every_nanosecond_of_a_step_has_an_owner(tmp_path):
    times = blocks.step_times(detailed(tmp_path, steps=2, layers=2, gap_ms=0.5))
    owned = dict(zip([block.key for block in times.blocks], (times.time_ns / MS).T.tolist(), strict=True))
    assert owned == {
        "prepare": [1, 1],
        "embed": [2, 2],
        "norm": [2, 2],
        "attention": [6, 6],
        "mlp": [10, 10],
        "layer": [2, 2],
        "sample": [4, 4],
        "between": [0.5, 0],
    }
    assert times.wall_ns.tolist() == [27 * MS, 27 * MS]


def test_a_step_without_spans_is_split_by_its_own_columns(tmp_path):
    thin = step_row(1, 40, 20, prepare_ns=2 * MS, forward_ns=15 * MS, sample_ns=3 * MS)
    trace = write_trace(tmp_path, steps=[step_row(0, 0, 17), thin], spans=span_rows(0, 0, 1))
    times = blocks.step_times(trace)
    assert times.has_spans.tolist() == [True, False]
    of_thin = {block.key: ns / MS for block, ns in zip(times.blocks, times.time_ns[1], strict=True) if ns}
    assert of_thin == {"prepare": 2, "forward": 15, "sample": 3}


def test_inner_steps_and_other_ranks_are_left_out_and_cold_ones_are_marked(tmp_path):
    rows = [
        step_row(0, 0, 1, warmup=True),
        step_row(1, 2, 5),
        step_row(2, 3, 1, parent_step=1),
        step_row(3, 8, 7, discarded=True),
        step_row(1, 2, 6, rank=1),
    ]
    times = blocks.step_times(write_trace(tmp_path, steps=rows))
    assert times.wall_ns.tolist() == [1 * MS, 5 * MS, 7 * MS]
    assert times.counted.tolist() == [False, True, False]


def test_timeline_stacks_blocks_as_bars_and_many_steps_as_areas(tmp_path):
    few = figures.timeline(detailed(tmp_path / "few", steps=3))
    assert {trace.type for trace in few.data} == {"bar"}
    heights = sum(np.asarray(trace.y, dtype=float) for trace in few.data)
    assert heights.tolist() == pytest.approx([27.5, 27.5, 27])
    many = figures.timeline(detailed(tmp_path / "many", steps=figures.MAX_BARS + 1, layers=1))
    assert {trace.stackgroup for trace in many.data} == {"step"}
    assert len(many.data) == len(few.data)


def test_a_long_prefill_does_not_flatten_the_decode_steps(tmp_path):
    rows = [step_row(0, 0, 1000, forward_ns=1000 * MS)]
    rows += [step_row(i, 990 + 10 * i, 10, forward_ns=10 * MS) for i in range(1, 100)]
    figure = figures.timeline(write_trace(tmp_path, steps=rows))
    assert figure.layout.yaxis.range[1] < 20
    assert figure.layout.annotations[0].text == "tallest 1.00 s, cut off"


def test_heat_map_leaves_holes_where_a_layer_has_no_time(tmp_path):
    spans = span_rows(0, 0, 2) + span_rows(1, 30, 1)
    trace = write_trace(tmp_path, steps=[step_row(0, 0, 27), step_row(1, 30, 17)], spans=spans)
    (heat,) = figures.heat_map(trace).data
    assert heat.x.tolist() == [0, 1]
    assert heat.y.tolist() == [0, 1]
    np.testing.assert_array_equal(heat.z, [[10, 10], [10, np.nan]])


def test_kv_growth_breaks_the_line_between_calls(tmp_path):
    held = {"kv_allocated_bytes": 4_000_000}
    rows = [step_row(i, i, 1, call=i // 2, kv_bytes=(2_000_000, 3_000_000)[i % 2], **held) for i in range(4)]
    allocated, filled = figures.kv_growth(write_trace(tmp_path, steps=rows)).data
    np.testing.assert_array_equal(filled.y, np.array([2, 3, np.nan, 2, 3], dtype=np.float32))
    np.testing.assert_array_equal(allocated.y, np.array([4, 4, np.nan, 4, 4], dtype=np.float32))


def test_stage_times_put_prefill_beside_decode(tmp_path):
    figure = figures.stage_times(detailed(tmp_path, steps=2, layers=2))
    shares = {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in figure.data}
    assert shares["prefill"]["MLP"] == pytest.approx(100 * 10 / 27)
    assert sum(shares["decode"].values()) == pytest.approx(100)


def token_row(call: int, position: int, arrival_ms: float, **more) -> dict:
    row = {
        "rank": 0,
        "call": call,
        "step": position,
        "sequence": 0,
        "position": position,
        "token_id": position,
    }
    return row | {"source": "generated", "kept": True, "arrival_ns": int(arrival_ms * MS)} | more


def test_token_latency_draws_a_line_a_call_or_the_spread_of_many(tmp_path):
    few = [token_row(call, i, 100 * call + 5 * i) for call in range(2) for i in range(4)]
    steps = [step_row(call, call, 1, call=call) for call in range(9)]
    figure = figures.token_latency(write_trace(tmp_path / "few", steps=steps, tokens=few))
    assert [line.name for line in figure.data] == ["call 0", "call 1"]
    assert figure.data[0].y.tolist() == [5, 5, 5]
    many = [token_row(call, i, 100 * call + (5 + call) * i) for call in range(9) for i in range(4)]
    high, low, middle = figures.token_latency(write_trace(tmp_path / "many", steps=steps, tokens=many)).data
    assert middle.y.tolist() == [9, 9, 9]
    assert (low.y < middle.y).all()
    assert (high.y > middle.y).all()


@pytest.mark.parametrize(
    "name", ["timeline", "heat_map", "heat_map_efficiency", "kv_growth", "memory", "stage_times", "token_latency"]
)
def test_a_trace_without_rows_gives_a_figure_that_says_so(tmp_path, name):
    figure = getattr(figures, name)(write_trace(tmp_path))
    assert len(figure.data) == 0
    assert figure.layout.annotations[0].text.endswith(".")


def test_names_from_a_trace_cannot_become_markup_of_a_chart(tmp_path):
    spans = span_rows(0, 0, 1)
    spans[3]["part"] = '<a href="https://example.org">norm</a>'
    trace = write_trace(tmp_path, steps=[step_row(0, 0, 17)], spans=spans)
    for name in ("timeline", "stage_times"):
        assert "<a" not in getattr(figures, name)(trace).to_json()


def test_figures_load_no_torch():
    code = "import lifetrace.analysis.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- under the device's ceilings -----------------------------------------------------------------


def test_roofline_by_arithmetic(tmp_path):
    """Decode: each attention 0.1 GFLOP for 50 MB in 1.75 ms; the roof of 1,000 FLOP/ns meets 100 B/ns at 10 FLOP/B."""
    figure = roofline(judged(tmp_path / "t"))
    named = {line.name: line for line in figure.data}
    attention = named["attention"]
    assert list(attention.x) == [2, 2]
    assert list(attention.y) == pytest.approx([0.2e9 / 8.5e-3, 0.2e9 / 3.5e-3])
    assert attention.marker.symbol == ("circle", "diamond")
    assert named["ridge"].x == (10,)
    assert named["ridge"].y == (1e12,)
    roof = named["roof"]
    assert max(roof.y) == 1e12
    assert roof.y[0] == pytest.approx(roof.x[0] * 1e11)
    assert "embedding" not in named  # no FLOPs, so no place on a logarithm
    assert attention.hovertext[1].split("<br>") == [
        "attention, decode",
        "600 MFLOP ÷ 300 MB = 2.00 FLOP/B",
        "600 MFLOP ÷ 10.5 ms = 57.1 GFLOP/s",
        "compute 600 µs, memory 3.00 ms, launch 60.0 µs",
        "roof 3.00 ms ÷ 10.5 ms = 28.6%, memory-bound",
    ]


def test_roofline_without_ceilings_has_points_and_says_so(tmp_path):
    trace = judged(tmp_path / "t")
    trace.meta["ceilings"] = None
    figure = roofline(trace)
    assert {line.name for line in figure.data} == {"attention", "MLP", "whole layers", "prefill", "decode"}
    assert figure.layout.annotations[0].text == "no ceilings are known for this device"


def test_names_from_a_trace_cannot_become_markup_of_the_roofline(tmp_path):
    trace = judged(tmp_path / "t")
    rows = rows_of_call()["spans"]
    for row in rows:
        row |= dict.fromkeys(("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes"), 8)
        row |= {"input_bytes": 8, "output_bytes": 8, "part": row["part"] and "<a href=x>"}
    assert "<a" not in roofline(write_report_trace(tmp_path / "t", trace.meta, spans=rows)).to_json()


def test_kv_growth_holds_the_closed_form(tmp_path):
    trace = judged(tmp_path / "t")
    form = kv_form(trace)
    assert form == KVForm(layers=2, heads=5, width=25, item_bytes=2)
    assert form.position_bytes == 1000
    lines = {line.name: line for line in figures.kv_growth(trace).data}
    assert lines["by the config"].y.tolist() == lines["filled"].y.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({}, {}),
        ({"num_key_value_heads": 5}, {}),
        ({"num_key_value_heads": 5, "head_dim": 25, "v_head_dim": 16}, {}),
        ({"num_key_value_heads": 5, "head_dim": 25}, {"kind": "sliding"}),
        ({"num_key_value_heads": 5, "head_dim": 25}, {"dtype": "int2"}),
        ({"num_key_value_heads": "5", "head_dim": 25}, {}),
    ],
)
def test_no_closed_form_is_guessed(tmp_path, config, rows):
    trace = judged(tmp_path / "t")
    trace.meta["model"]["config"] = config
    cache = [{"rank": 0, "step": 0, "layer": 0, "kind": "full", "length": 3, "dtype": "float16"} | rows]
    assert kv_form(write_report_trace(tmp_path / "t", trace.meta, kv=cache)) is None


def test_memory_draws_only_what_was_measured(tmp_path):
    lines = {line.name: line.y.tolist() for line in figures.memory(judged(tmp_path / "t")).data}
    assert lines == {
        "resident, whole process": pytest.approx([900] * 4),
        "weights and KV held": pytest.approx([120.006, 120.008, 120.01, 120.012]),
        "weights": pytest.approx([120] * 4),
    }


@pytest.mark.parametrize(("device", "word"), [("cuda", "allocator: in use"), ("cpu", "live tensors: in use")])
def test_what_was_asked_for_memory_is_named(tmp_path, device, word):
    steps = [step_row(0, 0, 1, mem_allocated_bytes=5)]
    trace = write_trace(tmp_path, steps=steps)
    trace.meta["device"] = {"type": device}
    assert [line.name for line in figures.memory(trace).data] == [word]


def test_no_number_has_an_exponent(tmp_path):
    """A prefill of 40 s beside steps of 10 µs: ticks and hovers are digits with thousands separated."""
    steps = [step_row(0, 0, 40_000), *[step_row(i, 40_000 + i, 0.01) for i in range(1, 9)]]
    spans = [row | {"host_ns": row["host_ns"] * (4000 if row["step"] == 0 else 1)} for i in range(9)
             for row in span_rows(i, 0, 2)]  # fmt: skip
    for draw in (figures.heat_map, figures.timeline):
        figure = draw(write_trace(tmp_path / draw.__name__, steps=steps, spans=spans))
        assert "~r}" in figure.data[0].hovertemplate
        ticks = figure.data[0].colorbar if draw is figures.heat_map else figure.layout.yaxis
        assert (ticks.exponentformat, ticks.separatethousands) == ("none", True)
