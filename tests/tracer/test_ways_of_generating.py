"""Every way of generating has the right steps, phases, lengths and tokens; model R is small enough to say which."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace.analysis import latency
from reference_model import R_SIZES


@pytest.fixture
def traced(model_r, prompt_12, tmp_path):
    """Generate untraced and traced, assert the same tokens, and return the trace."""

    def work(model=model_r, inputs=None, **settings):
        inputs = {"input_ids": prompt_12} if inputs is None else inputs
        settings = {"do_sample": False} | settings
        torch.manual_seed(3)
        expected = model.generate(**inputs, **settings)
        torch.manual_seed(3)
        with lifetrace.trace(model, out=tmp_path / "t") as trace:
            generated = model.generate(**inputs, **settings)
        assert torch.equal(expected, generated)
        assert trace.meta["status"] == "complete"
        top = trace.spans[trace.spans.parent.isna()].groupby("step").host_ns.sum()
        main = trace.steps.set_index("step").wall_ns.loc[top.index]
        assert top.tolist() == main.tolist()
        return trace

    return work


def small_assistant():
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**R_SIZES | {"num_hidden_layers": 1})).eval()


def test_a_draft_model_is_told_apart_from_what_verifies(traced):
    trace = traced(assistant_model=small_assistant(), max_new_tokens=10)
    steps = trace.steps
    draft, verify = steps[steps.role == "assistant"], steps[steps.role == "main"]
    assert len(draft) > 0
    assert verify.token_count.sum() == 10
    assert draft.parent_step.notna().all()
    assert set(draft.parent_step) <= set(verify.step)
    # each verification computes one position more than were drafted for it
    after_first = verify.iloc[1:]
    drafted = draft.groupby("parent_step").size().reindex(after_first.step, fill_value=0)
    assert (after_first.q_len.to_numpy() - 1 <= drafted.to_numpy() + 1).all()
    # what was rejected is cropped: the next step starts where the accepted tokens end
    assert after_first.kv_len_before.tolist() == (verify.token_count.cumsum() + 12 - 1).tolist()[:-1]
    call = trace.meta["calls"][0]
    first_draft = verify.q_len.iloc[0] - 12  # the first verification computes the prompt too
    assert call["drafted"] == (verify.q_len.iloc[1:] - 1).sum() + first_draft
    assert call["accepted"] == 10 - len(verify)
    assert draft.flops.notna().all()
    assert draft.flops.max() < verify.flops.max()


def test_a_model_that_is_its_own_assistant_accepts_all(traced, model_r):
    trace = traced(assistant_model=model_r, max_new_tokens=10)
    verify = trace.steps[trace.steps.role == "main"]
    assert verify.token_count.sum() == 10
    call = trace.meta["calls"][0]
    assert call["accepted"] == 10 - len(verify)
    assert (trace.steps[trace.steps.role == "assistant"].parent_step.notna()).all()
    assert latency(trace._trace).calls == 1


def test_prompt_lookup_drafts_without_a_model(traced):
    ids = torch.tensor([[5, 6, 7, 8] * 3])
    trace = traced(inputs={"input_ids": ids}, prompt_lookup_num_tokens=3, max_new_tokens=9)
    assert (trace.steps.role == "main").all()
    assert trace.steps.token_count.sum() == 9
    assert trace.steps.phase.tolist() == ["prefill"] + ["decode"] * (len(trace.steps) - 1)
    call = trace.meta["calls"][0]
    assert call["drafted"] > 0
    assert f"{call['drafted']} tokens, {call['accepted']} accepted" in trace._repr_html_()


def test_several_return_sequences(traced):
    trace = traced(do_sample=True, num_return_sequences=3, max_new_tokens=5)
    assert trace.steps.batch.tolist() == [3] * 5
    assert trace.steps.token_count.tolist() == [3] * 5
    assert trace.meta["calls"][0]["sequences"] == 3
    assert trace.tokens.groupby("sequence").size().tolist() == [17] * 3


def test_inputs_as_embeddings(traced, model_r, prompt_12):
    embeds = model_r.get_input_embeddings()(prompt_12).detach()
    trace = traced(inputs={"inputs_embeds": embeds}, max_new_tokens=4)
    assert trace.steps.q_len.tolist() == [12, 1, 1, 1]
    assert trace.steps.kv_len_after.tolist() == [12, 13, 14, 15]
    assert trace.steps.flops_dense.iloc[0] == 3_719_168  # looking up an embedding multiplies nothing
    assert (trace.spans[trace.spans.step == 0].stage == "embed").sum() == 0
    assert (trace.tokens.source == "generated").all()
    assert len(trace.tokens) == 4


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_cache_implementations(traced, cache):
    trace = traced(cache_implementation=cache, max_new_tokens=4)
    assert trace.steps.kv_len_before.tolist() == [0, 12, 13, 14]
    assert trace.steps.kv_len_after.tolist() == [12, 13, 14, 15]
    assert trace.steps.kv_bytes.iloc[-1] == 15 * 1024
    assert trace.steps.flops.iloc[0] == 3_651_584


def test_a_sliding_window_holds_no_more_than_it_needs(tmp_path, traced):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**R_SIZES, sliding_window=8)).eval()
    trace = traced(model=model, max_new_tokens=4)
    assert set(trace.kv.kind) == {"sliding"}
    assert trace.kv.length.tolist() == [7] * 4 * 4  # a window of 8 keeps 7 and the new one
    assert trace.steps.kv_len_after.tolist() == [12, 13, 14, 15]


def test_gradients_on_hold_nothing(traced, model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "grad") as trace:
        loss = model_r(prompt_12, labels=prompt_12).loss
        loss.backward()
    assert trace.steps.q_len.tolist() == [12]
    assert model_r.lm_head.weight.grad is not None


def test_a_forward_whose_token_is_taken_back_is_discarded(model_r, prompt_12, tmp_path, monkeypatch):
    """A stop check that is read one step late, as on a device that the host does not wait for."""
    from transformers.generation import utils

    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("this transformers does not defer the stop check")

    class Event:
        def __init__(self, *args, **kwargs): ...
        def record(self): ...
        def synchronize(self): ...

    third = int(model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)[0, -1])
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(lambda *args, **kwargs: True))
    monkeypatch.setattr(utils.torch, "Event", Event)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(prompt_12, max_new_tokens=8, do_sample=False, eos_token_id=third)
    assert trace.meta["calls"][0]["new_tokens"] == [3]
    assert trace.steps.token_count.tolist() == [1, 1, 1, 0]
    assert trace.steps.discarded.tolist() == [False, False, False, True]


def test_several_generates_in_one_trace(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        for count in (2, 3):
            model_r.generate(prompt_12, max_new_tokens=count, do_sample=False)
    assert trace.steps.call.tolist() == [0, 0, 1, 1, 1]
    assert trace.steps.step.tolist() == [0, 1, 2, 3, 4]
    assert trace.steps.phase.tolist() == ["prefill", "decode", "prefill", "decode", "decode"]
    assert trace.spans.span.is_unique


def test_a_loop_over_the_modules_by_hand(model_r, prompt_12, tmp_path):
    inner = model_r.model
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace, torch.no_grad():
        for _ in range(2):
            hidden = inner.embed_tokens(prompt_12)
            positions = torch.arange(12)[None]
            rotary = inner.rotary_emb(hidden, position_ids=positions)
            for layer in inner.layers:
                hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
            model_r.lm_head(inner.norm(hidden))
    steps = trace.steps
    assert steps.step.tolist() == [0, 1]
    assert steps.phase.tolist() == ["prefill", "prefill"]
    assert (steps.batch.tolist(), steps.q_len.tolist()) == ([1, 1], [12, 12])
    assert [call["kind"] for call in trace.meta["calls"]] == ["modules", "modules"]
    for _, rows in trace.spans.groupby("step"):
        top = rows[rows.parent.isna()].sort_values("start_ns")
        stages = [stage for stage in top.stage if stage not in ("prepare", "other")]
        assert stages == ["embed", "layer", "layer", "layer", "layer", "final_norm", "lm_head"]
    # all twelve positions go through the head here
    assert steps.flops_dense.tolist() == [3_719_168 + 11 * 32_768] * 2


def test_embeddings_made_inside_the_block_are_no_forward(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace, torch.no_grad():
        embeds = model_r.get_input_embeddings()(prompt_12)
        model_r.generate(inputs_embeds=embeds, max_new_tokens=3, do_sample=False)
    assert [call["kind"] for call in trace.meta["calls"]] == ["modules", "generate"]
    assert trace.steps.role.tolist() == ["main"] * 4
    assert trace.steps.parent_step.isna().all()
    assert trace.steps.discarded.tolist() == [True, False, False, False]
    assert trace.steps.flops.isna().tolist() == [True, False, False, False]
    assert trace.steps.flops_dense.iloc[1] == 3_719_168


def test_a_plain_forward_that_fails_is_discarded(model_r, prompt_12, tmp_path):
    handle = model_r.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), lifetrace.trace(model_r, out=tmp_path / "t"):
        model_r(prompt_12)
    handle.remove()
    steps = lifetrace.read_trace(tmp_path / "t").steps
    assert steps.discarded.tolist() == [True]
    assert steps.kv_bytes.isna().all()
    assert steps.flops.isna().all()


def test_an_assistant_that_cannot_be_traced_still_drafts(model_r, prompt_12, tmp_path):
    assistant = small_assistant()
    expected = model_r.generate(prompt_12, max_new_tokens=6, do_sample=False, assistant_model=assistant)
    with lifetrace.trace(assistant, out=tmp_path / "other"), lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        traced = model_r.generate(prompt_12, max_new_tokens=6, do_sample=False, assistant_model=assistant)
    assert torch.equal(expected, traced)
    assert trace.steps.token_count.sum() == 6
    assert "being traced already" in trace.meta["notes"][0]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_compiled_model_keeps_its_tokens_and_says_what_is_hidden(model_r, prompt_12, tmp_path, when):
    expected = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)
    if when == "before":
        model_r.model.layers[1].compile(backend="eager")
    with lifetrace.trace(model_r, out=tmp_path / "t", detail="module") as trace:
        if when == "inside":
            model_r.model.layers[1].compile(backend="eager")
        generated = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)
    assert torch.equal(expected, generated)
    assert len(trace.steps) == 4
    if when == "before":
        assert any("compiled" in note for note in trace.meta["notes"])
        inside = trace.spans[trace.spans.module.fillna("").str.startswith("model.layers.1.")]
        assert inside.empty


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_model_compiled_as_a_whole(model_r, prompt_12, tmp_path, when):
    expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    if when == "before":
        model_r.compile(backend="eager")
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        if when == "inside":
            model_r.compile(backend="eager")
        generated = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    assert torch.equal(expected, generated)
    assert trace.steps.kv_len_before.tolist() == [0, 12, 13]
    assert trace.steps.forward_ns.notna().all()
    if when == "before":
        assert trace.meta["notes"][0].startswith("the model is compiled")
        assert trace.spans.module.isna().all()


def test_continuous_batching_is_refused(model_r, prompt_12, tmp_path):
    with (
        pytest.raises(lifetrace.ModelError, match="continuous batching"),
        lifetrace.trace(model_r, out=tmp_path / "t"),
    ):
        model_r.generate_batch([[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2))
