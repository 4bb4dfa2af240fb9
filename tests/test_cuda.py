"""What only a GPU can show; skipped where there is none."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace.hooks.memory import peak_reader
from lifetrace.session import Options, Session
from reference_model import R_SIZES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible here"),
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval().cuda()


@pytest.fixture
def prompt():
    return torch.arange(3, 15, device="cuda")[None]


def test_tokens_are_identical_and_device_times_are_there(model, prompt, tmp_path):
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with lifetrace.trace(model, out=tmp_path / "t", detail="module") as trace:
        generated = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(expected, generated)
    modules = trace.spans[trace.spans.module.notna()]
    assert modules.device_ns.notna().all()
    assert (modules.device_ns >= 0).all()
    assert trace.steps.device_ns.notna().all()
    assert trace.steps.mem_peak_bytes.notna().all()
    assert trace.steps.flops_dense.sum() == 5_434_368


def test_a_sleeping_kernel_shows_in_device_time(model, prompt, tmp_path):
    model.generate(prompt, max_new_tokens=2)
    cycles = 50_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    slept_ns = start.elapsed_time(end) * 1e6
    handle = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: torch.cuda._sleep(cycles))
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        model.generate(prompt, max_new_tokens=3, do_sample=False)
    handle.remove()
    mlp = trace.spans[trace.spans.part == "mlp"]
    assert (mlp[mlp.layer == 2].device_ns > 0.9 * slept_ns).all()
    assert (mlp[mlp.layer != 2].device_ns < 0.5 * slept_ns).all()


def test_no_mark_waits_for_the_device(model, prompt, tmp_path):
    with lifetrace.trace(model, out=tmp_path / "t", detail="module"), torch.no_grad():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                model(prompt, use_cache=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_by_stage_is_the_allocators_own(model, prompt, tmp_path):
    session = Session(model, tmp_path / "t", Options())
    session.start()
    model.generate(prompt, max_new_tokens=3, do_sample=False)
    session.detach()
    session.measure_memory(
        lambda: model.generate(prompt, max_new_tokens=3, do_sample=False), peak_reader(torch.device("cuda"))
    )
    session.finish("complete")
    spans = lifetrace.read_trace(tmp_path / "t").spans
    layers = spans[(spans.stage == "layer") & spans.part.isna()]
    assert layers.mem_peak_bytes.notna().all()
    assert (layers.mem_peak_bytes >= layers.mem_allocated_bytes).all()
    assert layers.mem_allocated_bytes.max() <= torch.cuda.max_memory_allocated() + 2**20
