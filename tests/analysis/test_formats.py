"""Markdown and CSV of a summary: numbers by arithmetic, nothing that becomes markup."""

import csv
import io

from report_traces import HOSTILE, judged
from stored_traces import one_call, write_trace

from lifetrace.analysis import read_trace
from lifetrace.analysis.formats import CSV_COLUMNS, csv_text, markdown
from lifetrace.analysis.summary import summarize


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_a_row_a_stage_with_its_verdict(tmp_path):
    rows = rows_of(csv_text(summarize(judged(tmp_path / "t"))))
    assert tuple(rows[0]) == CSV_COLUMNS
    found = {(row["phase"], row["stage"], row["part"]): row for row in rows}
    mlp = found["decode", "layer", "mlp"]
    # three steps of two: 3.5 ms each, whose compute takes 2 ms
    assert (float(mlp["time_ns"]), float(mlp["roof_ns"]), float(mlp["lost_ns"])) == (10.5e6, 6e6, 4.5e6)
    assert (mlp["bound"], float(mlp["flops"]), mlp["count"]) == ("compute", 6e9, "6")


def test_csv_leaves_what_is_missing_empty(tmp_path):
    rows = rows_of(csv_text(summarize(read_trace(one_call(tmp_path / "t")))))
    assert {row["roof_ns"] for row in rows} == {""}
    assert {row["bound"] for row in rows} == {"unknown"}
    assert "None" not in csv_text(summarize(read_trace(tmp_path / "t")))


def test_markdown_leads_with_the_verdict(tmp_path):
    text = markdown(summarize(judged(tmp_path / "t")))
    lines = text.splitlines()
    assert lines[0] == "# m"
    assert lines[2].startswith("- **prefill**: Prefill is compute-bound")
    assert "| decode | layer, mlp | 10.5 ms | 35.0% | compute 57% |" in lines
    assert "None" not in text


def test_markdown_holds_no_markup_of_the_trace(tmp_path):
    path = write_trace(tmp_path / "t", {}, model={"id": f"[x](y) | {HOSTILE}"}, notes=["*bold*\n# head"])
    text = markdown(summarize(read_trace(path)))
    assert "<img" not in text
    assert "\x1b" not in text
    assert text.startswith("# \\[x\\](y) \\| &lt;/script&gt;")
    assert "> \\*bold\\* \\# head" in text
