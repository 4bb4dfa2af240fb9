"""Trace-event JSON: strict, nested, exact to the nanosecond, by the format's own rules."""

import json
import math
from collections import defaultdict

import pytest
from report_traces import HOSTILE, MS, call_facts, hostile, judged, rows_of_call, small, write_trace

from lifetrace.analysis.perfetto import call_lanes, events, write_perfetto
from lifetrace.errors import TraceError

# what each kind of event must and may hold, by the Trace Event Format's description
REQUIRED = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "C": {"name": str, "pid": int, "tid": int, "ts": float, "args": dict},
    "i": {"name": str, "pid": int, "tid": int, "ts": float, "s": str, "args": dict},
}


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def loaded(trace):
    path = write_perfetto(trace, trace.path / "perfetto.json")
    return json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse)


def check(document):
    """Hold a document against the format; return its events by kind."""
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    by_kind = defaultdict(list)
    for event in document["traceEvents"]:
        required = REQUIRED[event["ph"]]
        assert set(event) - {"ph"} <= set(required) | {"ts"}
        for key, type_ in required.items():
            assert isinstance(event[key], (int, float) if type_ is float else type_), (key, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        by_kind[event["ph"]].append(event)
    for event in by_kind["C"]:
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in event["args"].values())
    assert_nested(by_kind["X"])
    named = {(event["pid"], event["tid"]) for event in by_kind["M"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in by_kind["X"] + by_kind["i"]} <= named
    return by_kind


def assert_nested(slices):
    """Two slices of a track lie apart, or one within the other."""
    tracks = defaultdict(list)
    for event in slices:
        start = round(event["ts"] * 1000)
        tracks[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for found in tracks.values():
        assert found == sorted(found, key=lambda times: times[0])
        open_ = []
        for start, end in found:
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1]
            open_.append(end)


def test_a_small_trace_by_arithmetic(tmp_path):
    kinds = check(loaded(judged(tmp_path / "t")))
    steps = [event for event in kinds["X"] if event["tid"] == 1]
    assert [(event["name"], event["ts"], event["dur"]) for event in steps] == [
        ("prefill 0", 0, 20_000), ("decode 1", 20_000, 10_000), ("decode 2", 30_000, 10_000),
        ("decode 3", 40_000, 10_000),
    ]  # fmt: skip
    stages = [event for event in kinds["X"] if event["tid"] == 2 and event["args"]["step"] == 0]
    names = ["embed", "layer 0", "attention", "mlp", "layer 1", "attention", "mlp", "lm_head", "sample"]
    assert [event["name"] for event in stages] == names
    assert stages[2]["args"]["flops"] == 100_000_000
    cache = [event for event in kinds["C"] if event["name"] == "KV cache, bytes"]
    assert [(event["ts"], event["args"]) for event in cache][:2] == [
        (20_000, {"filled": 3000, "allocated": 6000}), (30_000, {"filled": 4000, "allocated": 8000}),
    ]  # fmt: skip
    assert {event["name"] for event in kinds["C"]} == {"KV cache, bytes", "resident memory, bytes"}
    assert [(event["name"], event["ts"]) for event in kinds["i"]] == [
        (" w3", 20_000), (" w4", 30_000), (" w5", 40_000), (" w6", 50_000),
    ]  # fmt: skip


def test_times_count_from_the_first_event_and_are_exact(tmp_path):
    rows = rows_of_call()
    for row in rows["steps"] + rows["spans"]:
        row["start_ns"] += 3_600_000_000_123_456_789
    for row in rows["tokens"]:
        row["arrival_ns"] = None
    kinds = check(loaded(write_trace(tmp_path / "t", {"calls": [call_facts(0, 3, 4, 0)]}, **rows)))
    assert kinds["X"][0]["ts"] == 0
    assert max(event["ts"] for event in kinds["X"]) < 50_000
    assert kinds["i"] == []


def test_hostile_text_stays_text(tmp_path):
    trace = hostile(tmp_path / "t")
    trace.meta["model"]["id"] = "\ud83d half"
    document = loaded(trace)
    kinds = check(document)
    assert kinds["i"][0]["name"] == "\ufffd\ufffd"
    assert HOSTILE in {event["args"].get("module") for event in kinds["X"]}
    assert document["otherData"]["model"] == "? half"


def test_calls_at_once_have_tracks_of_their_own(tmp_path):
    rows = {name: [] for name in ("steps", "spans", "tokens")}
    for call, shift_ms in ((0, 0), (1, 7), (2, 60)):
        for name, more in rows_of_call(call).items():
            for row in more:
                for key in ("start_ns", "arrival_ns"):
                    if row.get(key) is not None:
                        row[key] += (shift_ms - 1000 * call) * MS
                rows[name].append(row)
    trace = write_trace(tmp_path / "t", {}, **rows)
    assert call_lanes(trace.table("steps")) == {(0, 0): 0, (0, 1): 1, (0, 2): 0}
    kinds = check(loaded(trace))
    assert {event["tid"] for event in kinds["X"]} == {1, 2, 11, 12}


def test_a_forward_inside_a_step_lies_within_it(tmp_path):
    rows = rows_of_call(new=1)
    inner = rows["steps"][0] | {"step": 7, "parent_step": 0, "start_ns": 2 * MS, "wall_ns": 5 * MS, "role": "assistant"}
    rows["steps"].append(inner)
    steps = [event for event in check(loaded(write_trace(tmp_path / "t", {}, **rows)))["X"] if event["tid"] == 1]
    assert [(event["name"], event["ts"]) for event in steps] == [("prefill 0", 0), ("prefill 7", 2000)]


def test_a_span_that_overruns_the_one_around_it_is_cut(tmp_path):
    rows = rows_of_call(new=1)
    inner = next(row for row in rows["spans"] if row["part"] == "mlp")
    inner["host_ns"] += 3 * MS
    kinds = check(loaded(write_trace(tmp_path / "t", {}, **rows)))
    cut = next(event for event in kinds["X"] if event["name"] == "mlp")
    assert (cut["dur"], cut["args"]["host_ns"]) == (4250, 7.25 * MS)


def test_the_device_has_its_own_track(tmp_path):
    """The device is busy 4 ms with each stage that the host launches in 1: its work queues up behind itself."""
    rows = rows_of_call(new=1)
    for row in rows["spans"]:
        if row["parent"] is None:
            row["device_ns"] = 10 * MS
    kinds = check(loaded(write_trace(tmp_path / "t", {}, **rows)))
    device = [event for event in kinds["X"] if event["tid"] == 3]
    assert [event["name"] for event in device] == ["embed", "layer 0", "layer 1", "lm_head", "sample"]
    assert [event["ts"] for event in device] == [0, 10_000, 20_000, 30_000, 40_000]
    assert {event["args"]["start"] for event in device} == {"placed"}


def test_a_trace_without_rows_is_a_document_still(tmp_path):
    kinds = check(loaded(write_trace(tmp_path / "t", {})))
    assert set(kinds) == {"M", "X", "C", "i"}
    assert kinds["X"] == []


def test_events_come_one_by_one(tmp_path):
    stream = events(small(tmp_path / "t"))
    assert iter(stream) is stream
    assert next(stream)["args"] == {"name": "rank 0: m"}


def test_what_cannot_be_written_names_path_and_cause(tmp_path):
    with pytest.raises(TraceError, match=r"missing/x\.json cannot be written: No such file"):
        write_perfetto(small(tmp_path / "t"), tmp_path / "missing" / "x.json")
