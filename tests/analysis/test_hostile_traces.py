"""Traces from strangers: every command ends in a result or in a sentence, and reads nothing outside of the folder."""

import json
import os
import shutil
from pathlib import Path

import hostile
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reader import reader
from stored_traces import one_call, write_trace

from lifetrace.analysis import read_trace, schema, upgrade
from lifetrace.analysis.parquet_size import BadParquet, decoded_bytes
from lifetrace.analysis.upgrade import Upgrade
from lifetrace.cli import main
from lifetrace.errors import TraceError


@pytest.fixture
def folder(tmp_path):
    return one_call(tmp_path / "t")


def test_damaged_traces_end_in_a_result_or_in_a_sentence(tmp_path_factory):
    base = tmp_path_factory.mktemp("hostile")
    traces = hostile.whole_traces(base)
    with reader() as child:

        @settings(
            max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.data())
        def each(data):
            how = hostile.damaged(data.draw, data.draw(st.sampled_from(traces)), base / "damaged")
            command = data.draw(st.sampled_from(hostile.COMMANDS[:-1]))  # plan loads torch: in the long form
            fault = child.fault_of(command, base / "damaged", base)
            assert fault is None, (command, how, fault)

        each()
        assert child.largest_rss_bytes < 10**9


@pytest.mark.parametrize("what", ["run.json", "steps", "steps/part-00000.parquet", "modules.parquet"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_files_of_the_folder_itself_are_read(folder, tmp_path, what, kind):
    shutil.copytree(folder, tmp_path / "elsewhere")
    path = folder / what
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere" / what)
    elif what != "steps":
        os.mkfifo(path)
    else:
        return
    with pytest.raises(TraceError, match=r"is a link|holds no run\.json"):
        [read_trace(folder).table(name) for name in schema.TABLES]


@pytest.mark.parametrize("command", [["report"], ["export"]])
def test_a_link_in_the_trace_leads_no_writer_out_of_it(folder, tmp_path, command):
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    for name in ("report.html", "perfetto.json"):
        (folder / name).symlink_to(precious)
    ended = CliRunner().invoke(main, [*command, str(folder)])
    assert ended.exit_code == 2
    assert "is a link, which is not followed" in ended.stderr
    assert precious.read_text() == "years of work"


def bomb(path, **columns):
    """A small file that says the same a million times."""
    rows = pa.table(columns)
    pq.write_table(rows, path, compression="zstd", use_dictionary=True)
    return path


def test_the_size_of_a_file_is_known_before_it_is_read(tmp_path):
    million = pa.array([0] * 10**6).cast(pa.int32())
    plain = bomb(tmp_path / "plain", a=pa.array([7]).take(million))
    words = bomb(tmp_path / "words", a=pa.array(["x" * 1000]).take(million.slice(0, 1000)))
    lists = bomb(tmp_path / "lists", a=pa.array([[7] * 10**6]))
    for path in (plain, lists):
        assert path.stat().st_size < 10_000
        assert 8 * 10**6 <= decoded_bytes(path) < 10**7
    assert decoded_bytes(words) < 20_000  # a word is held once; texts are added up when they are read
    for data in (b"", b"PAR1", b"PAR1" + b"\xff" * 4 + b"PAR1", plain.read_bytes()[:-9]):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(BadParquet):
            decoded_bytes(tmp_path / "bad")


@pytest.mark.parametrize("kind", ["rows", "words", "list"])
def test_a_bomb_is_refused_unread(folder, kind):
    file = folder / "tokens" / "part-00000.parquet"
    rows = pq.ParquetFile(file).read().slice(0, 1)
    if kind == "rows":
        rows = rows.take(pa.array([0] * 3_000_000))
    elif kind == "words":
        text = pa.array(["x" * 500_000], pa.string())
        rows = rows.set_column(rows.column_names.index("text"), "text", text).take(pa.array([0] * 2000))
    else:
        numbers = pa.array([[1] * 20_000_000], pa.list_(pa.int32()))
        rows = rows.set_column(rows.column_names.index("top_ids"), "top_ids", numbers)
    pq.write_table(rows, file, compression="zstd")
    assert file.stat().st_size < 200_000
    with pytest.raises(TraceError, match=r"would take more than .* MiB of memory"):
        read_trace(folder).table("tokens")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format_version": 1, "x": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64 deep"),
        ('{"format_version": 1, "x": ' + "[" * 10**6 + "]" * 10**6 + "}", "JSON"),
        ('{"format_version": 1, "x": [' + "1," * 2_000_001 + "1]}", "more than 2,000,000 values"),
        ('{"format_version": 1, "x": 1e999}', "too large for any measurement"),
        ('{"format_version": 1, "x": NaN}', "NaN is no number of JSON"),
        ('{"format_version": 1, "x": 18446744073709551616}', "more than 64 bits"),
        ('{"format_version": true}', "no format_version"),
        ('{"format_version": 1, "model": {"layers": "6"}}', "model.layers is a str, not a int"),
        ('{"format_version": 1, "calls": [{"new_tokens": [1, "2"]}]}', r"calls\[0\].new_tokens\[1\] is a str"),
        ('{"format_version": 1, "notes": [null]}', r"notes\[0\] is empty"),
        ('{"format_version": 0}', "written in format 0, which this lifetrace does not read"),
    ],
    ids=range(11),
)
def test_a_manifest_that_no_run_writes(folder, text, words):
    (folder / "run.json").write_text(text)
    with pytest.raises(TraceError, match=words):
        read_trace(folder)


def places(value, path=()):
    """Where a manifest holds a value: of lists the first stands for all."""
    keys = value if isinstance(value, dict) else range(min(len(value), 1)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def test_any_fact_of_a_manifest_may_be_missing(tmp_path):
    shutil.copytree(hostile.SAMPLE, tmp_path / "t")
    file = tmp_path / "t" / "run.json"
    whole = file.read_text()
    left_out = {"ceilings", "versions", "config"}
    found = [path for path in places(json.loads(whole)) if not left_out & set(path)]
    assert len(found) > 80
    for path in found:
        meta = json.loads(whole)
        place = meta
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = None
        file.write_text(json.dumps(meta))
        assert hostile.fault_of("json", tmp_path / "t", tmp_path) is None, path


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [("wall_ns", None, "has an empty row"), ("q_len", -5, "which no run has"), ("phase", "warp", "a phase is none of")],
)
def test_values_that_no_run_has(folder, column, value, words):
    file = folder / "steps" / "part-00000.parquet"
    rows = pq.ParquetFile(file).read().to_pylist()
    rows[1][column] = value
    write_trace(folder, {"steps": rows})
    with pytest.raises(TraceError, match=words):
        read_trace(folder).table("steps")


def test_a_shape_of_more_dimensions_than_any_tensor_is_refused(folder):
    rows = pq.ParquetFile(folder / "spans" / "part-00000.parquet").read().to_pylist()
    rows[1]["input_shape"] = [1] * 65
    write_trace(folder, {"spans": rows})
    with pytest.raises(TraceError, match="input_shape has more dimensions than any tensor"):
        read_trace(folder).table("spans")


def test_an_empty_part_is_refused_in_a_sentence(folder):
    (folder / "spans" / "part-00000.parquet").write_bytes(b"")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(folder).scan("spans", ["step"], len)


def test_products_of_no_step_explain_nothing(tmp_path):
    shutil.copytree(hostile.SAMPLE, tmp_path / "t")
    rows = pq.ParquetFile(tmp_path / "t" / "products.parquet").read()
    none = pa.array([[]] * len(rows), rows.schema.field("steps").type)
    pq.write_table(
        rows.set_column(rows.column_names.index("steps"), "steps", none), tmp_path / "t" / "products.parquet"
    )
    assert hostile.fault_of("explain", tmp_path / "t", tmp_path) is None


def test_rows_that_cannot_be_told_apart_are_refused(folder):
    """Joined with each other they would be as many as their number squared."""
    rows = pq.ParquetFile(folder / "spans" / "part-00000.parquet").read()
    pq.write_table(rows, folder / "spans" / "part-00001.parquet")
    with pytest.raises(TraceError, match="two of its rows have the same span"):
        read_trace(folder).table("spans")


def test_an_older_trace_is_upgraded_step_by_step(folder, monkeypatch):
    """A format 0 that never was: its manifest named the state, and its steps had microseconds."""
    file = folder / "steps" / "part-00000.parquet"
    now = read_trace(folder).table("steps")
    old = pq.ParquetFile(file).read()
    index = old.column_names.index("wall_ns")
    old = old.set_column(index, "wall_us", pa.array([n // 1000 for n in old["wall_ns"].to_pylist()]))
    pq.write_table(old, file)
    meta = json.loads((folder / "run.json").read_text())
    meta |= {"format_version": 0, "state": meta.pop("status")}
    (folder / "run.json").write_text(json.dumps(meta))

    def table(name, rows):
        if name != "steps":
            return rows
        number = rows.column_names.index("wall_us")
        return rows.set_column(number, "wall_ns", pa.array([us * 1000 for us in rows["wall_us"].to_pylist()]))

    step = Upgrade(lambda meta: {k: v for k, v in meta.items() if k != "state"} | {"status": meta["state"]}, table)
    with pytest.raises(TraceError, match="format 0"):
        read_trace(folder)
    monkeypatch.setitem(upgrade.UPGRADES, 0, step)
    trace = read_trace(folder)
    assert (trace.meta["status"], trace.meta["format_version"], trace.meta["written_version"]) == ("complete", 1, 0)
    assert trace.table("steps").equals(now)
    assert len(trace.table("tokens")) == 7


def test_what_a_killed_run_lacks_is_said(folder):
    meta = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(meta | {"status": "running"}))
    steps = folder / "steps" / "part-00000.parquet"
    steps.rename(steps.with_name("part-00003.parquet"))
    gaps = read_trace(folder).gaps
    assert len(gaps) == 2
    assert "did not come to its end" in gaps[0]
    assert gaps[1] == "3 part files of the steps table are missing"
    shown = CliRunner().invoke(main, ["show", str(folder)])
    assert "did not come to its end" in " ".join(shown.stdout.split())


def test_a_bug_in_reading_is_a_sentence_and_can_be_shown(folder, monkeypatch):
    def broken(trace):
        raise KeyError("\x1b[2J")

    monkeypatch.setattr("lifetrace.analysis.summary.summarize", broken)
    ended = CliRunner().invoke(main, ["show", str(folder)])
    assert ended.exit_code == 2
    assert "show could not make sense of this trace (KeyError: '\\x1b[2J')" in ended.stderr
    monkeypatch.setenv("LIFETRACE_TRACEBACK", "1")
    assert isinstance(CliRunner().invoke(main, ["show", str(folder)]).exception, KeyError)


def test_reading_needs_no_pickle():
    """Neither the manifest nor a table is read by anything that could run code."""
    analysis = Path(__file__).parents[2] / "analysis"
    for source in analysis.glob("*.py"):
        text = source.read_text(encoding="utf-8")
        assert not any(word in text for word in ("pickle", "eval(", "exec(", "yaml", "marshal")), source
