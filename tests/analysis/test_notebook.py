"""What a notebook shows: verdict first, numbers by arithmetic, nothing of a trace as markup."""

import re

from report_traces import hostile, judged
from stored_traces import one_call, write_trace

from lifetrace.analysis import read_trace


def test_verdict_facts_and_stages(tmp_path):
    html = judged(tmp_path / "t")._repr_html_()
    assert html.index("Decode is compute-bound") < html.index("TTFT") < html.index("time of a call")
    row = re.search(r"<tr><td[^>]*>decode</td><td[^>]*>layer, mlp</td>(.*?)</tr>", html)[1]
    assert re.sub(r"<[^>]*>", " ", row).split() == ["10.5", "ms", "35.0%", "compute", "57%"]
    assert "width:4.20em" in row  # 0.35 of 12 em


def test_a_trace_without_verdict_or_spans(tmp_path):
    assert "unknown" in read_trace(one_call(tmp_path / "a"))._repr_html_()
    assert read_trace(write_trace(tmp_path / "b", {}))._repr_html_().count("<table") == 1


def test_text_of_a_trace_is_text(tmp_path):
    html = hostile(tmp_path / "t")._repr_html_()
    assert "<img" not in html
    assert "<script" not in html
    assert "\u202e" not in html
