"""What tracing promises the user's program: the same tokens, the same hooks, its own exceptions; and true times."""

import copy
import gc
import pickle
import re
import threading
import time
import weakref
from importlib import resources

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)

import lifetrace
from lifetrace.errors import ModelError, UsageError
from reference_model import R_SIZES


def hooks_of(model):
    """Everything that tracing could leave behind in a model or its class."""
    found = []
    for name, module in model.named_modules():
        for kind in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
        ):
            found += [(name, kind, repr(hook)) for hook in getattr(module, kind).values()]
        found += [(name, key) for key in sorted(vars(module))]
    cls = type(model)
    found += [(key, id(value)) for key, value in sorted(vars(cls).items()) if callable(value)]
    return found


@pytest.mark.parametrize("detail", ["layer", "block", "module"])
@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}])
def test_tokens_are_identical(model_r, prompt_12, tmp_path, detail, settings):
    torch.manual_seed(7)
    untraced = model_r.generate(prompt_12, max_new_tokens=8, **settings)
    torch.manual_seed(7)
    with lifetrace.trace(model_r, out=tmp_path / "t", detail=detail) as trace:
        traced = model_r.generate(prompt_12, max_new_tokens=8, **settings)
    assert torch.equal(untraced, traced)
    generated = trace.tokens[trace.tokens.source == "generated"]
    assert generated.token_id.tolist() == untraced[0, 12:].tolist()


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}])
def test_tokens_of_the_demo_model_are_identical(tmp_path, settings):
    folder = str(resources.files("lifetrace.demo_model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer("The physical hardware limits", return_tensors="pt")
    torch.manual_seed(5)
    untraced = model.generate(**inputs, max_new_tokens=16, **settings)
    torch.manual_seed(5)
    with lifetrace.trace(model, tokenizer=tokenizer, out=tmp_path / "t"):
        traced = model.generate(**inputs, max_new_tokens=16, **settings)
    assert torch.equal(untraced, traced)


def test_the_model_is_as_before_also_after_an_exception(model_r, prompt_12, tmp_path):
    def foreign(module, args):
        return None

    model_r.model.layers[1].register_forward_pre_hook(foreign)
    before = hooks_of(model_r)
    with lifetrace.trace(model_r, out=tmp_path / "ok"):
        model_r.generate(prompt_12, max_new_tokens=2)
    assert hooks_of(model_r) == before
    with pytest.raises(ZeroDivisionError), lifetrace.trace(model_r, out=tmp_path / "bad"):
        model_r.generate(prompt_12, max_new_tokens=2)
        raise ZeroDivisionError("the user's own")
    assert hooks_of(model_r) == before
    bad = lifetrace.read_trace(tmp_path / "bad")
    assert bad.meta["status"] == "failed"
    assert bad.meta["error"] == "ZeroDivisionError: the user's own"
    assert len(bad.steps) == 2


def test_an_exception_inside_the_forward_goes_on_unchanged(model_r, prompt_12, tmp_path):
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("broken layer")

    model_r.model.layers[2].mlp = Failing()
    with pytest.raises(RuntimeError, match="broken layer"), lifetrace.trace(model_r, out=tmp_path / "t"):
        model_r.generate(prompt_12, max_new_tokens=2)
    trace = lifetrace.read_trace(tmp_path / "t")
    assert trace.meta["status"] == "failed"
    assert trace.steps.discarded.tolist() == [True]
    assert trace.meta["calls"][0]["error"] == "RuntimeError: broken layer"


def test_interrupting_closes_the_trace(model_r, prompt_12, tmp_path):
    with pytest.raises(KeyboardInterrupt), lifetrace.trace(model_r, out=tmp_path / "t"):
        model_r.generate(prompt_12, max_new_tokens=2)
        raise KeyboardInterrupt
    assert lifetrace.read_trace(tmp_path / "t").meta["status"] == "interrupted"


def test_stages_and_gaps_are_the_whole_step(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t", detail="module") as trace:
        model_r.generate(prompt_12, max_new_tokens=8)
    top = trace.spans[trace.spans.parent.isna() & trace.spans.step.notna()]
    assert top.groupby("step").host_ns.sum().tolist() == trace.steps.wall_ns.tolist()
    whole = trace.steps.prepare_ns + trace.steps.forward_ns + trace.steps.sample_ns
    assert whole.tolist() == trace.steps.wall_ns.tolist()


def test_a_parent_encloses_its_children(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t", detail="module") as trace:
        model_r.generate(prompt_12, max_new_tokens=4)
    spans = trace.spans.set_index("span")
    children = spans[spans.parent.notna()]
    parents = spans.loc[children.parent]
    assert (children.start_ns.to_numpy() >= parents.start_ns.to_numpy()).all()
    assert ((children.start_ns + children.host_ns).to_numpy() <= (parents.start_ns + parents.host_ns).to_numpy()).all()
    assert (children.step.to_numpy() == parents.step.to_numpy()).all()


class Sleeping(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        time.sleep(0.05)
        return self.inner(*args, **kwargs)


def always_slow(trace):
    """Stage, layer and part of what takes long in each of the steps; a busy machine delays one, not all."""
    spans = trace.spans.assign(layer=trace.spans.layer.fillna(-1), part=trace.spans.part.fillna("whole"))
    a_step = spans.groupby(["stage", "layer", "part", "step"]).host_ns.max()
    fastest = a_step.groupby(["stage", "layer", "part"]).min()
    return set(fastest[fastest > 40_000_000].index)


def test_a_sleep_in_one_mlp_shows_there_and_nowhere_else(model_r, prompt_12, tmp_path):
    model_r.model.layers[2].mlp = Sleeping(model_r.model.layers[2].mlp)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(prompt_12, max_new_tokens=3)
    assert always_slow(trace) == {("layer", 2, "whole"), ("layer", 2, "mlp")}


def test_a_sleep_in_a_logits_processor_moves_sample_alone(model_r, prompt_12, tmp_path):
    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            time.sleep(0.05)
            return scores

    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(prompt_12, max_new_tokens=3, logits_processor=LogitsProcessorList([Slow()]))
    assert always_slow(trace) == {("sample", -1, "whole"), ("sample", -1, "logits")}


def test_a_streamer_in_a_worker_thread_is_its_own_part(tmp_path):
    folder = str(resources.files("lifetrace.demo_model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    inputs = tokenizer("The Congress", return_tensors="pt")
    with lifetrace.trace(model, tokenizer=tokenizer, out=tmp_path / "t") as trace:
        worker = threading.Thread(
            target=model.generate, kwargs={**inputs, "max_new_tokens": 5, "do_sample": False, "streamer": streamer}
        )
        worker.start()
        text = "".join(streamer)
        worker.join()
    generated = trace.tokens[(trace.tokens.source == "generated")].token_id.tolist()
    assert text == tokenizer.decode(generated)
    assert (trace.spans.part == "streamer").sum() >= 5


def test_two_generates_at_once_do_not_mix(model_r, tmp_path):
    prompts = [torch.arange(3, 15)[None], torch.arange(40, 60)[None]]
    alone = [model_r.generate(ids, max_new_tokens=20, do_sample=False) for ids in prompts]
    results = [None, None]

    def work(number):
        results[number] = model_r.generate(prompts[number], max_new_tokens=20, do_sample=False)

    with lifetrace.trace(model_r, out=tmp_path / "t", detail="module") as trace:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, results, strict=True))
    steps = trace.steps
    assert sorted(steps.groupby("call").size()) == [20, 20]
    first = steps[steps.phase == "prefill"].set_index("call").q_len
    assert sorted(first) == [12, 20]
    for _, rows in steps.groupby("call"):
        before = rows.sort_values("step").kv_len_before.tolist()
        assert before[1:] == list(range(before[1], before[1] + 19))
    top = trace.spans[trace.spans.parent.isna()].groupby("step").host_ns.sum()
    assert top.tolist() == steps.sort_values("step").wall_ns.tolist()


def test_plain_forwards_are_calls_of_their_own(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace, torch.inference_mode():
        output = model_r(prompt_12, use_cache=True)
        model_r(torch.tensor([[5]]), **{cache_name(output): output[cache_name(output)]})
    steps = trace.steps
    assert steps.phase.tolist() == ["prefill", "decode"]
    assert steps.kv_len_before.tolist() == [0, 12]
    assert [call["kind"] for call in trace.meta["calls"]] == ["forward", "forward"]
    assert steps.sample_ns.isna().all()


def cache_name(output):
    return next(name for name in ("cache", "past_key_values") if name in dict.keys(output))


def test_a_cache_from_an_earlier_turn(model_r, prompt_12, tmp_path):
    first = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    cache = {cache_name(first): first[cache_name(first)]}
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(longer, max_new_tokens=3, do_sample=False, **cache)
    # 12 + 4 tokens were seen, the last of them not yet processed: 15 are cached, 4 of 19 are new
    assert trace.steps.kv_len_before.tolist() == [15, 19, 20]
    assert trace.steps.q_len.tolist() == [4, 1, 1]
    assert trace.steps.phase.tolist() == ["prefill", "decode", "decode"]


def test_why_it_stopped(prompt_12, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval()
    first = int(model.generate(prompt_12, max_new_tokens=1, do_sample=False)[0, -1])

    class Enough(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 15)

    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        model.generate(prompt_12, max_new_tokens=4, do_sample=False)
        model.generate(prompt_12, max_new_tokens=4, do_sample=False, eos_token_id=first)
        model.generate(prompt_12, max_new_tokens=9, do_sample=False, stopping_criteria=StoppingCriteriaList([Enough()]))
    calls = trace.meta["calls"]
    assert [call["stop_reason"] for call in calls] == ["length", "eos", "criterion Enough"]
    assert [call["new_tokens"] for call in calls] == [[4], [1], [3]]


def test_rows_that_end_early_keep_the_end_token_and_no_padding(tmp_path):
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval()
    ids = torch.stack([torch.arange(3, 9), torch.arange(30, 36)])
    free = model.generate(ids, max_new_tokens=6, do_sample=False)
    end = int(free[0, 8])  # what the first row says third
    assert end not in free[1, 6:]
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=end)
    new = trace.tokens[trace.tokens.source == "generated"]
    assert new[new.sequence == 0].kept.tolist() == [True] * (free[0, 6:].tolist().index(end) + 1) + [False] * (
        5 - free[0, 6:].tolist().index(end)
    )
    assert new[new.sequence == 1].kept.all()
    assert trace.steps.token_count.sum() == new.kept.sum()


def test_every_thins_spans_but_not_steps(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t", every=4) as trace:
        model_r.generate(prompt_12, max_new_tokens=10)
    assert len(trace.steps) == 10
    assert sorted(trace.spans.step.unique()) == [0, 4, 8]
    assert sorted(trace.kv.step.unique()) == [0, 4, 8]
    assert (trace.tokens.source == "generated").sum() == 10


def test_a_range_of_steps(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t", steps=(2, 4)) as trace:
        model_r.generate(prompt_12, max_new_tokens=10)
    assert sorted(trace.spans.step.unique()) == [2, 3]
    assert len(trace.steps) == 10


def test_copies_and_pickles_of_a_traced_model_work_and_are_not_traced(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        twin = copy.deepcopy(model_r)
        other = pickle.loads(pickle.dumps(model_r))
        expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
        for copied in (twin, other):
            assert torch.equal(copied.generate(prompt_12, max_new_tokens=3, do_sample=False), expected)
    assert len(trace.steps) == 3


def test_nothing_is_kept_alive(model_r, prompt_12, tmp_path):
    seen = []
    handle = model_r.model.layers[0].register_forward_hook(lambda m, a, output: seen.append(weakref.ref(output)))
    with lifetrace.trace(model_r, out=tmp_path / "t", detail="module"):
        model_r.generate(prompt_12, max_new_tokens=3)
        gc.collect()
        assert len(seen) == 3
        assert [ref() for ref in seen] == [None] * 3
    handle.remove()


def test_a_model_is_traced_once_at_a_time(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "a"):
        with (
            pytest.raises(lifetrace.ModelError, match="being traced already"),
            lifetrace.trace(model_r, out=tmp_path / "b"),
        ):
            pass
        model_r.generate(prompt_12, max_new_tokens=2)
    assert len(lifetrace.read_trace(tmp_path / "a").steps) == 2


def test_other_models_of_the_class_are_left_alone(model_r, prompt_12, tmp_path):
    other = LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval()
    with lifetrace.trace(model_r, out=tmp_path / "a") as trace:
        other.generate(prompt_12, max_new_tokens=2)
        model_r.generate(prompt_12, max_new_tokens=3)
    assert len(trace.steps) == 3


def test_what_cannot_be_traced_is_refused(tmp_path):
    sizes = {"vocab_size": 50, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8}
    encoder_decoder = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(lifetrace.ModelError, match="encoder–decoder"):
        lifetrace.trace(encoder_decoder, out=tmp_path / "a")
    with pytest.raises(lifetrace.ModelError, match=r"no generate\(\)"):
        lifetrace.trace(torch.nn.Linear(2, 2), out=tmp_path / "b")
    with pytest.raises(lifetrace.ModelError, match="is a str"):
        lifetrace.trace("gpt2", out=tmp_path / "c")


def test_a_folder_that_is_not_empty_needs_force(model_r, prompt_12, tmp_path):
    for _ in range(2):
        with lifetrace.trace(model_r, out=tmp_path / "t", force=True) as trace:
            model_r.generate(prompt_12, max_new_tokens=2)
    assert len(trace.steps) == 2
    with pytest.raises(lifetrace.TraceError, match="not empty"):
        lifetrace.trace(model_r, out=tmp_path / "t")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(lifetrace.TraceError, match="does not delete"):
        lifetrace.trace(model_r, out=tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_fault_in_writing_leaves_the_program_alone(model_r, prompt_12, tmp_path, monkeypatch):
    from lifetrace import writer

    expected = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="the disk is full"), lifetrace.trace(model_r, out=tmp_path / "t"):
        monkeypatch.setattr(writer.pq, "write_table", full)
        generated = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, expected)
    meta = lifetrace.read_trace(tmp_path / "t").meta
    assert meta["status"] == "failed"
    assert "the disk is full" in meta["error"]


def test_a_fault_of_lifetrace_itself_leaves_the_program_alone(model_r, prompt_12, tmp_path, monkeypatch):
    from lifetrace.steps import StepReader

    expected = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)

    def broken(self, *args):
        raise KeyError("a bug")

    warned = pytest.warns(UserWarning, match="lifetrace failed while recording: KeyError")
    with warned, lifetrace.trace(model_r, out=tmp_path / "t"):
        monkeypatch.setattr(StepReader, "read", broken)
        generated = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, expected)


def test_a_tokenizer_that_fails_leaves_the_program_alone(model_r, prompt_12, tmp_path):
    class Broken:
        all_special_ids = ()

        def decode(self, ids):
            return "?"

        def batch_decode(self, rows, **kwargs):
            raise RuntimeError("no such token")

    expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    warned = pytest.warns(UserWarning, match="RuntimeError: no such token")
    with warned, lifetrace.trace(model_r, tokenizer=Broken(), out=tmp_path / "t") as trace:
        generated = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, expected)
    assert len(trace.steps) == 3


def test_classifier_free_guidance_is_a_step_inside_a_step(model_r, prompt_12, tmp_path):
    expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False, guidance_scale=1.5)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        traced = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False, guidance_scale=1.5)
    assert torch.equal(expected, traced)
    assert trace.steps.role.tolist() == ["main", "guidance"] * 3
    guidance = trace.steps[trace.steps.role == "guidance"]
    assert guidance.parent_step.tolist() == [0, 2, 4]
    nested = trace.spans[trace.spans.stage == "nested"]
    assert nested.step.tolist() == [0, 2, 4]
    assert (nested.host_ns.to_numpy() >= guidance.wall_ns.to_numpy()).all()


def test_assisted_decoding_gives_several_tokens_a_step(model_r, prompt_12, tmp_path):
    expected = model_r.generate(prompt_12, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        traced = model_r.generate(prompt_12, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(expected, traced)
    assert trace.steps.token_count.sum() == 12


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"detail": "foo"}, "no detail level 'foo'"),
        ({"every": 0}, "every=0"),
        ({"every": "2"}, "every='2'"),
        ({"steps": 5}, "steps=5 is no range"),
        ({"steps": "0:8"}, "steps='0:8' is no range"),
        ({"steps": (5, 2)}, "is no range"),
        ({"steps": ("0", "8")}, "is no range"),
        ({"tokenizer": "x"}, "tokenizer='x' is none"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_leave_nothing(model_r, tmp_path, monkeypatch, wrong, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(says)):
        lifetrace.trace(model_r, **wrong)
    with pytest.raises(ModelError, match="is a str"):
        lifetrace.trace("x")
    assert list(tmp_path.iterdir()) == []
