"""The highest moment of a run on a CPU: exact live tensor bytes, in pieces that add up, by arithmetic."""

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from lifetrace.analysis import read_trace
from lifetrace.analysis.memory import memory, predicted
from lifetrace.cli import main
from lifetrace.session import Options, Session
from reference_model import R_SIZES

R_WEIGHTS = 180_800 * 4
ROTARY = 8 * 4  # one frequency for each of 8 pairs of a head, twice: as it is and as it was


def traced(tmp_path, model, prompt, **settings):
    settings = {"max_new_tokens": 4, "do_sample": False} | settings
    session = Session(model, tmp_path / "t", Options())
    session.start()
    timed = model.generate(prompt, **settings)
    session.detach()
    session.measure_live_bytes(lambda: model.generate(prompt, **settings))
    session.finish("complete")
    assert not session.faults
    return read_trace(tmp_path / "t"), timed


def llama(**sizes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**R_SIZES | sizes)).eval()


def test_pieces_add_up_and_what_stays_is_exact(model_r, tmp_path):
    """4 sequences of 48: the peak is in a layer of the prefill, whose caches are filled up to it."""
    trace, _ = traced(tmp_path, model_r, torch.arange(3, 195).view(4, 48))
    found = memory(trace)
    kinds = found.by_kind()
    assert kinds["weights"] == R_WEIGHTS
    assert kinds["buffers"] == 2 * ROTARY
    assert kinds["kv"] == 4 * 4 * 48 * 2 * 32 * 4  # layers, sequences, positions, keys and values, float32
    assert sum(kinds.values()) == found.peak_bytes
    assert found.persistent_bytes + found.transient_bytes == found.peak_bytes
    assert found.step == 0
    assert found.during == "layer 3, mlp"
    assert found.maker["shape"] == [4, 48, 128]
    assert "scores" not in kinds


def test_weights_stand_by_stage_and_tied_ones_once(tmp_path):
    trace, _ = traced(tmp_path, llama(tie_word_embeddings=True), torch.arange(3, 15)[None])
    weights = {piece.stage: piece.bytes_ for piece in memory(trace).pieces if piece.kind == "weights"}
    assert weights["embed"] == 256 * 64 * 4
    assert "lm_head" not in weights
    assert weights["final_norm"] == 64 * 4
    assert sum(weights.values()) == 164_416 * 4


def test_eager_attention_writes_its_scores(tmp_path):
    """2 × 4 heads × 96 × 96 scores: the product, scaled, and masked are alive at once at the most."""
    trace, _ = traced(tmp_path, llama(attn_implementation="eager"), torch.arange(3, 195).view(2, 96))
    found = memory(trace)
    one = 2 * 4 * 96 * 96 * 4
    assert found.during.endswith("attention")
    assert found.by_kind()["scores"] % one == 0
    assert found.by_kind()["scores"] >= 2 * one


def test_the_float32_copy_of_the_logits_is_seen(tmp_path):
    """A vocabulary of 60,000 over a width of 64, in bfloat16, 8 sequences: their logits, and a copy in float32."""
    model = llama(vocab_size=60_000, tie_word_embeddings=True).to(torch.bfloat16)
    trace, _ = traced(tmp_path, model, torch.arange(3, 27).view(8, 3))
    found = memory(trace)
    assert found.during == "sample"
    assert found.by_kind()["logits"] >= 8 * 60_000 * (2 + 4)


def test_each_stage_and_step_has_its_memory(model_r, prompt_12, tmp_path):
    trace, timed = traced(tmp_path, model_r, prompt_12)
    steps, spans = trace.steps, trace.spans
    assert steps.mem_peak_bytes.max() == memory(trace).peak_bytes
    assert steps.mem_reserved_bytes.isna().all()
    grown = steps.mem_allocated_bytes.diff().iloc[2]
    # a position of the cache in each layer, a token and its position; older versions of transformers also keep a
    # mask, and what was before
    assert grown - 4 * 2 * 32 * 4 in (2 * 8, 4 * 8)
    tops = spans[spans.parent.isna() & spans.step.notna()]
    assert tops.mem_peak_bytes.notna().all()
    assert tops.groupby("step").mem_peak_bytes.max().tolist() == steps.mem_peak_bytes.tolist()
    mlp = spans[(spans.part == "mlp") & (spans.step == 1)].iloc[0]
    # norm's output, gate (activated), up: 128 wide, and their product, beside what was held before
    before = spans[(spans.part == "norm") & (spans.step == 1) & (spans.layer == 0)].iloc[1].mem_allocated_bytes
    assert mlp.mem_peak_bytes - before == 3 * 128 * 4
    assert timed.shape[1] == 16


def test_what_is_held_after_the_run_is_named(model_r, prompt_12, tmp_path):
    """The session's own prompt and result are let go; a cache that the caller keeps stays, and is said."""
    kept = []

    def generate():
        output = model_r.generate(prompt_12, max_new_tokens=3, return_dict_in_generate=True)
        kept[:] = [output.past_key_values]
        return output

    session = Session(model_r, tmp_path / "t", Options())
    session.start()
    generate()
    session.detach()
    kept.clear()
    session.measure_live_bytes(generate)
    session.finish("complete")
    held = memory(read_trace(tmp_path / "t")).held_after
    cache = [tensor for tensor in held if tensor["role"] == "kv"]
    assert sum(tensor["bytes"] for tensor in cache) == 4 * 14 * 2 * 32 * 4


def test_what_was_planned_stands_beside_what_was_measured(tmp_path):
    """The embedded model, 2,755,008 parameters in float32, 8 tokens and 5 new ones: 12 positions of 3,072 B."""
    quick = ["--prompt-length", "8", "--max-new-tokens", "5", "--repeats", "1", "--no-baseline"]
    ran = CliRunner().invoke(main, ["run", *quick, "--out", str(tmp_path / "t")])
    assert ran.exit_code == 0, ran.output
    rows = {row.key: row for row in predicted(read_trace(tmp_path / "t"))}
    assert rows["weights"].predicted == rows["weights"].measured == 2_755_008 * 4
    assert rows["kv"].predicted == rows["kv"].measured == 12 * 3_072
    assert abs(rows["peak"].residual_share) < 0.05
    page = (tmp_path / "t" / "report.html").read_text()
    assert "KV at 12 positions, batch 1" in page


def test_no_plan_is_made_of_beams(tmp_path):
    quick = ["--num-beams", "2", "--max-new-tokens", "3", "--repeats", "1", "--no-baseline", "--no-report"]
    assert CliRunner().invoke(main, ["run", *quick, "--out", str(tmp_path / "t")]).exit_code == 0
    assert read_trace(tmp_path / "t").meta["predictions"] is None


@pytest.mark.parametrize("command", [{}, {"detail": "layer"}])
def test_a_trace_without_the_pass_has_no_memory(model_r, prompt_12, tmp_path, command):
    session = Session(model_r, tmp_path / "t", Options(**command))
    session.start()
    model_r.generate(prompt_12, max_new_tokens=2)
    session.finish("complete")
    trace = read_trace(tmp_path / "t")
    assert memory(trace) is None
    assert trace.steps.mem_peak_bytes.isna().all()
