"""Part files: whole or not there; many small ones become one; a killed run keeps what was finished."""

import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from lifetrace.analysis import read_trace, schema
from lifetrace.errors import TraceError
from lifetrace.steps import table_of
from lifetrace.writer import MAX_ROWS_PER_PART, TraceWriter, _batches, prepare_folder

ENDLESS = """
import sys, torch
sys.path.insert(0, {support!r})
from reference_model import R_SIZES
from transformers import LlamaConfig, LlamaForCausalLM
import lifetrace
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(**R_SIZES | {{"max_position_embeddings": 100000}})).eval()
with lifetrace.trace(model, out={out!r}):
    model.generate(torch.arange(3, 15)[None], max_new_tokens=90000)
"""


def rows_of(*steps):
    row = {"run_id": "r", "rank": 0, "call": 0, "phase": "decode", "wall_ns": 1}
    return table_of(schema.STEPS, [row | {"step": step} for step in steps])


def test_small_parts_become_one_and_are_filled(tmp_path):
    writer = TraceWriter(tmp_path)
    for step in range(5):
        writer.part("steps", rows_of(step))
    writer.part("steps", rows_of())
    writer.manifest({"format_version": 1})
    assert len(list((tmp_path / "steps").iterdir())) == 5
    writer.complete("steps", lambda rows: rows)
    files = list((tmp_path / "steps").iterdir())
    assert [file.name for file in files] == ["part-00000.parquet"]
    assert pq.read_schema(files[0]).metadata[schema.COVERS] == b"5"
    assert read_trace(tmp_path).steps.step.tolist() == [0, 1, 2, 3, 4]


def test_every_reader_knows_the_encodings(tmp_path):
    """Those of the format's second version; splitting whole numbers by byte is younger, and DuckDB 1 refuses it."""
    writer, used = TraceWriter(tmp_path), set()
    for table in (schema.STEPS, schema.SPANS, schema.KV, schema.TOKENS):
        writer.table(table.name, table.schema.empty_table())
        writer.part(table.name, table_of(table, [{}] * 3))
    for file in tmp_path.rglob("*.parquet"):
        groups = pq.ParquetFile(file).metadata
        for group in (groups.row_group(number) for number in range(groups.num_row_groups)):
            used |= {encoding for column in range(groups.num_columns) for encoding in group.column(column).encodings}
    assert used <= {"PLAIN", "RLE", "RLE_DICTIONARY", "DELTA_BINARY_PACKED"}


def test_batches_stay_below_the_limit():
    assert list(_batches([])) == []
    assert list(_batches([5])) == [(0, 1)]
    half = MAX_ROWS_PER_PART // 2
    assert list(_batches([half, half, 1, half])) == [(0, 2), (2, 4)]
    assert list(_batches([MAX_ROWS_PER_PART * 2, 1])) == [(0, 1), (1, 2)]


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def broken(rows, name, **settings):
        with open(name, "wb") as file:
            file.write(b"half a fi")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lifetrace.writer.pq.write_table", broken)
    from lifetrace.errors import RunError

    with pytest.raises(RunError, match="the disk is full"):
        TraceWriter(tmp_path).part("steps", rows_of(1))
    assert list((tmp_path / "steps").iterdir()) == []


def test_preparing_a_folder(tmp_path):
    prepare_folder(tmp_path / "deep" / "new", force=False)
    assert (tmp_path / "deep" / "new").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="is a file"):
        prepare_folder(tmp_path / "file", force=True)


def test_a_killed_run_keeps_its_finished_parts(tmp_path):
    out = tmp_path / "t"
    support = os.path.join(os.path.dirname(__file__), "..", "support")
    process = subprocess.Popen([sys.executable, "-c", ENDLESS.format(support=support, out=str(out))])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(out.glob("steps/part-*.parquet"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    trace = read_trace(out)
    assert trace.meta["status"] == "running"
    assert len(trace.steps) >= 64
    assert trace.steps.step.tolist() == list(range(len(trace.steps)))
    assert trace.steps.flops.isna().all()
    assert set(trace.spans.step.dropna()) <= set(trace.steps.step)
