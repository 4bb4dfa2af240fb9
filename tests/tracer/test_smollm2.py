"""A real model from end to end: SmolLM2-135M-Instruct as an ordinary checkpoint and as a quantized GGUF file."""

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

import lifetrace
from lifetrace.analysis import judge
from lifetrace.cli import main
from reference_model import ROTARY_TABLE_OPS
from smollm2 import smollm2_gguf


@pytest.fixture(scope="module")
def loaded(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2).eval(), AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}])
def test_tokens_are_identical(loaded, tmp_path, settings):
    model, tokenizer = loaded
    inputs = tokenizer("The physical hardware limits", return_tensors="pt")
    torch.manual_seed(11)
    expected = model.generate(**inputs, max_new_tokens=12, **settings)
    torch.manual_seed(11)
    with lifetrace.trace(model, tokenizer=tokenizer, out=tmp_path / "t") as trace:
        generated = model.generate(**inputs, max_new_tokens=12, **settings)
    assert torch.equal(expected, generated)
    assert trace.meta["output"] == tokenizer.batch_decode(generated[:, 4:], skip_special_tokens=True)
    assert trace.meta["prompt"] == ["The physical hardware limits"]


def test_a_trace_of_64_tokens_is_small(loaded, tmp_path):
    model, tokenizer = loaded
    inputs = tokenizer("The physical hardware limits", return_tensors="pt")
    with lifetrace.trace(model, tokenizer=tokenizer, out=tmp_path / "t") as trace:
        model.generate(**inputs, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    size = sum(file.stat().st_size for file in trace.path.rglob("*") if file.is_file())
    assert len(trace.steps) == 64
    assert size < 300_000


def test_prefill_and_decode_are_limited_by_different_things(loaded, tmp_path):
    """At 1,000 GFLOP/s and 100 GB/s: 512 tokens need 118 GFLOP, 118 ms, against 538 MB of weights, 5.4 ms.

    A decode step moves the same weights for 0.27 GFLOP, 0.3 ms, and launches 1,097 operators of 1 µs (more in older
    versions of transformers).
    """
    model, _ = loaded
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        model.generate(torch.arange(512)[None] + 100, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert trace.steps.op_count.tolist() == [30 * (2 * 6 + 17 + 5 + 2) + 10 + ROTARY_TABLE_OPS] * 4
    prefill, decode = judge(lifetrace.read_trace(tmp_path / "t")).phases
    assert (prefill.verdict.bound, decode.verdict.bound) == ("compute", "memory")
    assert prefill.verdict.compute_ns == pytest.approx(118e6, rel=0.01)
    assert decode.verdict.memory_ns / decode.steps == pytest.approx(5.5e6, rel=0.03)


def test_the_command_line_with_a_quantized_file_and_the_chat_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["run", "--model", str(smollm2_gguf()), "--chat", "--prompt", "Say hello.", "--max-new-tokens", "4"]
    quick = ["--repeats", "1", "--warmup", "0", "--no-report", "--json", "--out", "t"]
    result = CliRunner().invoke(main, [*command, *quick], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["model"]["parameters"] == 134_515_008
    assert document["overhead"]["tokens_identical"] is True
    prompt = lifetrace.read_trace("t").tokens.query("source == 'prompt'")
    assert "user" in prompt.text.tolist()
    assert prompt.is_special.any()
