"""The walk through a layer of model R: hidden 64, MLP 128, 4 heads of 16 on 2 KV heads, float32."""

import json

import pytest
import torch
from click.testing import CliRunner
from fake_device import fake_ceilings
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

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
    assert "weighted" in shown.output  # where times are long, its second word stands in the next line
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


def tiny(kind, **options):
    """A model of hidden 64 with 2 layers and 4 heads of 16 on 2 KV heads, of any class that has these names."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**sizes, **heads, **options)
    return AutoModelForCausalLM.from_config(config).eval()


def walked(model, prompt, path, step, **options):
    with lifetrace.trace(model, out=path, detail="module"):
        for length in options.pop("lengths", [prompt.shape[-1]]):
            model.generate(prompt[:, :length], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return explain_layer(lifetrace.read_trace(path), step, 0)


def roles(walk):
    return [(m.role, m.batch, m.m, m.k, m.n) for piece in walk.pieces for m in piece.matmuls if m.role]


def test_a_full_window_holds_fewer_keys_than_the_step_has_seen(prompt_12, tmp_path):
    """A window of 8: the decode steps attend to 8 keys of the 13 and more positions."""
    walk = walked(tiny("mistral", sliding_window=8), prompt_12, tmp_path / "t", 3)
    assert roles(walk) == [("scores", 4, 1, 16, 8), ("weighted sum", 4, 1, 8, 16)]
    assert walk.scores.shape == (4, 1, 8)


def test_experts_that_multiply_twice_are_no_attention(prompt_12, tmp_path):
    walk = walked(tiny("mixtral", num_local_experts=4), prompt_12, tmp_path / "t", 1)
    assert roles(walk) == [("scores", 4, 1, 16, 13), ("weighted sum", 4, 1, 13, 16)]


def test_products_on_a_line_past_a_bend_are_not_shown(tmp_path):
    """Cached 4 … 10 and 41 … 47 positions, a window of 25: it fills where no step was."""
    prompt = torch.arange(41)[None] + 5
    walked(tiny("mistral", sliding_window=25), prompt, tmp_path / "t", 0, lengths=[4, 41])
    trace = lifetrace.read_trace(tmp_path / "t")
    without_keys = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    shown = [sum(m.flops for p in explain_layer(trace, step, 0).pieces for m in p.matmuls) for step in range(1, 8)]
    true = [without_keys + 2 * 2 * 4 * 16 * (4 + step) for step in range(1, 8)]
    assert [flops for flops in shown if flops] == [flops for flops, seen in zip(true, shown, strict=True) if seen]
    assert 0 in shown


def test_what_a_layer_runs_outside_of_its_parts_is_walked_too(prompt_12, tmp_path):
    """Phi-3's two dropouts of the residual stand in the layer itself."""
    walk = walked(tiny("phi3"), prompt_12, tmp_path / "t", 0)
    assert [piece.class_name for piece in walk.pieces if piece.part is None] == [
        "Phi3DecoderLayer",
        "Dropout",
        "Dropout",
    ]
