"""A sweep read back: the front, where the bound turns, what varies, and what table and page show of it."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chromium import CHROMIUM, Chromium
from rich.console import Console
from stored_traces import one_call

from lifetrace.analysis import sweep_figures, sweep_view
from lifetrace.analysis.columns import Column, fitting
from lifetrace.analysis.runs import Run, read_runs
from lifetrace.analysis.runs_view import print_runs
from lifetrace.analysis.sweep import AXES, Point, Setting, Sweep, grid, read_sweep, write_table
from lifetrace.analysis.sweep_page import page, write_page
from lifetrace.errors import TraceError

MS = 1_000_000
BATCH, PROMPT = AXES[1], AXES[0]


def point(prompt, batch, tpot_ms, rate, decode="memory", prefill="compute", reason=None, **setting):
    """A point with a floor of half its TPOT, 100 B of KV a position and sequence, and a TTFT of its prompt in ms."""
    made = Setting(prompt, batch, 16, **({"dtype": "float32", "attention": "sdpa", "threads": 1} | setting))
    status = "complete" if reason is None else "failed"
    run = Run(made.name, status)
    if reason is None:
        run = Run(
            made.name, status, model="m", batch=batch, ttft_ns=prompt * MS, tpot_ns=tpot_ms * MS,
            itl_p50_ns=tpot_ms * MS, itl_p95_ns=2 * tpot_ms * MS, decode_tokens_per_s=rate,
            prefill_tokens_per_s=1000.0 * batch, peak_memory_bytes=10**9, kv_bytes=100 * batch * (prompt + 15),
            prefill_step_ns=prompt * MS, prefill_roof_ns=prompt * MS / 2, prefill_efficiency=0.5, prefill_bound=prefill,
            decode_step_ns=tpot_ms * MS, decode_roof_ns=tpot_ms * MS / 2, decode_efficiency=0.5, decode_bound=decode,
        )  # fmt: skip
    return Point(made.name, made, status, reason, run)


def sweep_of(*points, path=None):
    return Sweep(path, {"model": "m"}, {"torch": "2"}, {"name": "a CPU"}, list(points))


def four():
    """Decode turns from memory- to compute-bound between batch 4 and 16, prefill nowhere."""
    return sweep_of(
        point(8, 1, 2.0, 500.0),
        point(8, 4, 2.5, 1600.0),
        point(8, 16, 8.0, 2000.0, decode="compute"),
        point(8, 32, 20.0, 1600.0, decode="compute"),
    )


# -- the grid ----------------------------------------------------------------------------------


def test_a_grid_is_every_combination_and_keeps_a_model_together():
    axes = {axis.key: (None,) for axis in AXES} | {
        "prompt_length": (8, 16, 8), "batch": (1,), "max_new_tokens": (4,), "dtype": ("float32", "bfloat16"),
    }  # fmt: skip
    assert [(p.dtype, p.prompt_length) for p in grid(axes)] == [
        ("float32", 8), ("float32", 16), ("bfloat16", 8), ("bfloat16", 16),
    ]  # fmt: skip


def test_a_name_holds_what_was_chosen():
    assert Setting(8, 1, 4).name == "prompt8-batch1-new4"
    whole = Setting(8, 1, 4, "bfloat16", "kernels/flash", "static", 2)
    assert whole.name == "prompt8-batch1-new4-bfloat16-kernels_flash-static-threads2"


# -- what it tells -----------------------------------------------------------------------------


def test_the_front_is_who_no_other_beats():
    found = four()
    assert found.front == {p.name for p in found.points[:3]}  # batch 32 is slower than 4 at the same rate


def test_only_points_of_the_same_work_compete():
    slow = point(512, 1, 4.0, 250.0)
    found = sweep_of(*four().points, slow)
    assert slow.name in found.front
    same_work = replace(slow, setting=replace(slow.setting, prompt_length=8))
    assert same_work.name not in sweep_of(*four().points, same_work).front


def test_equal_points_share_the_front():
    a, b = point(8, 1, 2.0, 500.0), point(8, 1, 2.0, 500.0, attention="eager")
    assert sweep_of(a, b).front == {a.name, b.name}


def test_where_the_bound_turns():
    (turn,) = four().turns()
    assert (turn.phase, turn.axis, turn.low, turn.high) == ("decode", BATCH, 4, 16)
    assert (turn.before, turn.after, turn.others) == ("memory", "compute", ())
    assert sweep_view.turn_words([turn]) == "Decode turns from memory- to compute-bound between batch 4 and 16."


def test_turns_are_told_along_each_axis_and_never_across():
    found = sweep_of(
        point(8, 1, 2, 500), point(8, 4, 2, 900, "compute"), point(64, 1, 2, 400), point(64, 4, 2, 700, "compute")
    )
    assert [(t.axis, t.low, t.high, dict(t.others)) for t in found.turns()] == [
        (BATCH, 1, 4, {PROMPT: 8}), (BATCH, 1, 4, {PROMPT: 64}),
    ]  # fmt: skip
    sentence = "Decode turns from memory- to compute-bound between batch 1 and 4 (prompt 8; prompt 64)."
    assert sentence in sweep_view.sentences(found)


def test_the_best_are_named():
    assert sweep_view.sentences(four())[:2] == [
        "Most decode tokens/s: 2,000, at batch 16.",
        "Lowest TPOT: 2.00 ms, at batch 1.",
    ]


def test_a_failed_point_takes_part_in_nothing_but_is_told():
    found = sweep_of(*four().points, point(9000, 1, 0, 0, reason="The prompt is too long."))
    assert [axis.key for axis in found.varying] == ["prompt_length", "batch"]
    assert len(found.measured) == 4
    assert "1 of 5 points have no complete trace." in sweep_view.sentences(found)
    row = found.rows()[-1]
    assert (row["status"], row["reason"], row["tpot_ns"], row["on_front"]) == (
        "failed", "The prompt is too long.", None, None,
    )  # fmt: skip
    assert "prompt9000-batch1" in page(found)


# -- pictures ----------------------------------------------------------------------------------


def test_an_axis_with_one_value_is_not_drawn():
    (trend,) = sweep_figures.trends(four())
    assert trend.axis == BATCH
    assert trend.legend == []
    assert "Over batch" in page(four())
    assert "Over prompt length" not in page(four())


def test_a_line_holds_its_figures_and_below_it_the_floor():
    (trend,) = sweep_figures.trends(four())
    charts = {measure.key: figure for measure, figure in trend.charts}
    measured, floor = charts["tpot_ns"].data
    assert list(measured.x) == list(floor.x) == [1, 4, 16, 32]
    assert list(measured.y) == [2.0, 2.5, 8.0, 20.0]
    assert list(floor.y) == [1.0, 1.25, 4.0, 10.0]
    assert floor.line.dash == "dot"
    assert list(charts["kv_bytes"].data[0].y) == [2.3, 9.2, 36.8, 73.6]  # kB: 100 B · batch · 23 positions
    assert len(charts["decode_tokens_per_s"].data) == 1


def test_a_line_for_each_combination_of_the_others():
    found = sweep_of(*(point(p, b, 2, 500) for p in (8, 16) for b in (1, 2, 4)))
    by_prompt, by_batch = sweep_figures.trends(found)
    assert [entry.text for entry in by_prompt.legend] == ["batch 1", "batch 2", "batch 4"]
    assert [entry.text for entry in by_batch.legend] == ["prompt 8", "prompt 16"]
    assert len({entry.color for entry in by_prompt.legend}) == 3
    assert len(set(sweep_figures.line_colors(20))) == 20


def test_words_are_drawn_over_where_no_number_varies():
    found = sweep_of(point(8, 1, 2, 500), point(8, 1, 3, 400, attention="eager"))
    (trend,) = sweep_figures.trends(found)
    assert list(trend.charts[0][1].data[0].x) == ["eager", "sdpa"]


def test_a_missing_point_leaves_no_line_at_zero():
    gap = sweep_of(point(8, 1, 2, 500), point(8, 2, 2, 900, reason="no memory"), point(8, 4, 2, 1500))
    (trend,) = sweep_figures.trends(gap)
    assert list(trend.charts[0][1].data[0].x) == [1, 4]


def test_the_front_is_drawn_joined_and_the_rest_open():
    beaten, front = sweep_figures.front(four()).data
    assert (list(beaten.x), beaten.marker.symbol, beaten.mode) == ([1600.0], "circle-open", "markers")
    assert list(front.x) == [500.0, 1600.0, 2000.0]
    assert list(front.text) == ["batch 1", "batch 4", "batch 16"]
    assert sweep_figures.front(sweep_of(point(8, 1, 2, 500))) is None


def test_the_map_marks_where_the_bound_turns():
    made = sweep_figures.bound_map(four(), "decode")
    assert (made.axis, made.columns) == (BATCH, ["batch 1", "batch 4", "batch 16", "batch 32"])
    ((_, cells),) = made.rows
    assert [(cell.bound, cell.turns) for cell in cells] == [
        ("memory", False), ("memory", False), ("compute", True), ("compute", False),
    ]  # fmt: skip
    assert cells[0].efficiency == "50.0%"
    assert sweep_figures.bound_map(sweep_of(point(8, 1, 2, 500)), "decode") is None


def test_the_map_shows_a_hole_for_a_point_that_is_missing():
    found = sweep_of(point(8, 1, 2, 500), point(64, 1, 2, 400), point(64, 4, 2, 700))
    made = sweep_figures.bound_map(found, "decode")
    assert [[cell is not None for cell in cells] for _, cells in made.rows] == [[True, True], [False, True]]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_draws_asks_for_nothing_and_keeps_to_the_width(tmp_path):
    found = sweep_of(*four().points, *(point(64, b, 2 + b, 100.0 * b) for b in (1, 4)), path=tmp_path)
    hostile = point(128, 1, 0, 0, reason="</script><script>document.title='owned'</script><img src=x onerror=alert(1)>")
    file = write_page(replace(found, points=[*found.points, hostile]))
    browser = Chromium(tmp_path / "profile")
    try:
        for width, dark in ((1200, False), (390, True)):
            browser.open(file, width, dark)
            assert browser.complaints == []
            assert browser.requests == [file.as_uri()]
            charts = browser.run("document.querySelectorAll('.chart').length")
            assert charts == 1 + 2 * 6
            assert browser.run("document.querySelectorAll('.chart .main-svg').length") >= charts
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run("document.title") == "Sweep · lifetrace"
    finally:
        browser.close()


def test_a_page_of_one_point_has_the_table_alone():
    text = page(sweep_of(point(8, 1, 2, 500)))
    assert "All points" in text
    assert 'data-chart="' not in text


# -- tables ------------------------------------------------------------------------------------


def printed(write, width):
    console = Console(width=width, record=True, file=io.StringIO())
    write(console)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_fits_and_always_tells_the_essential(width):
    lines = printed(lambda console: sweep_view.print_sweep(four(), console), width)
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if "TPOT" in line)
    assert [word in head for word in ("batch", "TTFT", "TPOT", "tokens/s", "decode, of roof")] == [True] * 5
    assert ("p95" in head) == (width >= 120)
    assert "…" not in "".join(lines)


def test_columns_of_the_highest_rank_go_first():
    columns = [Column("aaaa", str), Column("bbbb", str, 2), Column("cccc", str, 1)]
    assert [c.heading for c in fitting(columns, ["x"], 18)] == ["aaaa", "bbbb", "cccc"]  # 12 + 2 · 2 between + 2
    assert [c.heading for c in fitting(columns, ["x"], 17)] == ["aaaa", "cccc"]
    assert [c.heading for c in fitting(columns, ["x"], 3)] == ["aaaa"]


def test_runs_are_listed_also_those_that_cannot_be_read(tmp_path):
    one_call(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    bad, good = read_runs(tmp_path)
    assert (bad.status, bad.tpot_ns) == ("unreadable", None)
    assert (good.ttft_ns, good.tpot_ns) == (10 * MS, 5 * MS)  # (25 − 10) ÷ 3
    assert good.prefill_step_ns == 10 * MS
    assert good.decode_step_ns == 5 * MS
    assert good.kv_bytes == 600
    lines = printed(lambda console: print_runs([bad, good], console), 100)
    assert any("good" in line and "10.0 ms" in line for line in lines)
    assert any(line.startswith("bad: ") for line in lines)
    assert "cannot be read" in " ".join(" ".join(lines).split())
    with pytest.raises(TraceError, match="holds no traces"):
        read_runs(tmp_path / "good" / "steps")


def stored(folder, points, **more):
    rows = [{"name": p.name, "reason": None} | vars(p) | more for p in points]
    document = {"format": 1, "settings": {}, "versions": {}, "device": {}, "points": rows}
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(document))
    return folder


def test_a_stored_sweep_is_read_with_what_is_not_there_yet(tmp_path):
    ran, pending = Setting(3, 1, 4), Setting(3, 2, 4)
    one_call(tmp_path / ran.name)
    found = read_sweep(stored(tmp_path, [pending, ran]))
    assert [(p.setting.batch, p.status) for p in found.points] == [(1, "complete"), (2, "pending")]
    assert [axis.key for axis in found.varying] == ["batch"]
    table = pq.read_table(write_table(found))
    assert table["tpot_ns"].to_pylist() == [5 * MS, None]
    assert table.schema.field("kv_bytes").type == pa.int64()
    assert table.schema.field("cache").type == pa.string()  # of nulls alone
    assert table.column_names[:11] == [
        "name", "status", "reason", "on_front", "prompt_length", "batch", "max_new_tokens", "dtype", "attention",
        "cache", "threads",
    ]  # fmt: skip


def test_a_trace_that_cannot_be_read_is_a_row_without_figures(tmp_path):
    setting = Setting(3, 1, 4)
    (tmp_path / setting.name).mkdir()
    (tmp_path / setting.name / "run.json").write_text("[]")
    (row,) = read_sweep(stored(tmp_path, [setting])).rows()
    assert (row["status"], row["ttft_ns"]) == ("unreadable", None)
    assert "no manifest" in row["reason"]


@pytest.mark.parametrize("text", ["{", "[]", '{"points": [{}], "format": 1}', '{"points": 3}', '{"format": 1}'])
def test_a_damaged_sweep_says_so(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(TraceError, match="cannot be read"):
        read_sweep(tmp_path)


def test_a_newer_sweep_says_so(tmp_path):
    stored(tmp_path, [])
    (tmp_path / "sweep.json").write_text('{"format": 9, "points": []}')
    with pytest.raises(TraceError, match="is of format 9"):
        read_sweep(tmp_path)


def named(table):
    """The words in the first column of a table."""
    return set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE))))


def test_every_key_and_column_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.partition("## `lifetrace sweep --json`")[2].partition("\n## ")[0]
    keys, columns = section.split("| column | meaning |")
    found = four()
    found = replace(found, path=Path("s"))
    assert named(keys) == set(found.to_json()) | {"report", "failed"}
    assert named(columns) == set(found.table().column_names)
