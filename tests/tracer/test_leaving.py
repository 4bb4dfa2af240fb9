"""Every way out of a traced block, and what is left behind: nothing."""

import copy
import gc
import io
import subprocess
import sys
import threading
import weakref

import peft
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from left_behind import left_behind
from transformers import LlamaConfig, LlamaForCausalLM

import lifetrace
from reference_model import R_SIZES


class Enough(Exception):
    """What ends a block early."""


def raising(error):
    """A module in place of a layer's MLP that ends its second call with an exception."""

    class Ending(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise error
            return x

    return Ending()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Enough("of it"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(3), "complete"),
        (GeneratorExit(), "interrupted"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (StopIteration(), "failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_inside_of_a_layer(model_r, prompt_12, tmp_path, error, status):
    model_r.model.layers[2].mlp = raising(error)
    before = left_behind(model_r)
    with pytest.raises(type(error)) as caught, lifetrace.trace(model_r, out=tmp_path / "t", detail="module"):
        model_r.generate(prompt_12, max_new_tokens=4)
    assert caught.value is error
    assert left_behind(model_r) == before
    trace = lifetrace.read_trace(tmp_path / "t")
    assert trace.meta["status"] == status
    assert trace.steps.discarded.tolist() == [False, True]


def test_a_generator_that_is_closed(model_r, prompt_12, tmp_path):
    def tokens():
        with lifetrace.trace(model_r, out=tmp_path / "t"):
            while True:
                yield model_r.generate(prompt_12, max_new_tokens=2)

    before = left_behind(model_r)
    stream = tokens()
    next(stream)
    assert left_behind(model_r) != before
    stream.close()
    assert left_behind(model_r) == before
    trace = lifetrace.read_trace(tmp_path / "t")
    assert (trace.meta["status"], len(trace.steps)) == ("interrupted", 2)


def test_a_thread_that_dies(model_r, prompt_12, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    mlp = model_r.model.layers[2].mlp
    before = left_behind(model_r)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.model.layers[2].mlp = raising(Enough())
        thread = threading.Thread(target=model_r.generate, args=(prompt_12,), kwargs={"max_new_tokens": 4})
        thread.start()
        thread.join()
        model_r.model.layers[2].mlp = mlp
        model_r.generate(prompt_12, max_new_tokens=3)
    assert left_behind(model_r) == before
    assert [call["error"] for call in trace.meta["calls"]] == ["Enough: ", None]
    assert trace.steps.groupby("call").size().tolist() == [2, 3]


def test_a_thread_that_goes_on_when_the_block_has_ended(model_r, prompt_12, tmp_path):
    ended, begun = threading.Event(), threading.Event()

    def wait(module, args):
        begun.set()
        ended.wait(30)

    expected = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)
    before = left_behind(model_r)
    results = []
    handle = model_r.model.layers[1].register_forward_pre_hook(wait)
    thread = threading.Thread(
        target=lambda: results.append(model_r.generate(prompt_12, max_new_tokens=4, do_sample=False))
    )
    with lifetrace.trace(model_r, out=tmp_path / "t"):
        thread.start()
        begun.wait(30)
    ended.set()
    thread.join()
    handle.remove()
    assert torch.equal(results[0], expected)
    assert left_behind(model_r) == before


def test_the_model_is_not_kept_alive(prompt_12, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval()
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        output = model.generate(prompt_12, max_new_tokens=3, return_dict_in_generate=True)
        cache = next(output[name] for name in ("cache", "past_key_values") if name in dict.keys(output))
        kept = [weakref.ref(cache), weakref.ref(output.sequences)]
    with lifetrace.trace_all(out=tmp_path / "all", detail="layer") as tracing:
        model.generate(prompt_12, max_new_tokens=3)
    kept += [weakref.ref(module) for module in model.modules()]
    kept += [weakref.ref(weight) for weight in model.parameters()]
    del model, output, cache
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []
    assert len(trace.steps) == len(tracing.traces[0].steps) == 3


LOADING = """
import sys, torch
sys.modules["lifetrace"] = None  # as where it is not installed
model = torch.load(sys.argv[1], weights_only=False)
print(model.generate(torch.arange(3, 15)[None], max_new_tokens=3, do_sample=False).tolist())
"""


def test_a_model_saved_while_it_is_traced_loads_without_lifetrace(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t", detail="module"):
        torch.save(model_r, tmp_path / "model.pt")
        weights = io.BytesIO()
        torch.save(model_r.state_dict(), weights)
        expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False).tolist()
    command = [sys.executable, "-W", "ignore", "-c", LOADING, str(tmp_path / "model.pt")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=False)
    assert loaded.stdout == f"{expected}\n", loaded.stderr
    weights.seek(0)
    copy.deepcopy(model_r).load_state_dict(torch.load(weights))
    assert "lifetrace" not in (tmp_path / "model.pt").read_bytes().decode("latin-1")


class Turning(ModelHook):
    """One of accelerate's hooks: it stands in for a module's forward."""

    def post_forward(self, module, output):
        return -output


def test_foreign_hooks_work_in_the_block_and_after_it(model_r, prompt_12, tmp_path):
    seen = []
    model_r.model.layers[0].register_forward_hook(lambda *given: seen.append("layer"))
    model_r.register_forward_pre_hook(lambda *given: seen.append("model"))
    add_hook_to_module(model_r.model.norm, Turning())
    expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    alone, seen[:] = list(seen), []
    before = left_behind(model_r)
    with lifetrace.trace(model_r, out=tmp_path / "t", detail="module") as trace:
        assert torch.equal(model_r.generate(prompt_12, max_new_tokens=3, do_sample=False), expected)
        assert seen == alone
        model_r.lm_head.register_forward_hook(lambda *given: seen.append("head"))
    assert left_behind(model_r) != before  # its own new hook stays
    assert seen == alone
    assert len(trace.steps) == 3
    model_r.generate(prompt_12, max_new_tokens=1)
    assert seen[-1] == "head"
    remove_hook_from_module(model_r.model.norm)
    assert not torch.equal(model_r.generate(prompt_12, max_new_tokens=3, do_sample=False), expected)


@pytest.mark.filterwarnings("ignore:.*on a device type different than your model's device.*:UserWarning")
def test_offloaded_weights_work_in_the_block_and_after_it(model_r, prompt_12, tmp_path):
    cpu_offload(model_r, execution_device=torch.device("cpu"))
    expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    before = left_behind(model_r)
    with lifetrace.trace(model_r, out=tmp_path / "t"):
        assert torch.equal(model_r.generate(prompt_12, max_new_tokens=3, do_sample=False), expected)
    assert left_behind(model_r) == before
    assert torch.equal(model_r.generate(prompt_12, max_new_tokens=3, do_sample=False), expected)


# peft asks transformers for a property by its former name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_model_of_peft(model_r, prompt_12, tmp_path):
    model = peft.get_peft_model(model_r, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    expected = model.generate(input_ids=prompt_12, max_new_tokens=3, do_sample=False)
    before = left_behind(model)
    with lifetrace.trace(model, out=tmp_path / "t", detail="module") as trace:
        assert torch.equal(model.generate(input_ids=prompt_12, max_new_tokens=3, do_sample=False), expected)
        with model.disable_adapter():
            plain = model.generate(input_ids=prompt_12, max_new_tokens=3, do_sample=False)
    assert left_behind(model) == before
    assert not torch.equal(plain, expected)
    assert len(trace.steps) == 6
