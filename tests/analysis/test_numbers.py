"""Latency and breakdown of a trace whose times are round numbers."""

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from stored_traces import MS, one_call, write_trace

from lifetrace.analysis import breakdown, latency, read_trace
from lifetrace.analysis.latency import percentile


def test_latency(tmp_path):
    times = latency(read_trace(one_call(tmp_path / "t")))
    assert times.ttft_ns == 10 * MS
    assert times.tpot_ns == (25 - 10) / 3 * MS
    assert times.itl_p50_ns == 5 * MS  # gaps of 4, 5 and 6 ms
    assert times.itl_p90_ns == pytest.approx(5.8 * MS)
    assert times.prefill_tokens_per_s == pytest.approx(3 / 0.010)
    assert times.decode_tokens_per_s == pytest.approx(3 / 0.015)
    assert (times.prompt_tokens, times.new_tokens, times.sequences) == (3, 4, 1)


def split_call(tmp_path, requests):
    """Calls whose prefill prepares 1 ms, runs 6 and samples 2; each request starts so many ms before it."""
    steps, spans, calls, at = [], [], [], 0
    for number, (before, tokenize) in enumerate(requests):
        start = at + before
        steps.append(
            {"call": number, "step": number, "phase": "prefill", "warmup": False, "start_ns": start * MS,
             "wall_ns": 9 * MS, "prepare_ns": MS, "forward_ns": 6 * MS, "sample_ns": 2 * MS}
        )  # fmt: skip
        spans.append({"span": number, "stage": "tokenize", "start_ns": at * MS, "host_ns": tokenize * MS})
        calls.append(
            {"call": number, "parent_step": None, "request_start_ns": at * MS, "first_token_ns": (start + 9) * MS,
             "last_token_ns": (start + 9) * MS, "new_tokens": [1], "prompt_tokens": [2], "sequences": 1}
        )  # fmt: skip
        at = start + 9
    return latency(read_trace(write_trace(tmp_path / "t", {"steps": steps, "spans": spans}, calls=calls)))


def test_the_time_to_the_first_token_is_split_without_a_rest(tmp_path):
    times = split_call(tmp_path, [(5, 2), (4, 3), (9, 1)])  # TTFT 14, 13 and 18 ms
    split = times.first_token
    assert times.ttft_ns == 14 * MS
    assert (split.tokenize_ns, split.prepare_ns, split.prefill_ns, split.sample_ns) == (2 * MS, MS, 6 * MS, 2 * MS)
    assert split.other_ns == 3 * MS
    assert sum(vars(split).values()) == times.ttft_ns


def test_of_two_calls_the_time_to_the_first_token_is_that_of_one(tmp_path):
    times = split_call(tmp_path, [(5, 2), (9, 1)])  # TTFT 14 and 18 ms
    assert times.ttft_ns == 14 * MS
    assert sum(vars(times.first_token).values()) == times.ttft_ns


def test_a_single_token_has_no_time_per_output_token(tmp_path):
    call = {
        "call": 0, "parent_step": None, "request_start_ns": 0, "first_token_ns": 7 * MS, "last_token_ns": 7 * MS,
        "new_tokens": [1], "prompt_tokens": [2], "sequences": 1,
    }  # fmt: skip
    times = latency(read_trace(write_trace(tmp_path / "t", {}, calls=[call])))
    assert times.ttft_ns == 7 * MS
    assert times.tpot_ns is None
    assert times.decode_tokens_per_s is None
    assert times.itl_p50_ns is None


def test_percentiles_interpolate_between_neighbours():
    assert percentile([], 0.5) is None
    assert percentile([3], 0.99) == 3
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([0, 10], 0.95) == 9.5


def test_breakdown_adds_up_to_the_steps(tmp_path):
    rows = {(row.phase, row.stage, row.part): row for row in breakdown(read_trace(one_call(tmp_path / "t")))}
    assert rows["prefill", "layer", None].time_ns == 6 * MS
    assert rows["prefill", "layer", None].share == pytest.approx(0.6)
    assert rows["prefill", "layer", "attention"].time_ns == 2 * MS
    assert rows["prefill", "layer", "own"].time_ns == 2 * MS
    assert rows["decode", "layer", None].time_ns == 6 * MS
    assert rows["decode", "sample", None].time_ns == (2 + 3 + 4) * MS
    for phase, total in (("prefill", 10), ("decode", 15)):
        assert sum(r.time_ns for k, r in rows.items() if k[0] == phase and k[2] is None) == total * MS
    order = [row.stage for row in breakdown(read_trace(tmp_path / "t")) if row.phase == "prefill" and not row.part]
    assert order == ["prepare", "embed", "layer", "sample"]


def test_recorded_steps_stand_for_those_whose_spans_were_left_out(tmp_path):
    folder = one_call(tmp_path / "t")
    part = folder / "spans" / "part-00000.parquet"
    spans = pq.read_table(part)
    pq.write_table(spans.filter(pc.field("step") != 3), part)  # the step of 6 ms is left out
    rows = {(row.phase, row.stage, row.part): row for row in breakdown(read_trace(folder))}
    decode = sum(row.time_ns for key, row in rows.items() if key[0] == "decode" and key[2] is None)
    assert decode == pytest.approx((4 + 5) / 2 * 3 * MS)
    assert rows["prefill", "layer", None].time_ns == 6 * MS


def test_a_trace_without_rows_has_a_summary(tmp_path):
    from lifetrace.analysis.summary import summarize

    summary = summarize(read_trace(write_trace(tmp_path / "t", {}, status="running")))
    assert summary.status == "running"
    assert summary.stages == []
    assert summary.latency.ttft_ns is None
    assert summary.kv_bytes is None
    assert summary.flops_prefill is None


def test_a_cold_prefill_is_left_out_of_the_mean_and_not_out_of_the_count(tmp_path):
    """Two calls of one prefill, 90 ms cold and 20 ms warm: a call's prefill takes 20."""
    steps = [
        {"call": call, "step": call, "phase": "prefill", "warmup": call == 0, "discarded": False, "wall_ns": wall * MS}
        for call, wall in enumerate([90, 20])
    ]
    spans = [
        {"step": i, "phase": "prefill", "span": i, "stage": "layer", "layer": 0, "start_ns": 0, "host_ns": wall * MS}
        for i, wall in enumerate([90, 20])
    ]
    (row,) = breakdown(read_trace(write_trace(tmp_path / "t", {"steps": steps, "spans": spans})))
    assert (row.time_ns, row.share) == (20 * MS, 1.0)
