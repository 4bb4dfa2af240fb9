"""The sample traces: real runs whose numbers follow from the model's sizes."""

import subprocess
import sys
from pathlib import Path

import pytest

import lifetrace
from lifetrace.analysis import breakdown, latency

SAMPLES = Path(__file__).parents[1] / "sample_traces"
# SmolLM2-135M: 30 layers of 576, 9 heads of 64 on 3 KV heads, MLP 1536, vocabulary 49,152, tied.
LAYERS, HIDDEN, KV_WIDTH, MLP, VOCABULARY = 30, 576, 192, 1536, 49_152
MATRICES = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * MLP


def smollm2_flops(q_len, pairs):
    return LAYERS * (2 * q_len * MATRICES + 4 * HIDDEN * pairs) + 2 * HIDDEN * VOCABULARY


@pytest.fixture(scope="module")
def smollm2():
    return lifetrace.read_trace(SAMPLES / "smollm2")


@pytest.fixture(scope="module")
def demo():
    return lifetrace.read_trace(SAMPLES / "demo")


def test_sizes(smollm2):
    parameters = VOCABULARY * HIDDEN + LAYERS * (MATRICES + 2 * HIDDEN) + HIDDEN
    assert parameters == 134_515_008
    assert smollm2.meta["model"]["parameters"] == parameters
    modules = smollm2.modules
    assert modules[modules.tied_to.isna()].parameters.sum() == parameters


def test_every_step_has_its_flops(smollm2):
    prompt = smollm2.meta["calls"][0]["prompt_tokens"][0]
    one_call = [smollm2_flops(prompt, prompt * (prompt + 1) // 2)]
    one_call += [smollm2_flops(1, kv) for kv in range(prompt + 1, prompt + 64)]
    assert smollm2.steps.flops.tolist() == one_call * 3


def test_the_cache_grows_by_its_closed_form(smollm2):
    steps = smollm2.steps
    assert (steps.kv_bytes == steps.kv_len_after * LAYERS * 2 * KV_WIDTH * 4).all()


def test_stages_and_gaps_are_the_whole_step(smollm2, demo):
    for trace in (smollm2, demo):
        top = trace.spans[trace.spans.parent.isna() & trace.spans.step.notna()]
        assert top.groupby("step").host_ns.sum().tolist() == trace.steps.wall_ns.tolist()


def test_a_trace_of_smollm2_is_small(smollm2):
    size = sum(file.stat().st_size for file in smollm2.path.rglob("*") if file.is_file())
    assert size < 2_000 * len(smollm2.steps)  # bytes a step, of 153 spans, 30 caches and a token


def test_tokens_were_identical_and_repeats_told_apart(smollm2, demo):
    for trace in (smollm2, demo):
        assert trace.meta["overhead"]["tokens_identical"] is True
        assert trace.meta["uncounted"] == []
        assert trace.meta["notes"] == []
        calls = trace.tokens.groupby("call").token_id.apply(list)
        assert all(ids == calls[0] for ids in calls)


def test_most_of_the_time_is_in_the_layers(smollm2):
    shares = {(row.phase, row.stage): row.share for row in breakdown(smollm2) if row.part is None}
    assert shares["decode", "layer"] > 0.6
    assert sum(share for (phase, _), share in shares.items() if phase == "decode") == pytest.approx(1)


def test_latency_is_of_this_run(smollm2):
    times = latency(smollm2)
    assert times.calls == 3
    assert times.new_tokens == 64
    assert times.itl_p50_ns <= times.itl_p95_ns <= times.itl_p99_ns
    assert times.ttft_ns < times.tpot_ns * 64


def test_the_demo_has_every_module_and_its_probabilities(demo):
    parts = set(demo.spans[demo.spans.stage == "layer"].part.dropna())
    assert parts == {
        "norm", "attention", "mlp", "qkv", "attention_core", "out_proj", "gate_up", "activation", "down",
    }  # fmt: skip
    new = demo.tokens[demo.tokens.source == "generated"]
    assert (new.logprob <= 0).all()
    assert (new.entropy >= 0).all()
    assert [len(ids) for ids in new.top_ids] == [5] * len(new)


def test_no_path_of_a_machine_is_in_them():
    for manifest in SAMPLES.glob("*/run.json"):
        text = manifest.read_text()
        assert "/tmp" not in text
        assert "/root" not in text
        assert "/home" not in text


def test_show_prints_it(smollm2):
    command = [sys.executable, "-m", "lifetrace", "show", str(smollm2.path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "134,515,008 parameters" in shown
    assert "decode" in shown
