"""Reading long traces: results by the generator's own arithmetic, columns that are not read, figures that say so."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from large_trace import write_large
from stored_traces import one_call

from lifetrace.analysis import blocks, figures, queries, read_trace, report, report_data, stage_sums, table_file
from lifetrace.analysis.drawing import MAX_POINTS, Bins
from lifetrace.analysis.parquet_size import decoded_bytes
from lifetrace.cli import main
from lifetrace.errors import TraceError

SPANS = 500_000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_large(tmp_path_factory.mktemp("large") / "t", SPANS)


def test_the_summary_is_the_generators_arithmetic(made):
    shown = json.loads(CliRunner().invoke(main, ["show", "--json", str(made.path)]).stdout)
    assert SPANS <= made.spans < SPANS + 600
    assert shown["steps"] == shown["steps_recorded"] == made.steps
    calls = len(made.wall_ns)
    for row in shown["stages"]:
        if row["part"] != "own":
            key = row["phase"], row["stage"], row["part"]
            assert row["time_ns"] == pytest.approx(made.span_ns[key] / calls, rel=1e-12)
    assert {(row["phase"], row["stage"], row["part"]) for row in shown["stages"]} >= set(made.span_ns)
    phases = {row["phase"]: row for row in shown["verdicts"]["phases"]}
    assert phases["decode"]["time_ns"] == sum(int(wall[1:].sum()) for wall in made.wall_ns) / calls
    assert phases["prefill"]["time_ns"] == sum(int(wall[0]) for wall in made.wall_ns) / calls
    assert shown["steps_per_call"] == {"prefill": 1, "decode": len(made.wall_ns[0]) - 1}


def test_it_has_the_files_of_a_real_run(made):
    """Parts of as many steps as two seconds hold, merged into files of a quarter of a million rows at most."""
    spans = sorted((made.path / "spans").glob("*.parquet"))
    rows = [pq.read_metadata(file).num_rows for file in spans]
    assert sum(rows) == made.spans
    assert all(200_000 < count <= 250_000 for count in rows[:-1])
    assert 6 < sum(file.stat().st_size for file in spans) / made.spans < 9  # bytes a span; of the stored trace 6.7
    assert len(list((made.path / "steps").glob("*"))) == 1
    assert read_trace(made.path).gaps == []


NOT_READ = ("module", "class_name", "input_shape", "output_shape", "mem_peak_bytes", "flops_dense", "device")


@pytest.mark.parametrize("column", ["module", "input_shape", "mem_peak_bytes", "host_ns"])
def test_columns_that_are_not_needed_are_not_read(tmp_path, column):
    """A column whose pages are damaged is noticed by those who read it alone."""
    made = write_large(tmp_path / "t", 2_000)
    (file,) = (made.path / "spans").glob("*.parquet")
    expected = CliRunner().invoke(main, ["show", "--json", str(made.path)]).stdout
    metadata = pq.read_metadata(file).row_group(0)
    number = next(i for i in range(metadata.num_columns) if metadata.column(i).path_in_schema.startswith(column))
    start, size = metadata.column(number).data_page_offset, metadata.column(number).total_compressed_size
    data = bytearray(file.read_bytes())
    data[start : start + size // 2] = b"\xff" * (size // 2)
    file.write_bytes(data)
    ended = CliRunner().invoke(main, ["show", "--json", str(made.path)])
    if column in NOT_READ:
        assert ended.stdout == expected
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(made.path).table("spans")
    else:
        assert ended.exit_code == 2
        assert "cannot be read" in ended.stderr


def test_a_column_is_read_once_and_kept(tmp_path, monkeypatch):
    trace = read_trace(one_call(tmp_path / "t"))
    read = []
    decode = table_file._decoded
    monkeypatch.setattr(table_file, "_decoded", lambda file, table, columns, *more: (
        read.append((table.name, tuple(columns))), decode(file, table, columns, *more)
    )[1])  # fmt: skip
    assert trace.table("spans", ["stage", "host_ns"]).column_names == ["stage", "host_ns"]
    assert trace.table("spans", ["host_ns", "layer"]).column_names == ["host_ns", "layer"]
    trace.table("spans", ["layer", "stage"])
    assert read == [("spans", ("stage", "host_ns", "rank", "span")), ("spans", ("layer",))]
    assert trace.table("spans").column_names == list(trace.spans.columns)


def test_the_size_of_some_columns_is_known_by_their_place(tmp_path):
    """A file whose bomb calls itself by another name in its pages' headers is measured by the schema."""
    rows = pa.table({"a": [1, 2, 3], "b": [[7] * 1000] * 3, "c": ["x"] * 3})
    pq.write_table(rows, tmp_path / "f", use_dictionary=False)
    whole = decoded_bytes(tmp_path / "f")
    parts = [decoded_bytes(tmp_path / "f", [name]) for name in "abc"]
    assert sum(parts) == whole
    assert parts[1] >= 3 * 1000 * 8 > parts[0] + parts[2]
    assert decoded_bytes(tmp_path / "f", ["element"]) == 0


def test_a_file_that_is_rewritten_meanwhile_is_said_to_be(tmp_path):
    folder = one_call(tmp_path / "t")
    trace = read_trace(folder)
    trace.table("steps", ["step"])
    file = folder / "steps" / "part-00000.parquet"
    rows = pq.ParquetFile(file).read()
    file.unlink()
    pq.write_table(rows.slice(1), file)
    with pytest.raises(TraceError, match="was rewritten while the trace was read"):
        trace.table("steps", ["wall_ns"])


def test_ids_that_come_out_of_order_are_told_apart_too(tmp_path):
    folder = one_call(tmp_path / "t")
    file = folder / "spans" / "part-00000.parquet"
    rows = pq.ParquetFile(file).read()
    pq.write_table(rows.slice(0, 5).take(pa.array([3, 0, 4, 1, 2])), file)
    pq.write_table(rows.slice(5), file.with_name("part-00001.parquet"))
    assert len(read_trace(folder).table("spans")) == len(rows)
    mixed = rows.take(pa.array(np.argsort(np.arange(len(rows)) % 2, kind="stable")))
    pq.write_table(mixed.slice(0, 6), file)
    pq.write_table(mixed.slice(6), file.with_name("part-00001.parquet"))
    assert len(read_trace(folder).table("spans")) == len(rows)
    pq.write_table(mixed.slice(5), file.with_name("part-00001.parquet"))
    with pytest.raises(TraceError, match="two of its rows have the same span"):
        read_trace(folder).table("spans")


# -- what is drawn of it -------------------------------------------------------------------------


def test_bins_are_means_of_neighbours():
    bins = Bins(7, 3)
    assert bins.first.tolist() == [0, 3, 6]
    assert bins.last.tolist() == [2, 5, 6]
    assert bins.mean(np.array([[1.0, 2, 3, 4, np.nan, 6, 7]])).tolist() == [[2, 5, 7]]
    assert np.isnan(bins.mean(np.array([np.nan] * 3 + [1.0] * 4))).tolist() == [True, False, False]
    assert bins.title("step", "each point is the mean of {} steps") == "step (each point is the mean of 3 steps)"
    few = Bins.of(MAX_POINTS)
    assert (few.size, Bins.of(MAX_POINTS + 1).size, few.title("step", "{}")) == (1, 2, "step")


def test_figures_of_a_long_run_say_what_their_points_are(made):
    trace = read_trace(made.path)
    assert made.steps > MAX_POINTS
    for draw, words in (
        (figures.timeline, "each point is the mean of 2 steps"),
        (figures.heat_map, "each column is the mean of 2 steps"),
        (figures.heat_map_efficiency, "each column is the mean of 2 steps"),
        (figures.kv_growth, "one of 2 is drawn"),
        (figures.memory, "one of 2 is drawn"),
    ):
        figure = draw(trace)
        assert words in figure.layout.xaxis.title.text
        assert all(len(line.x) <= MAX_POINTS + len(made.wall_ns) for line in figure.data)
    times = blocks.step_times(trace)
    drawn = sum(np.array(area.y, dtype=float) for area in figures.timeline(trace).data)
    wall = times.time_ns.sum(axis=1)
    assert drawn[1] * 1e6 == pytest.approx(wall[2:4].mean(), rel=1e-6)


def test_the_time_of_every_step_is_its_stages(made):
    """What the blocks own adds up to what the generator wrote, step by step."""
    times = blocks.step_times(read_trace(made.path))
    wall = np.concatenate(made.wall_ns)
    assert times.wall_ns.tolist() == wall.tolist()
    between = [block.key for block in times.blocks].index(blocks.BETWEEN)
    owned = np.delete(times.time_ns, between, axis=1).sum(axis=1)
    assert (owned <= wall).all()
    assert owned.sum() > 0.98 * wall.sum()


def test_a_page_that_leaves_steps_out_says_so(made, tmp_path):
    trace = read_trace(made.path)
    path = report.write_report(trace, tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 14_000_000
    assert f"this page holds 2,000 of the {made.steps:,} steps one by one" in page
    times = blocks.step_times(trace)
    held = report_data.steps_in_page(times)
    assert len(held) == report_data.MAX_STEPS
    length = len(made.wall_ns[0])
    ends = {call * length + at for call in range(len(made.wall_ns)) for at in (0, length - 1)}
    assert ends <= set(held.tolist())
    assert set(np.argsort(-times.wall_ns)[:20].tolist()) <= set(held.tolist())
    assert np.diff(held).max() <= 3  # evenly spread
    beside = report_data._beside(blocks.step_rows(trace), times, held)
    number, before = (np.frombuffer(_bytes(beside[name]), "<i4") for name in ("number", "before"))
    assert number.tolist() == [at % length for at in held]
    assert before.tolist() == [at - 1 if at % length else -1 for at in held]


def _bytes(packed):
    import base64

    assert packed["dtype"] == "i4"
    return base64.b64decode(packed["bdata"])


def test_a_short_run_is_drawn_step_by_step(tmp_path):
    trace = read_trace(one_call(tmp_path / "t"))
    assert report_data.steps_in_page(blocks.step_times(trace)).tolist() == [0, 1, 2, 3]
    assert "one by one" not in report.render_report(trace)
    assert figures.timeline(trace).layout.xaxis.title.text == "step"


def test_memory_of_a_scan_does_not_grow_with_the_trace(made):
    """Of each file only its sums are kept."""
    trace = read_trace(made.path)
    kept = stage_sums.step_stages(trace)
    columns = (*queries.SPAN_COLUMNS, *queries.SPAN_WORK)
    assert kept.nbytes < 0.15 * trace.table("spans", columns).nbytes
