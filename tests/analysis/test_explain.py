"""The walk through a layer of model R: hidden 64, MLP 128, 4 heads of 16 on 2 KV heads, float32."""

import json

import pytest
from click.testing import CliRunner
from fake_device import fake_ceilings

import lifetrace
from lifetrace.analysis.explain import explain_layer
from lifetrace.cli import main
from lifetrace.errors import UsageError


@pytest.fixture
def folder(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "r", detail="module"):
        model_r.generate(prompt_12, max_new_tokens=8, do_sample=False)
    return tmp_path / "r"


def products(walk):
    return [
        (m.role or m.module.rpartition(".")[2], m.batch, m.m, m.k, m.n) for piece in walk.pieces for m in piece.matmuls
    ]


def test_prefill_products_in_the_order_in_which_they_run(folder):
    walk = explain_layer(lifetrace.read_trace(folder), 0, 2)
    assert products(walk) == [
        ("q_proj", 1, 12, 64, 64),
        ("k_proj", 1, 12, 64, 32),
        ("v_proj", 1, 12, 64, 32),
        ("scores", 4, 12, 16, 12),
        ("weighted sum", 4, 12, 12, 16),
        ("o_proj", 1, 12, 64, 64),
        ("gate_proj", 1, 12, 64, 128),
        ("up_proj", 1, 12, 64, 128),
        ("down_proj", 1, 12, 128, 64),
    ]
    assert [piece.part for piece in walk.pieces if piece.depth == 1] == ["norm", "attention", "norm", "mlp"]


def test_a_decode_step_between_counted_ones_lies_on_their_line(folder):
    """Steps 1 to 7 hold 12 … 18 positions; the ends and the middle were counted, step 2 was not."""
    trace = lifetrace.read_trace(folder)
    assert not any(2 in steps for steps in trace.products.steps)
    walk = explain_layer(trace, 2, 0)
    assert walk.kv_len_before == 13
    assert ("scores", 4, 1, 16, 14) in products(walk)
    assert ("weighted sum", 4, 1, 14, 16) in products(walk)
    total = sum(m.flops for piece in walk.pieces for m in piece.matmuls)
    assert total == walk.pieces[0].flops == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 2 * 2 * 4 * 16 * 14


def test_times_and_bounds_follow_the_ceilings_of_the_trace(folder):
    """1,000 FLOP and 100 B a ns, and 1 µs to launch one operator."""
    walk = explain_layer(lifetrace.read_trace(folder), 0, 0)
    gate = next(piece for piece in walk.pieces if (piece.module or "").endswith("gate_proj"))
    flops, bytes_ = 2 * 12 * 64 * 128, 4 * (12 * 64 + 12 * 128 + 64 * 128)
    assert (gate.flops, gate.bytes_, gate.op_count) == (flops, bytes_, 1)
    assert gate.verdict.compute_ns == pytest.approx(flops / 1000)
    assert gate.verdict.memory_ns == pytest.approx(bytes_ / 100)
    assert gate.verdict.launch_ns == 1000
    assert gate.verdict.bound == "launch"
    (alone,) = gate.matmuls
    assert alone.verdict.bound == "memory"
    assert alone.verdict.efficiency == pytest.approx(bytes_ / 100 / gate.time_ns)


def test_what_is_written_and_what_stays(folder):
    walk = explain_layer(lifetrace.read_trace(folder), 0, 0)
    assert walk.scores.shape == (4, 12, 12)
    assert walk.scores.bytes_ == 4 * 12 * 12 * 4
    assert walk.scores.written is False  # sdpa
    results = 12 * (64 + 32 + 32 + 64 + 64 + 128 + 128 + 64) * 4  # q, k, v, weighted sum, o; gate, up, down
    assert walk.transient_bytes == results
    assert (walk.kv.kind, walk.kv.length, walk.kv.logical_bytes) == ("full", 12, 12 * 2 * 32 * 4)
    assert (walk.kv.read_bytes, walk.kv.write_bytes) == (0, 12 * 2 * 32 * 4)


def test_the_core_of_attention_is_bounded_by_its_queries_its_result_and_the_cache(folder):
    walk = explain_layer(lifetrace.read_trace(folder), 3, 0)
    core = next(piece for piece in walk.pieces if piece.part == "attention_core")
    held, written = 14 * 2 * 32 * 4, 2 * 32 * 4
    assert core.bytes_ == 64 * 4 + 64 * 4 + held + written


def test_other_detail_levels_hold_the_products_in_the_rows_that_they_have(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "r", detail="layer"):
        model_r.generate(prompt_12, max_new_tokens=2)
    walk = explain_layer(lifetrace.read_trace(tmp_path / "r"), 1, 3)
    (piece,) = walk.pieces
    assert len(piece.matmuls) == 9


def test_what_is_not_there_is_said_with_what_is(folder, model_r, prompt_12, tmp_path):
    trace = lifetrace.read_trace(folder)
    with pytest.raises(UsageError, match="no step 99; it has steps 0 to 7"):
        explain_layer(trace, 99, 0)
    with pytest.raises(UsageError, match="no layer 4; it has layers 0 to 3"):
        explain_layer(trace, 0, 4)
    with lifetrace.trace(model_r, out=tmp_path / "thin", every=3):
        model_r.generate(prompt_12, max_new_tokens=5)
    with pytest.raises(UsageError, match="step 1 were not recorded; recorded are 0, 3"):
        explain_layer(lifetrace.read_trace(tmp_path / "thin"), 1, 0)


@pytest.mark.parametrize("width", ["70", "120"])
def test_the_command_prints_the_walk(folder, width):
    shown = CliRunner().invoke(main, ["explain", str(folder), "--step", "1", "--layer", "1"], env={"COLUMNS": width})
    assert shown.exit_code == 0, shown.output
    assert "layer 1 in step 1 (decode): 1 position after 12 cached" in shown.output
    assert "weighted sum" in shown.output
    assert "never written by sdpa attention" in " ".join(shown.output.split())


def test_json_holds_each_bound(folder):
    shown = CliRunner().invoke(main, ["explain", str(folder), "--json"])
    document = json.loads(shown.stdout)
    assert {piece["bound"] for piece in document["pieces"]} <= {"compute", "memory", "launch", "unknown"}
    assert document["pieces"][0]["bytes"] > 0
    assert document["ceilings_source"] == fake_ceilings().source


def test_a_trace_without_ceilings_is_walked_without_verdicts(folder):
    manifest = folder / "run.json"
    meta = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(meta | {"ceilings": None, "device": {"type": "npu", "name": "x"}}))
    walk = explain_layer(lifetrace.read_trace(folder), 0, 0)
    assert {piece.verdict.bound for piece in walk.pieces} == {"unknown"}
    assert walk.ceilings_source is None
