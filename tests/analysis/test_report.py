"""The report: one file that asks for nothing, whatever a trace holds. `test_report_page` opens it in a browser."""

import base64
import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from report_traces import (
    HOSTILE,
    MS,
    call_facts,
    hostile,
    judged,
    long_trace,
    odd_traces,
    rows_of_call,
    small,
    write_trace,
)
from stored_traces import one_call

from lifetrace.analysis import figures, read_trace, report, report_data, report_head, report_words
from lifetrace.analysis.memory import memory
from lifetrace.analysis.report_verdict import time_parts
from lifetrace.analysis.trace import Trace
from lifetrace.analysis.verdicts import judge
from lifetrace.errors import TraceError


def page_of(trace: Trace, folder: Path) -> str:
    return report.write_report(trace, folder / "report.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def unpacked(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


# -- what the file is ------------------------------------------------------------------------


def test_one_file_that_asks_for_nothing(tmp_path):
    page = page_of(small(tmp_path / "t"), tmp_path)
    assert page.count(get_plotlyjs()) == 1
    rest = page.replace(get_plotlyjs(), "")
    assert not re.search(r"""(src|href|action|data)\s*=\s*["']?(https?:)?//""", rest)
    assert not re.search(r"@import|url\(", rest)
    assert "default-src 'none'" in rest
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["report.html"]


def test_headline_numbers_by_arithmetic(tmp_path):
    page = page_of(small(tmp_path / "t"), tmp_path)
    cards = dict(re.findall(r"<dt>([^<]+)</dt><dd><bdi>([^<]+)</bdi></dd><dd class=\"note\">", page))
    assert cards["Time to first token"] == "20.0 ms"
    assert cards["Time per output token"] == "10.0 ms"
    assert cards["Prefill"] == "150 tokens/s"  # 3 tokens in 20 ms
    assert cards["Decode"] == "100 tokens/s"
    assert cards["KV cache"] == "6.00 kB"
    assert cards["Stopped by"] == "token limit"
    assert cards["Tracing overhead"] == "–"
    assert "Prefill of 3 prompt tokens took 20.0 ms: 42% attention, 42% MLP" in page  # 2 × 4.25 of 20 ms each
    assert "Each of 3 decode steps took 10.0 ms (median): 35% attention, 35% MLP" in page


def test_overhead_and_quality_are_told(tmp_path):
    overhead = {"untraced_s": [1.0], "traced_s": [1.01], "ratio": 1.01, "ratio_low": 0.995, "ratio_high": 1.02}
    same = page_of(small(tmp_path / "a", overhead=overhead | {"tokens_identical": True}), tmp_path)
    assert "+1.0%" in same
    assert "-0.5% to +2.0%" in same
    assert "Tokens are identical" in same
    differ = page_of(small(tmp_path / "b", overhead=overhead | {"tokens_identical": False}), tmp_path)
    assert "Tokens differ" in differ
    killed = page_of(small(tmp_path / "c", status="running", notes=["something was missed"]), tmp_path)
    assert "was killed" in killed
    assert "something was missed" in killed


def test_data_holds_spans_and_work_where_known(tmp_path):
    rows = rows_of_call()
    for row in rows["spans"]:
        if row["part"] == "mlp":
            row |= {"flops": 500, "input_shape": [1, 1, 64], "output_shape": [1, 1, 64]}
    trace = write_trace(tmp_path / "t", {"calls": [call_facts(0, 3, 4, 0)]}, **rows)
    data = data_of(page_of(trace, tmp_path))
    assert data["work"]["weight_bytes"] is None
    keys = [block[0] for block in data["blocks"]]
    flops = unpacked(data["work"]["flops"]).reshape(4, len(keys))
    assert flops[:, keys.index("mlp")].tolist() == [1000] * 4
    assert np.isnan(flops[:, keys.index("attention")]).all()
    shapes = unpacked(data["shapes"]["output"]).reshape(4, len(keys))
    assert data["shapes"]["texts"][shapes[0, keys.index("mlp")]] == "1 × 1 × 64"
    assert len(data["spans"]["layouts"]) == 1
    assert len(unpacked(data["spans"]["ns"])) == len(rows["spans"])
    assert unpacked(data["tokens"]["waited_ns"])[3:].tolist() == [20 * MS, 10 * MS, 10 * MS, 10 * MS]


def test_spans_beyond_the_budget_stay_in_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(report_data, "MAX_SPANS", 20)
    trace = small(tmp_path / "t")
    layout = unpacked(data_of(page_of(trace, tmp_path))["spans"]["layout"])
    assert layout[0] == 0  # the prefill comes first
    assert sorted(layout.tolist()) == [-2, -2, 0, 0]


def test_tokens_beyond_the_budget_are_left_out_prompt_first(tmp_path, monkeypatch):
    monkeypatch.setattr(report_data, "MAX_TOKENS", 5)
    tokens = data_of(page_of(small(tmp_path / "t"), tmp_path))["tokens"]
    assert unpacked(tokens["position"]).tolist() == [2, 3, 4, 5, 6]
    assert tokens["left_out"] == 2


def test_modules_alike_are_counted_together(tmp_path):
    modules = [
        {"module": f"layers.{i}.q", "class_name": "Linear", "parameters": 10, "weight_bytes": 40, "dtype": "float32"}
        for i in range(3)
    ] + [{"module": "head", "class_name": "Linear", "tied_to": "embed", "parameters": 0}]
    trace = write_trace(tmp_path / "t", {}, modules=modules, **rows_of_call())
    page = page_of(trace, tmp_path)
    first, _ = report_words.module_rows(trace)
    assert (first.name, first.count, first.parameters) == ("layers.*.q", 3, 30)
    assert "tied to <bdi>embed</bdi>" in page


# -- verdicts --------------------------------------------------------------------------------


def test_the_verdict_leads(tmp_path):
    page = page_of(judged(tmp_path / "t"), tmp_path)
    # decode: 120 MB at 100 B/ns are 1.2 ms, 2.2 GFLOP at 1,000 FLOP/ns 2.2 ms
    assert page.index("<h2>Decode is compute-bound</h2>") < page.index("Time to first token")
    assert "Confidence: " in page
    assert "Lost time 1" in page


def test_without_ceilings_nothing_is_claimed(tmp_path):
    page = page_of(small(tmp_path / "t"), tmp_path)
    shown = page.partition("<main>")[2].partition("<script")[0]
    assert "What limits decode is unknown" in shown
    assert not re.search(r"(compute|memory|launch)-bound", shown)
    assert ">lost<" not in shown
    data = data_of(page)
    assert data["bounds"] is data["verdict"] is None


def test_a_row_holds_roof_and_lost_time_of_a_step(tmp_path):
    trace = judged(tmp_path / "t")
    rows = {row.block.key: row for row in report_words.stage_rows(trace, judge(trace))}
    attention, mlp = rows["attention"].decode, rows["mlp"].decode
    assert (attention.time_ns, attention.roof_ns, attention.lost_ns) == (3.5 * MS, 1 * MS, 2.5 * MS)
    assert (attention.bound, mlp.bound) == ("memory 29%", "compute 57%")
    assert mlp.roof_share == pytest.approx(2 / 3.5)
    assert rows["attention"].prefill.time_ns == 8.5 * MS
    assert rows["embed"].decode.roof_ns == 0  # it moves nothing here, and only launches


def test_parts_of_a_step_add_up_to_its_time(tmp_path):
    trace = judged(tmp_path / "t")
    decode = judge(trace).phases[1]
    parts = time_parts(decode)
    assert parts[0].key == "compute"
    assert parts[0].time_ns == pytest.approx(2.2 * MS)
    assert sum(part.time_ns for part in parts) == pytest.approx(10 * MS)
    assert sum(part.share for part in parts) == pytest.approx(1)


def test_the_map_knows_the_bound_of_each_block_in_each_step(tmp_path):
    data = data_of(page_of(judged(tmp_path / "t"), tmp_path))
    keys = [block[0] for block in data["blocks"]]
    words = data["bounds"]["words"]
    bound = unpacked(data["bounds"]["bound"]).reshape(4, len(keys))
    share = unpacked(data["bounds"]["efficiency"]).reshape(4, len(keys))
    column = keys.index("attention")
    assert [words[code] for code in bound[:, column]] == ["memory"] * 4
    assert share[:, column] == pytest.approx([1 / 8.5, *[1 / 3.5] * 3])
    assert words[bound[1, keys.index("mlp")]] == "compute"
    assert words[bound[1, keys.index("sample")]] == "launch"  # 10 operators, and nothing else
    assert unpacked(data["verdict"]["efficiency"]) == pytest.approx([0.11, 0.22, 0.22, 0.22])


def test_each_block_agrees_with_the_verdict_of_its_stage(tmp_path):
    """Every decode step is alike here, so a step's cell must say what the stage's row says."""
    trace = judged(tmp_path / "t")
    data = data_of(page_of(trace, tmp_path))
    keys = [block[0] for block in data["blocks"]]
    bound = unpacked(data["bounds"]["bound"]).reshape(4, len(keys))
    share = unpacked(data["bounds"]["efficiency"]).reshape(4, len(keys))
    verdicts = judge(trace)
    for key in ("embed", "attention", "mlp", "lm_head", "sample"):
        part = key if key in ("attention", "mlp") else None
        expected = verdicts.stage("decode", "layer" if part else key, part).verdict
        assert data["bounds"]["words"][bound[2, keys.index(key)]] == expected.bound
        assert share[2, keys.index(key)] == pytest.approx(expected.efficiency)


def test_quality_is_marked(tmp_path):
    texts = [mark.text for mark in report_head.marks(judged(tmp_path / "t"))]
    assert texts == [
        "Tokens are identical with and without tracing.", "2 equal untraced runs differ by 2.0%.",
        "All FLOPs are counted.", "Ceilings: measured by lifetrace calibrate.",
    ]  # fmt: skip
    uncounted = [{"module": name, "span": "a", "share_of_time": 0.25} for name in ("x", "y")]
    odd = report_head.marks(small(tmp_path / "odd", uncounted=uncounted))
    assert "No formula for the work of some modules, 25.0% of the time: x, y." in [mark.text for mark in odd]
    noisy = {
        "noise": 1.5, "untraced_s": [1, 1.5], "traced_s": [1, 1.5], "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0,
        "tokens_identical": True,
    }  # fmt: skip
    found = {mark.text: mark.kind for mark in report_head.marks(small(tmp_path / "noisy", overhead=noisy))}
    assert found["2 equal untraced runs differ by 50.0%, doubt the times."] == "bad"
    assert "The work of 4 of 4 steps was not counted." in found


def test_the_highest_moment_of_memory_is_taken_apart(tmp_path):
    facts = {
        "source": "live tensor bytes", "peak_bytes": 1000, "step": 0, "stage": "layer", "layer": 1, "part": "mlp",
        "maker": None,
        "pieces": [
            {"kind": "weights", "stage": "layer", "part": None, "bytes": 500},
            {"kind": "weights", "stage": "embed", "part": None, "bytes": 250},
            {"kind": "kv", "stage": None, "part": None, "bytes": 200},
            {"kind": HOSTILE, "stage": None, "part": None, "bytes": 50},
        ],
    }  # fmt: skip
    trace = small(tmp_path / "t", memory=facts)
    pieces = report_words.memory_pieces(memory(trace))
    assert [(piece.key, piece.bytes_, piece.share) for piece in pieces] == [
        ("compute", 750, 0.75), ("copy", 200, 0.2), ("rest", 50, 0.05),
    ]  # fmt: skip
    page = page_of(trace, tmp_path)
    assert "1.00 kB of live tensors, was in step 0 of a call, at <bdi>layer 1, mlp</bdi>" in page
    assert "<img" not in page.replace(get_plotlyjs(), "")


def test_a_cold_prefill_is_shown_and_not_counted(tmp_path):
    """Two calls alike, whose first prefill took 60 ms instead of 20: the table and the sentence say 20."""
    calls = [rows_of_call(call) for call in range(2)]
    rows = {name: [row for one in calls for row in one[name]] for name in calls[0]}
    rows["steps"][0] |= {"warmup": True, "wall_ns": 60 * MS}
    trace = write_trace(tmp_path / "t", {"calls": [call_facts(c, 3, 4, 1000 * c) for c in range(2)]}, **rows)
    page = page_of(trace, tmp_path)
    assert "1 step ran cold" in page
    assert "Prefill of 3 prompt tokens took 20.0 ms" in page
    assert unpacked(data_of(page)["steps"]["counted"]).tolist() == [0, *[1] * 7]
    assert unpacked(data_of(page)["steps"]["wall_ns"])[0] == 60 * MS


def test_the_cache_is_held_against_the_config(tmp_path):
    page = page_of(judged(tmp_path / "t"), tmp_path)
    assert "2 (keys and values) × 2 layers × 5 heads × 25 numbers × 2 B = 1,000 B for each position." in page
    assert "The cache held exactly that after every step." in page


def test_operators_are_listed_where_they_were_recorded(tmp_path):
    assert "Operators of the profiled steps" not in page_of(small(tmp_path / "none"), tmp_path)
    ops = [
        {"rank": 0, "step": 1, "phase": "decode", "stage": "layer", "part": "mlp", "op": f"aten::op{i}", "count": 2,
         "host_ns": 1000 * (100 - i)}
        for i in range(40)
    ]  # fmt: skip
    trace = write_trace(tmp_path / "t", {"calls": [call_facts(0, 3, 4, 0)]}, ops=ops, **rows_of_call())
    page = page_of(trace, tmp_path)
    assert "<code><bdi>aten::op0</bdi></code></td><td><bdi>layer, mlp</bdi></td>" in page
    assert "aten::op29" in page
    assert "aten::op30" not in page
    assert "10 more lie in the trace" in page


# -- writing ---------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_names_path_and_cause(tmp_path):
    trace = small(tmp_path / "t")
    with pytest.raises(TraceError, match=r"missing/report\.html cannot be written: No such file"):
        report.write_report(trace, tmp_path / "missing" / "report.html")


def test_a_full_disk_leaves_the_earlier_report(tmp_path, monkeypatch):
    trace = small(tmp_path / "t")
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TraceError, match="No space left"):
        report.write_report(trace, path)
    assert path.read_text() == "earlier"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["report.html"]


# -- hostile text ----------------------------------------------------------------------------


def test_hostile_text_is_text(tmp_path):
    page = page_of(hostile(tmp_path / "t"), tmp_path).replace(get_plotlyjs(), "")
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "[U+202E]RTL" in page
    block = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert not set(block) & set("<>&\u2028\u2029")
    assert data_of(page)["tokens"]["texts"][0] == report_words.visible(HOSTILE)


def test_odd_traces_give_a_page(tmp_path):
    for name, trace in odd_traces(tmp_path).items():
        page = page_of(trace, tmp_path).partition("<script")[0].partition("</style>")[2]
        words = set(re.sub(r"<[^>]*>", " ", page).split())
        assert not words & {"NaN", "nan", "null", "None"}, name


# -- size ------------------------------------------------------------------------------------


def test_a_thousand_steps_of_32_layers_stay_small(tmp_path):
    trace = long_trace(tmp_path / "t", 1000, 32)
    path = report.write_report(trace, tmp_path / "report.html")
    assert path.stat().st_size < 8_000_000
    assert len(figures.timeline(trace).data) < 12  # paths in the chart, however many steps


def test_what_is_no_ordinary_file_is_left_alone(tmp_path):
    trace = read_trace(one_call(tmp_path / "trace"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="no ordinary file"):
        report.write_report(trace, tmp_path / "pipe")
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    report.write_report(trace, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "real.html").read_text()[:200]
