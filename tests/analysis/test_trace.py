"""Reading a trace folder: what is whole reads, what is not says so, and nobody needs lifetrace to read it."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_traces import one_call, write_trace

from lifetrace.analysis import read_trace, schema
from lifetrace.errors import TraceError


@pytest.fixture
def folder(tmp_path):
    return one_call(tmp_path / "t")


def test_tables_are_data_frames_whose_integers_stay_integers(folder):
    trace = read_trace(folder)
    assert str(trace.steps["step"].dtype) == "int64[pyarrow]"
    assert str(trace.spans["layer"].dtype) == "int32[pyarrow]"
    assert trace.spans["layer"].isna().any()
    assert trace.steps["flops"].isna().all()
    assert list(trace.steps.columns) == schema.STEPS.schema.names
    assert trace.kv.empty
    assert trace.meta["run_id"] == "r"


def test_any_parquet_reader_opens_it(folder):
    rows = pq.read_table(folder / "steps")
    assert rows.num_rows == 4


def test_the_manifest_itself_names_the_folder_too(folder):
    assert len(read_trace(folder / "run.json").steps) == 4


def test_a_part_that_covers_others_replaces_them(folder):
    first = folder / "steps" / "part-00000.parquet"
    rows = pq.read_table(first)
    for number in (1, 2):
        later = rows.slice(number, 1).set_column(rows.column_names.index("step"), "step", pa.array([number + 10]))
        pq.write_table(later, folder / "steps" / f"part-0000{number}.parquet")
    assert len(read_trace(folder).steps) == 6
    pq.write_table(rows.replace_schema_metadata({schema.COVERS: "3"}), first)
    assert len(read_trace(folder).steps) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "no format_version"),
        ('{"format_version": "1"}', "no format_version"),
        ('{"format_version": 99}', "format 99"),
        ("\xff", "JSON"),
        ('{"format_version": 1, "calls": "x"}', "calls is a str"),
        ('{"format_version": 1, "calls": [1]}', r"calls\[0\] is a int"),
    ],
)
def test_a_manifest_that_is_none(folder, text, words):
    (folder / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(TraceError, match=words):
        read_trace(folder)


def test_what_is_missing_or_damaged_is_named(folder, tmp_path):
    with pytest.raises(TraceError, match="no folder"):
        read_trace(tmp_path / "nowhere")
    part = folder / "steps" / "part-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"part-00000\.parquet cannot be read"):
        read_trace(folder).table("steps")
    pq.write_table(pq.read_table(folder / "spans" / "part-00000.parquet").drop_columns(["host_ns"]), part)
    with pytest.raises(TraceError, match="lacks the column"):
        read_trace(folder).table("steps")
    shutil.rmtree(folder / "steps")
    assert read_trace(folder).steps.empty


def test_the_notebook_view_shows_text_as_text(tmp_path):
    model = {"id": "<script>alert(1)</script>", "parameters": 5}
    trace = read_trace(write_trace(tmp_path / "t", {}, model=model))
    html = trace._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_the_dictionary_in_the_docs_is_the_schemas():
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "trace-format.md"
    assert page.read_text(encoding="utf-8") == schema.markdown()


def test_every_manifest_key_is_explained(folder):
    assert set(json.loads((folder / "run.json").read_text())) <= set(schema.MANIFEST_KEYS)
